"""Follows another registry's log: a replica has every entry, the same hashes, and the registry's own signed heads.

It reads on when the registry is gone, and it is a witness: it follows only what continues the log that it has. A
registry that has told it something else before is reported, and not followed any further. Nor is one that says it has
forgotten what no registry forgets yet: a replica that began anew for it would have nothing left to witness.

Its disk is bounded by the log's own limit, whatever a registry and an executor make up together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from provider import logs
from provider.registry.storage import Log
from symbiosis_priv.errors import DescriptorError, StorageError, SymbiosisError
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S, verify_past
from symbiosis_priv.registry.history import Span, VouchedHead
from symbiosis_priv.registry.queries import RegistryClient
from symbiosis_priv.registry.statements import CLOCK_TOLERANCE_S, Trust

log = logs.EventLog(__name__)

_DEADLINE_S = 30.0


class Follower:
    """Brings a replica's log up to date, again and again, in a thread of its own.

    Args:
        own: the replica's log.
        source: address of the registry, or of another replica of it.
        trust: who vouches for executors and registries.
        interval_s: between two looks.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        own: Log,
        *,
        source: str,
        trust: Callable[[], Trust],
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own = own
        self._source = source
        self._trust = trust
        self._interval_s = interval_s
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Follow no more; waits for a look that is under way."""
        self._stopping.set()
        self._thread.join()

    def look(self) -> int:
        """Read what is new; how many entries.

        Raises:
            DescriptorError: the registry contradicts itself, or shows what is no log.
            TransportError, ProtocolError, ProviderError, CertificateError, StorageError: as they say.
        """
        trust = self._trust()
        context, found = registry_client_context(trust.authorities), 0
        with RegistryClient(self._source, context, deadline_s=_DEADLINE_S) as source:
            while True:
                span, head = source.history(after=self._own.position[0], trust=trust)
                self._take(span, head, trust.of_the_past)
                found += len(span.entries)
                if span.last >= head.said.entries or not span.entries:
                    return found

    def _take(self, span: Span, head: VouchedHead, trust: Trust) -> None:
        if head.name != self._own.name:
            raise DescriptorError(f"{self._source} has the log of {head.name!r}, not of {self._own.name!r}")
        number, own_hash = self._own.position
        if span.after > number:
            # A registry forgets from the beginning on, and nothing before it has expired for as long as any can live.
            if self._own.expires + MAX_LIFETIME_S - CLOCK_TOLERANCE_S > self._clock():
                raise DescriptorError(
                    f"EQUIVOCATION: {self._source} says that it has forgotten entries of {head.name!r} up to "
                    f"{span.after}, and none may be forgotten yet of what it has shown up to entry {number}; keep this "
                    f"database, and compare with `symbiosis-priv registry audit`"
                )
            log.warning("entries_missed", after=number, until=span.after)
            self._own.begin_at(span.after, span.before)
        elif span.after < number or span.before != own_hash:
            raise DescriptorError(
                f"EQUIVOCATION: {self._source} shows another log of {head.name!r} than before entry {number + 1}; keep "
                f"this database, and compare with `symbiosis-priv registry audit`"
            )
        announced = [verify_past(data, trust, now=self._clock()) for data in span.entries]
        self._own.extend(announced, head=head.data if span.last == head.said.entries else self._own.head)

    def _run(self) -> None:
        while True:
            try:
                if found := self.look():
                    log.often("followed", entries=found)
            except DescriptorError as error:
                log.warning("not_followed", reason=str(error))
            except StorageError as error:
                log.often("not_stored", reason=str(error))
            except SymbiosisError as error:
                log.often("unreachable", source=self._source, error=type(error).__name__)
            if self._stopping.wait(self._interval_s):
                return
