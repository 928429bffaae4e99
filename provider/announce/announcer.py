"""Tells registries what this executor serves: at its start, before that expires, when its certificate changes, and when
it leaves. A registry that cannot be reached is tried again; tenants are served whatever becomes of it.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Final

from provider import logs
from provider.config.schema import AnnounceConfig, ProviderConfig
from symbiosis_priv.certificates import Identity
from symbiosis_priv.checkpoints.layers import LayerRange, whole_layers
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ConfigError, DescriptorError, SymbiosisError
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.registry.descriptor import describe, verify
from symbiosis_priv.registry.queries import RegistryClient
from symbiosis_priv.registry.statements import MS, Trust

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_LEAVE_S: Final = 3.0
_RETRY_S: Final = 10.0
_JITTER: Final = 0.2  # of a pause, so that providers that started together do not stay together


def trust_of(config: AnnounceConfig) -> Trust:
    """Who vouches for a federation's providers. Raises `CertificateError`."""
    assert config.authority is not None, "the configuration sees to that"
    return Trust.load(config.authority, config.revoked)


class Announcer:
    """Announces one executor, in a thread of its own.

    Args:
        config: the provider's.
        address: `host:port` as bound.
        manifest: of the whole model.
        served: its layer groups.

    Raises:
        CertificateError: the authority's certificate cannot be read.
        ConfigError: what would be announced is not what anybody believes: the message says why.
    """

    def __init__(self, config: ProviderConfig, *, address: str, manifest: Manifest, served: range) -> None:
        self._registry = config.registry
        self._identity = Identity(config.tls.certificate, config.tls.key)
        self._address = parse_address(config.registry.address or address)
        self._manifest = manifest
        layers = whole_layers(served, manifest.layers)
        self._layers = LayerRange(layers[0], layers[-1])
        self._issued = 0
        self._taken = dict.fromkeys(config.registry.announce, False)
        self._lock = threading.Lock()  # over the moments of two descriptors
        self._wake = threading.Event()
        self._leaving = False
        try:
            verify(self._describe(), trust_of(self._registry), now=time.time())
        except DescriptorError as error:
            raise ConfigError(
                f"[registry]: nobody would believe that this executor is at {config.registry.address or address}: "
                f"{error}. Ask for a certificate with `symbiosis-priv keys request --provider`, have it signed with "
                f"--operator and --host by whoever has {self._registry.authority}, and set address to one of its hosts"
            ) from error
        self._thread = threading.Thread(target=self._run, name="announce", daemon=True)

    @property
    def taken(self) -> dict[str, bool]:
        """Whether each registry has taken the last announcement."""
        return dict(self._taken)

    def start(self) -> None:
        """Begin to announce."""
        self._thread.start()

    def now(self) -> None:
        """Announce again, soon: something may have changed."""
        self._wake.set()

    def leave(self) -> None:
        """Say that this executor is about to leave, and nothing more after that. Returns within some seconds."""
        with self._lock:
            self._leaving = True
        self._wake.set()
        messengers = [
            threading.Thread(target=self._say_farewell, args=(address,), name="leave", daemon=True)
            for address, taken in self._taken.items()
            if taken
        ]
        for thread in messengers:
            thread.start()
        for thread in messengers:
            thread.join(_LEAVE_S + 1.0)

    def _run(self) -> None:
        while not self._leaving:
            for address in self._taken:
                if not self._leaving:
                    self._taken[address] = self._tell(address)
            pause = self._registry.lifetime_s / 3
            if not all(self._taken.values()):
                pause = min(pause, _RETRY_S)
            self._wake.wait(pause * random.uniform(1 - _JITTER, 1))
            self._wake.clear()

    def _tell(self, address: str) -> bool:
        try:
            number = self._send(address, self._describe(), deadline_s=_DEADLINE_S)
        except SymbiosisError as error:
            # a registry's own words are its own: which of them is in trouble is enough for a log
            log.often("not_announced", registry=address, error=type(error).__name__)
            return False
        log.info("announced", registry=address, layers=str(self._layers), entry=number)
        return True

    def _say_farewell(self, address: str) -> None:
        try:
            self._send(address, self._describe(), deadline_s=_LEAVE_S)
        except SymbiosisError as error:
            log.often("not_announced", registry=address, error=type(error).__name__)

    def _send(self, address: str, data: bytes, *, deadline_s: float) -> int:
        context = registry_client_context(trust_of(self._registry).authorities)
        with RegistryClient(address, context, deadline_s=deadline_s) as registry:
            return registry.announce(data)

    def _describe(self) -> bytes:
        with self._lock:  # whatever is issued later than the farewell says the same
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
