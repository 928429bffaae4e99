"""Registries for tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from provider.registry.server import RegistryServer
from tests.registries import CredulousRegistry, registry_config
from tests.vouching import Vouching

Serve = Callable[..., RegistryServer]


@pytest.fixture
def serve(vouching: Vouching) -> Iterator[Serve]:
    """`serve(name=..., connects_back=..., <limits>)`: a running registry."""
    with ExitStack() as servers:

        def serve(*, name: str = "registry", connects_back: bool = False, **changes: Any) -> RegistryServer:
            config = registry_config(vouching, name=name, **changes)
            return servers.enter_context((RegistryServer if connects_back else CredulousRegistry)(config))

        yield serve
