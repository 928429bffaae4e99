"""Providers on this machine, and the configuration of a measured tenant that uses them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.system.files import write_atomically
from tenant.bench.cli_options import RELAY, Effort
from tenant.model.hf import RemoteConfig
from tenant.session.traffic import Transport

START_S = 900.0  # providers quantise the model at their start


def provide(model: Path, directory: Path, *, threads: int, **options: Any) -> LocalFederation:
    """Return providers of a checkpoint, not yet started, with `threads` torch threads each.

    Args:
        directory: parent folder of the providers' files.
    """
    given: dict[str, Any] = {"provider_options": {"executor": {"threads": threads}}, "deadline_s": START_S, **options}
    return LocalFederation(model, directory / "federation", **given)


class Masking(NamedTuple):
    """A masking scheme, and how matrices are sent."""

    scheme: str
    transport: Transport


def parsed(masking: str) -> Masking:
    """Parse an option such as `pad`, `pad/24` or `pad/24/relay`, which `cli_options.scheme` has checked."""
    scheme, *flags = masking.split("/")
    return Masking(scheme, Transport(ring_bits=24 if "24" in flags else 32, relay=RELAY in flags))


def relayed(maskings: Iterable[str]) -> bool:
    """Returns True if one of these variants relays effects, which providers must then allow."""
    return any(parsed(masking).transport.relay for masking in maskings)


def remote_config(
    local: LocalFederation, masking: str, effort: Effort, *, federation: Path | None = None
) -> RemoteConfig:
    """Return the configuration of a tenant of these providers.

    Args:
        masking: a scheme, `pad/24` in a ring of 24 bits, or `pad/24/relay` with relayed effects.
        federation: the federation file; that of the providers if None.
    """
    scheme, transport = parsed(masking)
    file = federation or local.federation
    return RemoteConfig(
        federation=file if transport.relay else _without_relay(file),
        masking=scheme,
        ring_bits=transport.ring_bits,
        cache=local.cache,
        pool_memory_mib=effort.pool_memory_mib,
    )


def _without_relay(federation: Path) -> Path:
    """Write a copy of a federation file without relay. Returns its path."""
    direct = federation.with_name(f"{federation.stem}-direct{federation.suffix}")
    write_atomically(direct, federation.read_bytes().replace(b"relay = true", b"relay = false"))
    return direct
