"""A tiny Llama for the endpoint, and adapters."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tenant import RemoteConfig
from tenant.endpoint import serving
from tenant.endpoint.api.service import Service
from tenant.endpoint.options import Serving
from tenant.model.loading import load_language_model, load_tokenizer
from tests.adapters import write_adapter
from tests.waiting import answering


@contextmanager
def served_at(
    model: Path, remote: RemoteConfig, *, key: str, options: Serving, adapters: dict[str, Path] | None = None
) -> Iterator[tuple[Service, str]]:
    """The endpoint of `tenant serve` on loopback, and its address; its model is `tiny`."""
    with serving.opened(model, remote, name="tiny", adapters=adapters or {}, options=options) as service:
        listener = socket.create_server(("127.0.0.1", 0))
        server = serving.server(service, listener, keys=(key,), masking=remote.masking, options=options)
        with answering(server):
            yield service, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def checkpoint(tiny: Path) -> Path:
    return tiny


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapter `lora`."""
    folder = tmp_path_factory.mktemp("adapters")
    config = LoraConfig(target_modules="all-linear")
    write_adapter(load_language_model(checkpoint), folder / "lora", config, scale=0.2)
    return folder
