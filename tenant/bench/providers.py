"""Providers on this machine, and the configuration of a measured tenant that uses them."""

from pathlib import Path
from typing import Any

from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.limits import RingBits
from tenant.bench.cli_options import Effort
from tenant.model.hf import RemoteConfig

START_S = 900.0  # a wide model is quantised first


def provide(model: Path, directory: Path, *, threads: int, **options: Any) -> LocalFederation:
    """Providers of a checkpoint, with this number of torch threads each; not yet started.

    Args:
        directory: folder in which to make `federation`.
    """
    given: dict[str, Any] = {"provider_options": {"executor": {"threads": threads}}, "deadline_s": START_S, **options}
    return LocalFederation(model, directory / "federation", **given)


def parsed(masking: str) -> tuple[str, RingBits]:
    """The scheme and the ring of an option such as `pad` or `pad/24`."""
    scheme, _, bits = masking.partition("/")
    return scheme, 24 if bits == "24" else 32


def remote_config(local: LocalFederation, masking: str, effort: Effort) -> RemoteConfig:
    """The configuration of a tenant of these providers. `masking` is a scheme, or `pad/24`: in a ring of 24 bits."""
    scheme, ring_bits = parsed(masking)
    return RemoteConfig(
        federation=local.federation,
        masking=scheme,
        ring_bits=ring_bits,
        cache=local.cache,
        pool_memory_mib=effort.pool_memory_mib,
    )
