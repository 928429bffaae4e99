"""Admission: checks of headers, memory for payloads, the role of each tenant, and slots for connections.

Once all slots are taken, the idlest connection of the tenant that holds the most is closed for a tenant that holds
fewer. A connection in the middle of a request counts as less idle than
every connection between two requests.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from provider.config.schema import MIB, Limits, ProviderConfig
from provider.executor.queues import row_load
from provider.refusal import Refusal
from symbiosis_priv.arithmetic.segments import check_counts
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import RangeError
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode, Role

MAX_REQUEST_ROWS = 16_384
"""Most rows of a request."""


class Sizes(NamedTuple):
    """The encoding of an accepted request, its sizes in bytes, and its cost."""

    encoding: wire.Encoding
    received: int  # the request's payload
    sent: int  # the answer's payload
    memory: int  # all matrices of the request in memory
    cost: int  # multiply-adds that the tenant is billed


def admitted(request: wire.Execute | wire.Effect, config: ProviderConfig, manifest: Manifest, served: range) -> Sizes:
    """The sizes of a request for the layer groups `served`. Raises `Refusal`: the group is not served, the arithmetic
    is off, or rows, counts or bytes exceed their limits."""
    rows, counts, encoding, in_ring = request.rows, request.counts, request.encoding, request.arithmetic == "ring"
    if request.group >= len(manifest.groups):
        refuse_bad(f"group {request.group} is not one of {len(manifest.groups)}")
    stack, effect = manifest.groups[request.group], isinstance(request, wire.Effect)
    if not in_ring and (effect or counts is not None or request.ring_bits != wire.RING32.item_bits):
        refuse_bad("effects, and requests with counts or ring_bits, need ring arithmetic")
    if not in_ring and config.executor.float_memory_mib is None:
        raise Refusal(wire.ErrorCode.NOT_SERVED, "float products are off here (float_memory_mib under [executor])")
    if request.group not in served:
        raise Refusal(wire.ErrorCode.NOT_SERVED, f"{stack.name} is not in layers {config.model.layers}")
    if rows > MAX_REQUEST_ROWS:
        raise Refusal(wire.ErrorCode.TOO_LARGE, f"{rows} rows; at most {MAX_REQUEST_ROWS}")
    if counts is not None:
        if stack.experts == 1:
            refuse_bad(f"{stack.name} is not a stack of experts; send no counts")
        try:
            check_counts(counts, experts=stack.experts, rows=rows)
        except RangeError as error:
            refuse_bad(str(error))
    widths = manifest.entry(request.group, by_expert=counts is not None).columns(request.direction)
    taken, made = (wire.RING32.size(rows, width) for width in widths)
    if max(taken, made) > config.limits.max_payload_mib * MIB:
        most = config.limits.max_payload_mib * MIB
        raise Refusal(wire.ErrorCode.TOO_LARGE, f"a matrix of {max(taken, made)} bytes; at most {most}")
    sent = encoding.size(rows, widths.result)
    # a packed answer is a copy, made after the rows' memory is free
    memory = made + max(taken, sent if encoding is wire.RING24 else 0)
    _, cost = row_load(type(request), widths)
    return Sizes(encoding, 0 if effect else encoding.size(rows, widths.rows), sent, memory, cost * rows)


def refuse_bad(detail: str) -> NoReturn:
    """Raises `Refusal` BAD_REQUEST, for a request that no tenant of this release sends."""
    raise Refusal(wire.ErrorCode.BAD_REQUEST, detail)


_AT_ONCE = nullcontext()


@dataclass(eq=False)
class _Claim:
    """Bytes that one request waits for or holds."""

    tenant: TenantIdentity
    size: int
    granted: bool = False


class ByteBudget:
    """Limits the bytes of payloads in memory, in total and per tenant. Thread-safe. A request takes its bytes before
    the gateway allocates the memory, and holds them until the memory is free, so the limit holds for any number of
    connections. A quarter of the memory is reserved for small requests, with room for one per connection: small
    requests never wait. Large requests share the rest. Tenants take turns, and a request whose tenant is next is not
    overtaken. A tenant that holds bytes gets no more than `pool / (tenants + 1)`, so that one more tenant finds room.
    """

    def __init__(self, limits: Limits) -> None:
        self._pool = limits.max_inflight_mib * MIB * 3 // 4
        self._share = limits.max_inflight_mib * MIB // 2
        self._small = min(limits.small_request, self._share)
        self._free = self._pool
        self._held: Counter[TenantIdentity] = Counter()
        self._last_turn: dict[TenantIdentity, int] = {}
        self._turns = itertools.count(1)
        self._waiting: list[_Claim] = []
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that large requests hold."""
        with self._changed:
            return self._pool - self._free

    @property
    def waiting(self) -> int:
        """Large requests that wait for bytes."""
        with self._changed:
            return len(self._waiting)

    def taken(self, tenant: TenantIdentity, size: int, *, timeout: float) -> AbstractContextManager[None]:
        """Wait for `size` bytes and hold them. Entering the context raises `Refusal`: BUSY if the bytes do not become
        free within `timeout` seconds, TOO_LARGE if the request exceeds the tenant's limit."""
        return _AT_ONCE if size <= self._small else self._granted(tenant, size, timeout)

    @contextmanager
    def _granted(self, tenant: TenantIdentity, size: int, timeout: float) -> Iterator[None]:
        if size > self._share:
            raise Refusal(ErrorCode.TOO_LARGE, f"{size} bytes for a request and its reply; at most {self._share}")
        claim = _Claim(tenant, size)
        try:
            with self._changed:
                self._waiting.append(claim)
                self._grant()
                if not self._changed.wait_for(lambda: claim.granted, timeout):
                    raise Refusal(ErrorCode.BUSY, "too many bytes are in flight; ask again later")
            yield
        finally:
            with self._changed:
                if claim.granted:
                    self._free += size
                    self._held -= Counter({tenant: size})
                else:
                    self._waiting.remove(claim)
                self._grant()

    def _grant(self) -> None:
        """Grant free bytes to waiting requests, in the order of their tenants' last turns."""
        tenants = len(self._held.keys() | {claim.tenant for claim in self._waiting})
        fair = self._pool // (tenants + 1)
        for claim in sorted(self._waiting, key=lambda c: self._last_turn.get(c.tenant, 0)):
            held = self._held[claim.tenant]
            if held and held + claim.size > min(self._share, fair):
                continue  # the tenant waits for its own bytes, and other tenants may go first
            if claim.size > self._free:
                break
            claim.granted = True
            self._waiting.remove(claim)
            self._free -= claim.size
            self._held[claim.tenant] += claim.size
            self._last_turn[claim.tenant] = next(self._turns)
        self._changed.notify_all()


class Register:
    """Counts the connections of each tenant, and keeps its role (rule 8). Thread-safe."""

    def __init__(self) -> None:
        self.visits: Counter[TenantIdentity] = Counter()
        """Number of connections that each tenant has opened, including refused connections."""
        self._roles: dict[TenantIdentity, Counter[Role]] = {}
        self._lock = threading.Lock()

    def count_visit(self, tenant: TenantIdentity) -> None:
        with self._lock:
            self.visits[tenant] += 1

    def take_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Bind a connection of the tenant to a role. Raises `Refusal`: ROLE_REFUSED while another connection of the
        tenant has the other role: a helper that expands the seeds of a tenant's pads must not see rows that the tenant
        masks."""
        with self._lock:
            roles = self._roles.setdefault(tenant, Counter())
            if roles.keys() - {role}:
                raise Refusal(ErrorCode.ROLE_REFUSED, "this provider serves this tenant in the other role (rule 8)")
            roles[role] += 1

    def drop_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Undo one `take_role`."""
        with self._lock:
            roles = self._roles[tenant]
            roles[role] -= 1
            if not roles[role]:
                del self._roles[tenant]


_CLOSING_S = 2.0  # longest wait of a new connection for the end of the connection that is closed for it


@dataclass(eq=False)
class Slot:
    """The slot of one connection. `close` closes the connection, from any thread."""

    tenant: TenantIdentity
    close: Callable[[], None]
    # time of the last answer, by `time.monotonic`; infinity from the first bytes of a request on
    idle_since: float = field(default_factory=time.monotonic)
    _ended: threading.Event = field(default_factory=threading.Event)


class Slots:
    """The slots of all connections, in all and for one tenant. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: dict[TenantIdentity, list[Slot]] = {}
        self._lock = threading.Lock()

    def count(self, tenant: TenantIdentity) -> int:
        with self._lock:
            return len(self._held.get(tenant, ()))

    @contextmanager
    def taken(self, tenant: TenantIdentity, close: Callable[[], None]) -> Iterator[Slot]:
        """Hold a slot for a connection of `tenant`, which `close` closes from any thread. Entering the context raises
        `Refusal`: BUSY if the tenant holds as many slots as it may, or if all are taken and no tenant holds more."""
        slot, closed = Slot(tenant, close), None
        with self._lock:
            own, most = len(self._held.get(tenant, ())), max(map(len, self._held.values()), default=0)
            if own >= self._limits.max_connections_per_tenant:
                raise Refusal(ErrorCode.BUSY, "this tenant has too many connections")
            if sum(map(len, self._held.values())) >= self._limits.max_connections:
                if most < own + 2:  # otherwise the two tenants would only swap their numbers
                    raise Refusal(ErrorCode.BUSY, "the provider has too many connections")
                slots = (slot for held in self._held.values() if len(held) == most for slot in held)
                closed = min(slots, key=lambda slot: slot.idle_since)
                self._free(closed)
            self._held.setdefault(tenant, []).append(slot)
        try:
            if closed is not None:
                closed.close()
                if not closed._ended.wait(_CLOSING_S):  # the closed connection's thread still holds memory
                    raise Refusal(ErrorCode.BUSY, "the provider has too many connections")
            yield slot
        finally:
            with self._lock:
                self._free(slot)
            slot._ended.set()

    def _free(self, slot: Slot) -> None:
        """Free a slot. Does nothing if the slot was freed when its connection was closed."""
        held = self._held.get(slot.tenant, [])
        if slot in held:
            held.remove(slot)
        if not held:
            self._held.pop(slot.tenant, None)
