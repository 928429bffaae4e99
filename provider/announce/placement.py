"""Chooses the layers of an executor with `layers = "auto:16"` when it starts (docs/federation.md).

The rule is that of PETALS (Borzunov et al., 2023): of all contiguous ranges of so many layers, take that whose least
served layer is served least; then compare the second least served layer, and so on. If ranges are equal in all layers,
the first one is taken. Layers of one operator come before layers of two; then the executors count. A dishonest registry
can cause a bad choice, and nothing else.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from provider import logs
from provider.announce.announcer import trust_of
from provider.config.schema import ProviderConfig
from provider.products.model import open_store
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, verify_all
from symbiosis_priv.registry.protocol import RegistryClient

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_ENOUGH_OPERATORS: Final = 2

Served = tuple[int, int]
"""The number of operators that serve a layer, at most 2, and the number of their executors."""


def coverage(layers: int, placed: Iterable[tuple[str, LayerRange]]) -> list[Served]:
    """How each layer of a model is served by executors, each with its operator and its layers."""
    operators: list[list[str]] = [[] for _ in range(layers)]  # of each executor
    for operator, own in placed:
        for layer in range(own.first, min(own.last + 1, layers)):
            operators[layer].append(operator)
    return [(min(len(set(names)), _ENOUGH_OPERATORS), len(names)) for names in operators]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of `length` layers that is served least; all layers if the model has fewer."""
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)


def placed(config: ProviderConfig, *, progress: Progress | None = None) -> ProviderConfig:
    """Returns the configuration with chosen layers in place of `layers = "auto:16"`; otherwise the same configuration.
    Raises `ConfigError`: no registry can be reached; `CertificateError`: the authority's or the provider's certificate
    cannot be used; `CheckpointError`, `UnsupportedModelError`: the model cannot be read or served."""
    length = config.model.auto_layers
    if length is None:
        return config
    manifest = open_store(config.before_layers_are_chosen()).manifest(progress=progress)
    served = coverage(manifest.layers[-1] + 1, _others(config, manifest.digest))
    chosen = most_needed(served, length)
    operators, executors = min(served[chosen.first : chosen.last + 1])
    log.info("placed", layers=str(chosen), operators_there=operators, executors_there=executors)
    return config.with_layers(str(chosen))


def _others(config: ProviderConfig, model_digest: str) -> list[tuple[str, LayerRange]]:
    """The other executors of the model that stay, with the layers of their newest descriptors."""
    registry, trust = config.registry, trust_of(config.registry)
    own = key_fingerprint(load_certificates(config.tls.certificate)[0])
    found, failures = list[VerifiedDescriptor](), []
    for address in registry.announce:
        try:
            with RegistryClient(address, trust, deadline_s=_DEADLINE_S) as client:
                listed = client.list(model_digest)
        except SymbiosisError as error:
            failures.append(str(error))
            continue
        valid, refused = verify_all(listed, trust, now=time.time())
        found += valid
        for reason, count in refused.items():
            log.often("not_believed", registry=address, reason=reason, descriptors=count)
    if len(failures) == len(registry.announce):
        raise ConfigError(
            f"layers = {config.model.layers!r} needs a registry, and none can be reached ({failures[0]}): start one, "
            f'or write the layers: layers = "0-15"'
        )
    newest = {one.key: one for one in sorted(found, key=lambda one: one.age)}
    return [
        (plain(one.operator), one.descriptor.layers)
        for one in newest.values()
        if one.descriptor.model_digest == model_digest and one.key != own and not one.descriptor.draining
    ]
