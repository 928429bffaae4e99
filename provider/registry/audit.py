"""Checks logs of registries from one end to the other, and compares what several places say of one log.

A registry signs the head of its log. Two logs of one registry that differ in an entry, each with a signed head that it
leads to, are a proof that nobody but the registry's key can make: it has told different things to different people.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from symbiosis_priv.errors import DescriptorError, ProviderError, TransportError
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.network.wire import ErrorCode
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S, Announced, newest, verify_past
from symbiosis_priv.registry.history import Span, VouchedHead
from symbiosis_priv.registry.queries import RegistryClient
from symbiosis_priv.registry.statements import CLOCK_TOLERANCE_S, MS, Trust

_DEADLINE_S = 60.0
_PATIENCE_S = 600.0  # with a registry that asks to come again
_PAUSE_S = 0.5


@dataclass(frozen=True)
class View:
    """A log as one place shows it: every hash, signature and certificate in it has been checked.

    Args:
        place: its address.
        hashes: of its entries, by number, and of the one before the first of them.
        head: that it leads to.
        executors: the newest descriptor of each key.
    """

    place: str
    hashes: dict[int, bytes]
    head: VouchedHead
    executors: dict[str, Announced]

    @property
    def name(self) -> str:
        """The registry's whose log it is."""
        return self.head.name


def view(address: str, trust: Trust) -> View:
    """Read a whole log from a registry or a replica.

    Raises:
        DescriptorError: something in it is not what it should be; the message says where.
        TransportError, ProtocolError, ProviderError, CertificateError: as they say.
    """
    hashes: dict[int, bytes] = {}
    executors: dict[str, Announced] = {}
    for span, head in _parts(address, trust):
        if hashes and hashes.get(span.after) != span.before:
            raise DescriptorError(f"{address}: what it shows after entry {max(hashes)} does not follow that")
        hashes |= span.hashes()
        for number, data in enumerate(span.entries, start=span.after + 1):
            _add(executors, data, trust.of_the_past, place=f"{address}, entry {number}")
        if span.last == head.said.entries:
            return View(address, hashes, head, executors)
        if not span.entries:
            break
    raise DescriptorError(f"{address}: its entries end before those that its head counts")


def _parts(address: str, trust: Trust) -> Iterator[tuple[Span, VouchedHead]]:
    """A log from its beginning on, for as long as it is wanted. A long one takes several connections, and more requests
    than a network may make at once."""
    context, until, after = registry_client_context(trust.authorities), time.monotonic() + _PATIENCE_S, 0
    while True:
        begun = after
        try:
            with RegistryClient(address, context, deadline_s=_DEADLINE_S) as registry:
                while True:
                    span, head = registry.history(after=after, trust=trust)
                    yield span, head
                    after = span.last
        except ProviderError as error:
            if error.code != ErrorCode.BUSY or time.monotonic() > until:
                raise
        except TransportError:
            if after == begun:
                raise
        time.sleep(_PAUSE_S)


def _add(executors: dict[str, Announced], data: bytes, trust: Trust, *, place: str) -> None:
    try:
        announced = verify_past(data, trust, now=time.time())
        known = executors.get(announced.key)
        if known is not None and announced.age <= known.age:
            raise DescriptorError("an earlier entry of the same key is as new")
    except DescriptorError as error:
        raise DescriptorError(f"{place}: {error}") from error
    executors[announced.key] = announced


def contradictions(views: Sequence[View]) -> list[str]:
    """Where two views of one registry's log cannot both be true: an entry that differs, entries that one of them has
    forgotten before that could be, or a later head with fewer entries.
    """
    found = []
    for one, other in itertools.combinations(views, 2):
        if one.name != other.name:
            continue
        ways = ((one, other), (other, one))
        told = [_differ(one, other), *(_forgets(*way) for way in ways), *(_goes_back(*way) for way in ways)]
        if why := next(filter(None, told), ""):
            found.append(f"EQUIVOCATION: registry {one.name!r} has signed two logs{why}")
    return found


def _differ(one: View, other: View) -> str:
    for number in sorted(one.hashes.keys() & other.hashes.keys()):
        if one.hashes[number] != other.hashes[number]:
            shown = " and ".join(f"{view.place} shows {view.hashes[number].hex()[:16]}" for view in (one, other))
            return f", which differ from entry {number} on: {shown}"
    return ""


def _forgets(one: View, other: View) -> str:
    """A log that begins after another one's end has nothing in common with it that could differ."""
    shown, begins = max(one.hashes), min(other.hashes)
    expires = max((announced.said.expires for announced in one.executors.values()), default=0)
    if begins <= shown or expires + MS * (MAX_LIFETIME_S - CLOCK_TOLERANCE_S) < other.head.said.issued:
        return ""
    return (
        f": {other.place} begins after entry {begins}, and none may be forgotten yet of what {one.place} shows up to "
        f"entry {shown}"
    )


def _goes_back(one: View, other: View) -> str:
    earlier, later = one.head.said, other.head.said
    if later.entries >= earlier.entries or later.issued <= earlier.issued + MS * CLOCK_TOLERANCE_S:
        return ""
    return f": {other.place} ends with entry {later.entries}, and {one.place} had {earlier.entries} before"


def differences(views: Sequence[View], *, now: float) -> list[str]:
    """Executors that some view does not show, or not as new as another one: held back, not yet replicated, or announced
    to other registries only.
    """
    best = newest(announced for one in views for announced in one.executors.values())
    live = [announced for announced in best.values() if announced.said.expires > MS * now]
    found = []
    for one in views:
        for announced in live:
            shown = one.executors.get(announced.key)
            if shown is None or shown.age < announced.age:
                what = "does not show" if shown is None else "shows an older descriptor of"
                found.append(f"{one.place} {what} executor {announced.name!r} of {announced.operator}")
    return found
