"""Announces an executor to registries, and chooses the layers of a new one (`layers = "auto"`).

An executor announces itself at the start, before each descriptor expires, when the certificate changes, and at the end.
It tries again if a registry cannot be reached, and serves tenants with or without registries.

A new provider with `layers = "auto"` asks the registries which layers are served, checks the executors' signatures, and
chooses the layers that its federation needs most. A dishonest registry can cause a bad choice, and nothing else.

The rule of the choice is that of PETALS (Borzunov et al., 2023): of all contiguous ranges of the provider's length,
take the range whose least served layer is served least; if ranges are equal, compare the second least served layer,
and so on. If ranges are equal in all layers, the first range is taken, so providers with the same descriptors decide
alike. An executor states its own capacity, and could keep all other providers away from its layers by a huge one. So
layers with fewer operators come first, regardless of capacity, and a capacity counts at most four times the median.
"""

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from provider import logs
from provider.config.schema import AUTO, AnnounceConfig, ProviderConfig
from provider.products.model import open_store
from symbiosis_priv.certificates.reading import Identity, key_fingerprint, load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange, whole_layers
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, DescriptorError, SymbiosisError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.registry.descriptor import MS, Trust, VerifiedDescriptor, describe, newest_of, verify
from symbiosis_priv.registry.protocol import RegistryClient
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_LEAVE_S: Final = 3.0
_FIRST_LAYER: Final = "0"
_RETRY_S: Final = 10.0
_ENOUGH_OPERATORS: Final = 2
_MOST_TIMES_USUAL: Final = 4.0  # capacity that counts, relative to the median
_JITTER: Final = 0.2  # random share of a pause, so that providers that start together announce at different times


def trust_of(config: AnnounceConfig) -> Trust:
    """Read the authorities of the federation. Raises `CertificateError`."""
    assert config.authority is not None, "AnnounceConfig checks it"
    return Trust.load(config.authority, config.revoked)


class Announcer:
    """Announces one executor, which serves the layer groups `served`, from a background thread. Raises
    `CertificateError` if the authority's certificate cannot be read, `ConfigError` if tenants would refuse this
    executor's descriptor."""

    def __init__(self, config: ProviderConfig, *, address: str, manifest: Manifest, served: range) -> None:
        self._registry = config.registry
        self._identity = Identity(config.tls.certificate, config.tls.key)
        self._address = parse_address(config.registry.address or address)
        self._manifest = manifest
        layers = whole_layers(served, manifest.layers)
        self._layers = LayerRange(layers[0], layers[-1])
        self._issued = 0
        self._accepted = dict.fromkeys(config.registry.announce, False)
        self._lock = threading.Lock()  # two descriptors are never issued in one millisecond
        self._leaving = False
        self._announcing_to: str | None = None
        try:
            verify(self._describe(), trust_of(self._registry), now=time.time())
        except DescriptorError as error:
            raise ConfigError(
                f"[registry]: tenants would refuse this executor at {config.registry.address or address}: {error}. "
                f"Ask for a certificate with `symbiosis-priv keys request --provider`, have it signed with --operator "
                f"and --host by the owner of {self._registry.authority}, and set address to one of its hosts"
            ) from error
        self._periodic = Periodic(
            self._announce_to_all, every_s=_RETRY_S, name="announcing to registries", jitter=_JITTER, at_once=True
        )

    @property
    def accepted(self) -> dict[str, bool]:
        """For each registry: True if the registry accepted the last announcement."""
        return dict(self._accepted)

    def start(self) -> None:
        self._periodic.start()

    def renew(self) -> None:
        """Announce again immediately, because the configuration or the certificate may have changed."""
        self._periodic.wake()

    def leave(self) -> None:
        """Announce that this executor is about to stop, and announce nothing afterwards. Returns within seconds."""
        with self._lock:
            self._leaving = True
        self._periodic.stop()
        threads = [
            threading.Thread(target=self._announce, args=(address, _LEAVE_S), name="leave", daemon=True)
            for address, accepted in self._accepted.items()
            if accepted or address == self._announcing_to  # which may already list the executor
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LEAVE_S + 1.0)

    def _announce_to_all(self) -> None:
        for address in self._accepted:
            if not self._leaving:
                self._announcing_to = address
                self._accepted[address] = self._announce(address, _DEADLINE_S)
                self._announcing_to = None
        pause_s = self._registry.lifetime_s / 3
        self._periodic.every_s = pause_s if all(self._accepted.values()) else min(pause_s, _RETRY_S)

    def _announce(self, address: str, deadline_s: float) -> bool:
        try:
            with RegistryClient(address, trust_of(self._registry), deadline_s=deadline_s) as registry:
                registry.announce(self._describe())
        except SymbiosisError as error:
            # The registry's error text is untrusted: the log names the registry and the kind of error only.
            log.often("not_announced", registry=address, error=type(error).__name__)
            return False
        log.info("announced", registry=address, layers=str(self._layers))
        return True

    def _describe(self) -> bytes:
        with self._lock:  # once `leave` was called, every later descriptor must say "draining"
            issued = self._issued = max(self._issued + 1, round(MS * time.time()))
            draining = self._leaving
        return describe(
            self._identity,
            address=self._address,
            model_digest=self._manifest.digest,
            weight_bits=self._manifest.weight_bits,
            layers=self._layers,
            capacity=self._registry.capacity,
            issued=issued,
            lifetime_s=self._registry.lifetime_s,
            draining=draining,
        )


class Served(NamedTuple):
    """The number of operators that serve a layer, at most 2, and the sum of their capacities."""

    operators: int = 0
    capacity: float = 0.0


def coverage(layers: int, announced: Iterable[VerifiedDescriptor]) -> list[Served]:
    """The operators and the capacity that serve each layer of a model. Draining executors do not count."""
    staying = [one for one in announced if not one.descriptor.draining]
    most = _MOST_TIMES_USUAL * statistics.median_low([one.descriptor.capacity for one in staying] or [0.0])
    operators: list[set[str]] = [set() for _ in range(layers)]
    capacities = [0.0] * layers
    for one in staying:
        for layer in range(one.descriptor.first_layer, min(one.descriptor.last_layer + 1, layers)):
            operators[layer].add(plain(one.operator))
            capacities[layer] += min(one.descriptor.capacity, most)
    return [
        Served(min(len(names), _ENOUGH_OPERATORS), capacity)
        for names, capacity in zip(operators, capacities, strict=True)
    ]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of `length` layers that is served least; all layers if the model has fewer."""
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)


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
    others = [one for one in found if one.descriptor.model_digest == manifest.digest and one.key != own]
    served = coverage(manifest.layers[-1] + 1, others)
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
