"""`layers = "auto"`: a new provider serves the layers that its federation needs most.

The provider asks the registries which layers are served, checks the executors' signatures, and chooses layers
(`symbiosis_priv.registry.coverage`). A dishonest registry can cause a bad choice of layers, and nothing else.
"""

import time
from typing import Final

import msgspec

from provider import logs
from provider.announce.announcer import trust_of
from provider.config.schema import AUTO, ProviderConfig
from provider.products.model import open_store
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.registry.coverage import coverage, most_needed
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, newest_of
from symbiosis_priv.registry.protocol import RegistryClient

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_FIRST_LAYER: Final = "0"


def placed(config: ProviderConfig, *, progress: Progress | None = None) -> ProviderConfig:
    """Returns the configuration with chosen layers in place of `layers = "auto"`; otherwise the same configuration.

    Raises:
        ConfigError: no registry can be reached.
        CertificateError: the authority's or the provider's certificate cannot be used.
        CheckpointError, UnsupportedModelError: the model cannot be read or served.
    """
    if config.model.layers != AUTO:
        return config
    # The digest covers all layers, so the store reads the whole model. Only the chosen layers are packed later.
    manifest = open_store(unplaced(config)).manifest(progress=progress)
    served = coverage(manifest.layers[-1] + 1, _others(config, manifest))
    length = config.registry.capacity_layers
    assert length is not None, "the configuration requires it"
    chosen = most_needed(served, length)
    least = min(served[chosen.first : chosen.last + 1])
    log.info("placed", layers=str(chosen), operators_there=least.operators, capacity_there=least.capacity)
    return _with_layers(config, str(chosen))


def unplaced(config: ProviderConfig) -> ProviderConfig:
    """Returns the configuration without `layers = "auto"`, to compute the model's digest, which covers all layers."""
    return _with_layers(config, _FIRST_LAYER) if config.model.layers == AUTO else config


def _with_layers(config: ProviderConfig, layers: str) -> ProviderConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, layers=layers))


def _others(config: ProviderConfig, manifest: Manifest) -> list[VerifiedDescriptor]:
    """The other executors of the model, from all registries that answer."""
    trust = trust_of(config.registry)
    own = key_fingerprint(load_certificates(config.tls.certificate)[0])
    listed: list[bytes] = []
    failures = []
    for address in config.registry.announce:
        try:
            with RegistryClient(address, trust, deadline_s=_DEADLINE_S) as registry:
                listed += registry.list(manifest.digest)
        except SymbiosisError as error:
            failures.append(str(error))
    if len(failures) == len(config.registry.announce):
        raise ConfigError(
            f'layers = "auto" needs a registry, and none can be reached ({failures[0]}): start one, or name the layers'
        )
    found, refused = newest_of(listed, trust, now=time.time())
    for reason, count in refused.items():
        log.info("not_believed", reason=reason, descriptors=count)
    return [one for one in found if one.descriptor.model_digest == manifest.digest and one.key != own]
