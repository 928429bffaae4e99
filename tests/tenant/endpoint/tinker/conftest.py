"""Tinker's API on loopback: the tiny Llama in `simulate`, and the official client, unchanged."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tenant import RemoteConfig
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tests.waiting import answering

KEYS = ("tml-first-key-of-the-test", "tml-second-key-of-the-test")


@pytest.fixture(scope="session")
def tinker() -> Any:
    return pytest.importorskip("tinker")


@contextlib.contextmanager
def served(checkpoint: Path, folder: Path, *, keys: tuple[str, ...] = KEYS, name: str = "tiny") -> Iterator[str]:
    """The address of an endpoint."""
    options = Serving(tinker=folder, listen="127.0.0.1:0", api_key_file=Path("keys"))
    with ExitStack() as stack:
        listener = stack.enter_context(options.listener())
        service = stack.enter_context(
            serving.opened(
                checkpoint,
                RemoteConfig(masking="simulate"),
                name=name,
                adapters={},
                options=options,
                clients=len(keys),
            )
        )
        server = serving.server(service, listener, keys=keys, masking="simulate", options=options)
        stack.enter_context(answering(server))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def address(tinker: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(checkpoint, tmp_path_factory.mktemp("checkpoints")) as address:
        yield address


@pytest.fixture
def connect(tinker: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`connect(0)` returns the official client with the first key."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ExitStack() as stack:

        def connected(number: int = 0) -> Any:
            return stack.enter_context(tinker.ServiceClient(base_url=address, api_key=KEYS[number]))

        yield connected
    collect()


def collect() -> None:
    """Free what clients have left: an open connection each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
