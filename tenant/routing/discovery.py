"""Finds executors in registries. Each executor is trusted for its own signed descriptor only.

Theory of operation. The tenant asks registries which executors serve the model, and does not trust their answers. A
descriptor counts if the federation's authority has signed for the executor and its operator (`descriptor.verify`). A
descriptor adds one executor and changes nothing else (rules 10 and 11). A discovered executor is verified like any
other, and is asked only under a masking scheme that hides rows from it (`Scheme.check`). So a registry that lies,
withholds or repeats descriptors can deny service, and nothing else.

An executor is refused if it shares a name, a key, a certificate or an address with a provider of the file (rule 11: the
file's entry is used), if its company has a helper (rule 8), or if its address is loopback or link-local. A *spare*
helper of its company is enough, because a registry could otherwise influence which helpers hold the seeds.

The newest descriptor of a key counts. The tenant remembers it as long as an older one could be valid. An executor
stays until its last descriptor expires, also while no registry answers.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError, SymbiosisError, one_line
from symbiosis_priv.federation import Federation, Peer, Traits, in_common, traits
from symbiosis_priv.federation.parties import plain_host
from symbiosis_priv.network.addresses import is_internal
from symbiosis_priv.registry.descriptor import CLOCK_TOLERANCE_S, MEMORY_S, MS, Trust, VerifiedDescriptor, verify_all
from symbiosis_priv.registry.protocol import RegistryClient
from symbiosis_priv.system.pacing import Periodic

log = logging.getLogger(__name__)

MAX_FOUND: Final = 64
"""Largest number of executors from registries that a tenant uses in addition to those of its file."""
INTERVAL_S: Final = 30.0
DEADLINE_S: Final = 10.0

_JITTER: Final = 0.2  # random share of a pause, so that tenants that started together do not ask at the same times


@dataclass(frozen=True)
class Discovered:
    """Executors whose descriptors were verified: those that the tenant uses, and why others are not used, by name."""

    executors: tuple[Peer, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def admitted(federation: Federation, announced: Iterable[VerifiedDescriptor], *, now: float) -> Discovered:
    """Decide which announced executors a tenant uses, whatever their order. `federation`: the tenant's own file.
    `announced`: the newest descriptor of each key. `now`: seconds since 1970."""
    listed = [traits(peer) for peer in federation.peers]
    local = federation.local
    candidates: list[Peer] = []
    taken: list[Traits] = []
    refused: dict[str, str] = {}
    # Two executors with one name or address cannot both be right: the newer descriptor counts.
    for one in sorted(announced, key=lambda one: one.age, reverse=True):
        descriptor = one.descriptor
        if descriptor.expires / MS < now - CLOCK_TOLERANCE_S or descriptor.draining:
            continue
        if (descriptor.model_digest, descriptor.weight_bits) != (federation.model_digest, federation.weight_bits):
            continue
        where = descriptor.host, descriptor.port, one.certificate
        peer = Peer(one.name, one.operator, "executor", *where, layers=descriptor.layers, remote_only=not local)
        own = traits(peer)
        if shared := {what for other in listed for what in in_common(own, other)}:
            if "public key" not in shared:  # otherwise it is that provider itself, and its entry in the file is used
                refused[one.name] = f"a provider of the federation file has the same {', '.join(sorted(shared))}"
        elif not federation.admissible(peer, federation.helpers):
            refused[one.name] = f"{one.operator} is one company with a helper (rule 8)"
        elif peer.remote_only and is_internal(plain_host(peer.host)):
            refused[one.name] = f"{peer.host} is not an address that a registry may lead to"
        elif any(in_common(own, other) for other in taken):
            refused[one.name] = "an executor that was announced later has its name or its address"
        else:
            candidates.append(peer)
            taken.append(own)
    # The first executor of every company, then the second of every company, and so on. Sorted by name, so the choice
    # changes only if an executor comes or goes.
    by_company: defaultdict[Hashable, list[Peer]] = defaultdict(list)
    for peer in sorted(candidates, key=lambda peer: peer.name):
        by_company[federation.company_of(peer.operator)].append(peer)
    in_turn = [peer for turn in zip_longest(*by_company.values()) for peer in turn if peer is not None]
    refused |= {peer.name: f"there are {MAX_FOUND} already" for peer in in_turn[MAX_FOUND:]}
    return Discovered(tuple(sorted(in_turn[:MAX_FOUND], key=lambda peer: peer.name)), refused)


class Discovery:
    """Asks the registries of a federation: first in `refresh`, later in a background thread, which calls `changed` with
    the new list when executors have come or gone. `found`: those found so far. A forked child calls `abandon` and makes
    its own. Raises `CertificateError` if the authority's certificate cannot be read."""

    def __init__(
        self,
        federation: Federation,
        *,
        changed: Callable[[tuple[Peer, ...]], None] = lambda executors: None,
        interval_s: float = INTERVAL_S,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert federation.registries is not None, "the caller checks that the file has a [registry]"
        self._federation = federation
        self._registries = federation.registries
        self._trust = Trust.load(self._registries.authority, self._registries.revoked)
        self._changed = changed
        self._deadline_s = deadline_s
        self._clock = clock
        self._newest: dict[str, VerifiedDescriptor] = {}
        self.found = Discovered()
        self._silent: set[str] = set()  # registries whose failure has been logged
        self._rejected: dict[str, Counter[str]] = {}  # per registry, the refusals that were logged
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()  # guards the descriptors and the open connections
        self._asking: dict[str, RegistryClient] = {}
        self._closed = False
        self._periodic = Periodic(self.refresh, every_s=interval_s, name="asking the registries", jitter=_JITTER)

    def start(self) -> None:
        self._periodic.start()

    def refresh(self) -> tuple[Peer, ...]:
        """Ask all registries in parallel. Returns the executors known after the answers or the deadline."""
        with self._refreshing:
            askers = [
                threading.Thread(target=self._ask, args=(address,), name="registry", daemon=True)
                for address in self._registries.addresses
            ]
            for thread in askers:
                thread.start()
            until = time.monotonic() + self._deadline_s
            for thread in askers:
                thread.join(max(0.0, until - time.monotonic()))
            return self.update()

    def add(self, listed: Iterable[bytes]) -> Counter[str]:
        """Store the descriptors that a registry lists. Returns the number of refused descriptors by reason."""
        valid, rejected = verify_all(listed, self._trust, now=self._clock())
        for one in valid:
            with self._lock:
                known = self._newest.get(one.key)
                if known is None or one.age >= known.age:
                    self._newest[one.key] = one
                else:
                    rejected["a newer descriptor of the same executor is known"] += 1
        return rejected

    def update(self) -> tuple[Peer, ...]:
        """Read the revocation list again. Returns the known executors that are not revoked."""
        if self._registries.revoked is not None:
            try:
                revoked = load_revoked(self._registries.revoked, known=self._trust.revoked)
            except CertificateError as error:
                log.error("recently revoked executors may still be used: %s", error)
            else:
                self._trust = Trust(self._trust.authorities, revoked)
        now = self._clock()
        with self._lock:
            past = round(MS * (now - MEMORY_S))
            self._newest = {key: one for key, one in self._newest.items() if one.descriptor.issued > past}
            valid = [one for one in self._newest.values() if mark_of(one.certificate) not in self._trust.revoked]
            before, found = self.found, admitted(self._federation, valid, now=now)
            self.found = found
        for name in found.refused.keys() - before.refused.keys():
            log.warning("executor %s is not used: %s", name, found.refused[name])
        if found.executors != before.executors and not self._closed:
            for peer in set(found.executors) - set(before.executors):
                log.info("executor %s of %s was found, for layers %s", peer.name, peer.operator, peer.layers)
            for peer in set(before.executors) - set(found.executors):
                log.info("executor %s of %s is not listed any more", peer.name, peer.operator)
            self._changed(found.executors)
        return found.executors

    def close(self, timeout: float) -> bool:
        """Stop asking. Returns True if the thread has ended within `timeout` seconds."""
        self._closed = True
        with self._lock:
            for registry in self._asking.values():
                registry.shut()
        return self._periodic.close(timeout)

    def abandon(self) -> None:
        """Drop the parent's connections in a forked child, without sending a byte."""
        self._closed = True
        for registry in self._asking.values():
            registry.close()

    def _ask(self, address: str) -> None:
        registry = RegistryClient(address, self._trust, deadline_s=self._deadline_s)
        with self._lock:
            if self._closed or address in self._asking:
                return
            self._asking[address] = registry
        try:
            with registry:
                listed = registry.list(self._federation.model_digest)
        except SymbiosisError as error:
            if address not in self._silent and not self._closed:
                self._silent.add(address)
                log.warning("registry %s cannot be used now: %s", address, one_line(str(error)))
            return
        finally:
            with self._lock:
                del self._asking[address]
        if address in self._silent:
            self._silent.discard(address)
            log.warning("registry %s answers again", address)
        rejected = self.add(listed)
        # logged once, because the registry is asked again and again
        if rejected != self._rejected.get(address, Counter()):
            self._rejected[address] = rejected
            for why, count in rejected.items():
                log.info("registry %s lists %d invalid descriptors of %d: %s", address, count, len(listed), why)
