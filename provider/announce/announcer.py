"""Announces an executor to registries.

An executor announces itself at the start, before each descriptor expires, when the certificate changes, and at the end.
It tries again if a registry cannot be reached, and serves tenants with or without registries.
"""

import threading
import time
from typing import Final

from provider import logs
from provider.config.schema import AnnounceConfig, ProviderConfig
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.layers import LayerRange, whole_layers
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ConfigError, DescriptorError, ProviderError, SymbiosisError
from symbiosis_priv.network.addresses import parse_address, shown
from symbiosis_priv.network.wire import ErrorCode
from symbiosis_priv.registry.descriptor import MS, Trust, describe, verify
from symbiosis_priv.registry.protocol import RegistryClient
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_LEAVE_S: Final = 3.0
LIFETIME_S: Final = 900.0
_RETRY_S: Final = 10.0
_JITTER: Final = 0.2  # random share of a pause, so that providers that start together announce at different times


def trust_of(config: AnnounceConfig) -> Trust:
    """Read the authorities of the federation. Raises `CertificateError`."""
    assert config.authority is not None, "AnnounceConfig checks it"
    return Trust.load(config.authority, config.revoked)


class Announcer:
    """Announces one executor, which serves the layer groups `served`. Start it with `periodic.start()`;
    `periodic.wake()` announces a change at once. Raises `CertificateError` if the authority's certificate cannot be
    read, `ConfigError` if tenants would refuse this executor's descriptor."""

    def __init__(self, config: ProviderConfig, *, address: str, manifest: Manifest, served: range) -> None:
        self._registry = config.registry
        self._identity = Identity(config.tls.certificate, config.tls.key)
        self._address = parse_address(config.registry.address or address)
        self._manifest = manifest
        layers = whole_layers(served, manifest.layers)
        self._layers = LayerRange(layers[0], layers[-1])
        self._issued = 0
        self.accepted = dict.fromkeys(config.registry.announce, False)  # whether a registry took the last announcement
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
        self.periodic = Periodic(
            self._announce_to_all, every_s=_RETRY_S, name="announcing to registries", jitter=_JITTER, at_once=True
        )

    def leave(self) -> None:
        """Announce that this executor is about to stop, to all registries at once, and announce nothing afterwards.
        Takes `_LEAVE_S` at most."""
        with self._lock:
            self._leaving = True
        self.periodic.stop()
        until, ways = time.monotonic() + _LEAVE_S, list[threading.Thread]()
        for address, accepted in self.accepted.items():
            if accepted or address == self._announcing_to:  # which may already list the executor
                ways.append(threading.Thread(target=self._announce, args=(address, _LEAVE_S), daemon=True))
                ways[-1].start()
        for way in ways:
            way.join(max(0.0, until - time.monotonic()))

    def _announce_to_all(self) -> None:
        for address in self.accepted:
            if not self._leaving:
                self._announcing_to = address
                self.accepted[address] = self._announce(address, _DEADLINE_S)
                self._announcing_to = None
        pause_s = LIFETIME_S / 3
        self.periodic.every_s = pause_s if all(self.accepted.values()) else min(pause_s, _RETRY_S)

    def _announce(self, address: str, deadline_s: float) -> bool:
        try:
            with RegistryClient(address, trust_of(self._registry), deadline_s=deadline_s) as registry:
                registry.announce(self._describe())
        except SymbiosisError as error:
            # The registry's error text is untrusted: the log names the registry and the kind of error only.
            reason = None
            if isinstance(error, ProviderError) and error.code == ErrorCode.UNREACHABLE:
                reason = f"it cannot connect to {shown(*self._address)}: open the port, or set address under [registry]"
            log.often("not_announced", registry=address, error=type(error).__name__, reason=reason)
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
            issued=issued,
            lifetime_s=LIFETIME_S,
            draining=draining,
        )
