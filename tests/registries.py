"""Registries for tests: an honest one, and one that lists prepared descriptors."""

from typing import Any

from provider.registry import RegistryConfig
from provider.registry.server import RegistryServer
from provider.registry.store import Store
from symbiosis_priv.registry.descriptor import Trust, VerifiedDescriptor
from tests.vouching import Vouching


def registry_config(vouching: Vouching, *, name: str = "registry", **changes: Any) -> RegistryConfig:
    """Configuration of a registry that the authority vouches for, on loopback."""
    identity = vouching.identity(name)
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "certificate": identity.certificate,
        "key": identity.key,
        "authority": vouching.authority.certificate,
        "requests_per_s": 1e6,
        "announcements_per_h": 1e6,
    }
    return RegistryConfig(**(values | changes))


class CredulousRegistry(RegistryServer):
    """A registry that does not connect back to executors, which need not run."""

    def _connect_back(self, new: VerifiedDescriptor, trust: Trust, peer: str) -> None:
        pass


class _Script(Store):
    def __init__(self) -> None:
        super().__init__()
        self.listing: list[bytes] = []

    def listed(self, model: str | None, *, now: float) -> list[bytes]:
        return list(self.listing)


class LyingRegistry(RegistryServer):
    """A registry with a valid certificate that lists prepared descriptors."""

    def __init__(self, config: RegistryConfig) -> None:
        super().__init__(config)
        self.script = self.store = _Script()

    def show(self, *listing: bytes) -> None:
        """List these descriptors from now on, in this order, regardless of announcements."""
        self.script.listing = list(listing)
