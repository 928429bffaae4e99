"""Chooses the layers of an executor with `layers = "auto"` when it starts (docs/federation.md).

The rule is that of PETALS (Borzunov et al., 2023): of all contiguous ranges of the provider's length, take that whose
least served layer is served least; then compare the second least served layer, and so on. If ranges are equal in all
layers, the first one is taken, so providers with the same descriptors decide alike. Every executor counts once, and
layers with fewer operators come first. A dishonest registry can cause a bad choice, and nothing else.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from provider import logs
from provider.announce.announcer import trust_of
from provider.config.schema import AUTO, ProviderConfig
from provider.products.model import open_store
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import newest_of
from symbiosis_priv.registry.protocol import RegistryClient

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_FIRST_LAYER: Final = "0"
_ENOUGH_OPERATORS: Final = 2


class Placed(NamedTuple):
    """An executor as others see it."""

    operator: str
    layers: LayerRange


class Served(NamedTuple):
    """The number of operators that serve a layer, at most 2, and the number of their executors."""

    operators: int = 0
    executors: int = 0


def coverage(layers: int, placed: Iterable[Placed]) -> list[Served]:
    """The numbers of operators and executors that serve each layer of a model."""
    operators: list[list[str]] = [[] for _ in range(layers)]  # of each executor
    for one in placed:
        for layer in range(one.layers.first, min(one.layers.last + 1, layers)):
            operators[layer].append(one.operator)
    return [Served(min(len(set(names)), _ENOUGH_OPERATORS), len(names)) for names in operators]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of `length` layers that is served least; all layers if the model has fewer."""
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)


def placed(config: ProviderConfig, *, progress: Progress | None = None) -> ProviderConfig:
    """Returns the configuration with chosen layers in place of `layers = "auto"`; otherwise the same configuration.
    Raises `ConfigError`: no registry can be reached; `CertificateError`: the authority's or the provider's certificate
    cannot be used; `CheckpointError`, `UnsupportedModelError`: the model cannot be read or served."""
    if config.model.layers != AUTO:
        return config
    # the digest covers all layers, and only the chosen ones are packed later
    manifest = open_store(unplaced(config)).manifest(progress=progress)
    served = coverage(manifest.layers[-1] + 1, _others(config, manifest.digest))
    length = config.registry.capacity_layers
    assert length is not None, "the configuration requires it"
    chosen = most_needed(served, length)
    least = min(served[chosen.first : chosen.last + 1])
    log.info("placed", layers=str(chosen), operators_there=least.operators, executors_there=least.executors)
    return _with_layers(config, str(chosen))


def unplaced(config: ProviderConfig) -> ProviderConfig:
    """Returns the configuration without `layers = "auto"`, to compute the model's digest, which covers all layers."""
    return _with_layers(config, _FIRST_LAYER) if config.model.layers == AUTO else config


def _others(config: ProviderConfig, model_digest: str) -> list[Placed]:
    """The other executors of the model that stay."""
    registry, trust = config.registry, trust_of(config.registry)
    own = key_fingerprint(load_certificates(config.tls.certificate)[0])
    listed: list[bytes] = []
    failures = []
    for address in registry.announce:
        try:
            with RegistryClient(address, trust, deadline_s=_DEADLINE_S) as client:
                listed += client.list(model_digest)
        except SymbiosisError as error:
            failures.append(str(error))
    if len(failures) == len(registry.announce):
        raise ConfigError(
            f'layers = "auto" needs a registry, and none can be reached ({failures[0]}): start one, or name the layers'
        )
    found, refused = newest_of(listed, trust, now=time.time())
    for reason, count in refused.items():
        log.info("not_believed", reason=reason, descriptors=count)
    return [
        Placed(plain(one.operator), one.descriptor.layers)
        for one in found
        if one.descriptor.model_digest == model_digest and one.key != own and not one.descriptor.draining
    ]


def _with_layers(config: ProviderConfig, layers: str) -> ProviderConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, layers=layers))
