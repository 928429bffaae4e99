"""The blocks that an executor keeps for its tenants.

Theory of operation. A block takes its bytes from the tenant's share of the memory before they are received. Every row
of a block is used for one answer; a request that is sent again gets the plain product. The tenant needs a used block
and its signature as evidence if it finds a wrong row. So a used block is kept until the tenant has confirmed the
requests that used it, or until the connection that carried the answer ends. While that connection lasts, the tenant may
attribute a missing block to the executor. Other blocks expire.

A tenant can use only its own blocks: the id of another tenant's block names no block.

A helper may send blocks for a tenant only if that tenant has chosen it: the tenant asks for a permit on its own
authenticated connection and names its helpers, and passes the permit's random token to them.
"""

import operator
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from provider.refusal import Refusal
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import TOKEN_BYTES, ErrorCode
from symbiosis_priv.system.fair_share import FairShare

LIFETIME_S = 600.0
_ROW_BYTES = 256  # memory of a row's use
_BLOCK_BYTES = 2048  # memory of a block's header, without the counts
_COUNT_BYTES = 40

_Key = tuple[TenantIdentity, bytes]


@dataclass(eq=False)
class KeptBlock:
    header: wire.Deposit
    helper: str  # `fingerprint` of the certificate of the connection on which the block came
    size: int  # bytes of memory that the block takes, at most
    payload: memoryview | None = None  # the matrix, once it has arrived and its signature was verified
    expires: float = 0.0
    requests: set[bytes] = field(default_factory=set)  # nonces of the unconfirmed requests that used rows of the block
    used: bytearray = field(default_factory=bytearray)  # 1 for every row that was used


class _Use(NamedTuple):
    """An unconfirmed request that used blocks, and the connection that carries its answer."""

    blocks: tuple[wire.BlockRows, ...]
    connection: object


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the blocks of all tenants."""

    blocks: int = 0  # kept now
    bytes: int = 0  # of memory, for these
    deposits: int = 0  # blocks that were accepted
    expired: int = 0  # blocks that expired without being used up and confirmed
    missed: int = 0  # requests that named a block that was missing or did not fit


class BlockStore:
    """The blocks of all tenants. Thread-safe. No tenant holds more bytes than stay free, so one more tenant always
    finds room. n tenants that fill their shares together get `memory / (n + 1)` bytes each."""

    def __init__(self, memory: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._blocks: dict[_Key, KeptBlock] = {}
        self._expiring: OrderedDict[_Key, KeptBlock] = OrderedDict()  # unused by unconfirmed requests, oldest first
        self._uses: dict[_Key, _Use] = {}  # by tenant and nonce
        self._by_connection: dict[object, set[_Key]] = {}  # keys of `_uses`
        self._held = FairShare[TenantIdentity](memory)
        self._tally: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._arrivals: dict[TenantIdentity, threading.Condition] = {}  # a block wakes its own tenant's threads only

    @property
    def max_bytes(self) -> int:
        """The largest number of bytes that one tenant can have."""
        return self._held.total // 2

    def counts(self) -> BlockCounts:
        with self._lock:
            self._expire()
            return BlockCounts(blocks=len(self._blocks), bytes=self._held.used, **self._tally)

    @contextmanager
    def arriving(self, tenant: TenantIdentity, header: wire.Deposit, *, helper: str, size: int) -> Iterator[KeptBlock]:
        """Take the bytes of a block before it is received. Call `keep` with its payload; otherwise the bytes are free
        again when the context ends. Entering the context raises `Refusal`: REFUSED if the tenant has a block with this
        id, BUSY if the memory is used."""
        overhead = _BLOCK_BYTES + _ROW_BYTES * header.rows + _COUNT_BYTES * len(header.counts or ())
        block, key = KeptBlock(header, helper, size + overhead), (tenant, header.nonce)
        with self._lock:
            self._expire()
            if key in self._blocks:
                raise Refusal(ErrorCode.REFUSED, "this block was sent before")
            if not self._held.take(tenant, block.size):
                raise Refusal(ErrorCode.BUSY, "the memory for this tenant's blocks is used")
            self._blocks[key] = block
            self._let_expire(key, block)
        try:
            yield block
        finally:
            with self._lock:
                if block.payload is None:
                    self._drop(key, block)

    def keep(self, tenant: TenantIdentity, block: KeptBlock, payload: memoryview) -> None:
        """Keep an arrived block, whose signature the caller has verified."""
        with self._lock:
            key = tenant, block.header.nonce
            if self._blocks.get(key) is block:  # it has not expired
                block.payload, block.used = payload, bytearray(block.header.rows)
                self._let_expire(key, block)
                self._tally["deposits"] += 1
                if (arrival := self._arrivals.get(tenant)) is not None:
                    arrival.notify_all()

    def take(
        self, tenant: TenantIdentity, request: wire.Execute, *, connection: object, timeout: float
    ) -> list[tuple[wire.BlockRows, memoryview]] | None:
        """Use the rows of blocks that a request names. Waits for blocks that have not arrived. Call `end` when the
        connection that carries the answer ends. Returns each range of rows with the whole payload of its block; None if
        a block is missing or does not fit the request, or if its rows were used before; then no row is used."""
        keys = [(tenant, part.block) for part in request.blocks]
        with self._lock:
            self._expire()
            arrival = self._arrivals.setdefault(tenant, threading.Condition(self._lock))
            arrival.wait_for(lambda: all(self._arrived(key) for key in keys), timeout)
            found = [self._arrived(key) for key in keys]
            parts = [(part, block) for part, block in zip(request.blocks, found, strict=True) if block is not None]
            if len(parts) < len(found) or not self._use(tenant, request, parts):
                self._tally["missed"] += 1
                return None
            use = tenant, request.nonce
            self._uses[use] = _Use(request.blocks, connection)
            self._by_connection.setdefault(connection, set()).add(use)
            for key, (_, block) in zip(keys, parts, strict=True):
                block.requests.add(request.nonce)
                self._expiring.pop(key, None)
            return [(part, block.payload) for part, block in parts if block.payload is not None]

    def confirm(self, tenant: TenantIdentity, nonces: Iterable[bytes]) -> None:
        """Forget what is kept for requests of the tenant. Blocks with unused rows remain."""
        with self._lock:
            for nonce in nonces:
                if (use := self._uses.pop((tenant, nonce), None)) is not None:
                    self._by_connection[use.connection].discard((tenant, nonce))
                    self._release(tenant, nonce, use)

    def end(self, connection: object) -> None:
        """Let the blocks expire that were used for answers on this connection."""
        with self._lock:
            for tenant, nonce in self._by_connection.pop(connection, ()):
                self._release(tenant, nonce, self._uses.pop((tenant, nonce)))

    def fetch(self, tenant: TenantIdentity, block: bytes) -> KeptBlock:
        """A block of the tenant, which has arrived. Raises `Refusal` if there is none."""
        with self._lock:
            self._expire()
            found = self._arrived((tenant, block))
        if found is None:
            raise Refusal(ErrorCode.REFUSED, "there is no such block")
        return found

    def _use(
        self, tenant: TenantIdentity, request: wire.Execute, parts: list[tuple[wire.BlockRows, KeptBlock]]
    ) -> bool:
        """Mark rows as used. Returns False if they cannot be used for the request; then nothing has changed."""
        if (tenant, request.nonce) in self._uses:
            return False
        kind = operator.attrgetter("group", "direction", "arithmetic", "ring_bits")
        for part, block in parts:
            header = block.header
            if kind(header) != kind(request) or (header.counts is None) != (request.counts is None):
                return False
            if not part.rows or part.start + part.rows > header.rows or part.first + part.rows > request.rows:
                return False
        for done, (part, block) in enumerate(parts):
            stop = part.start + part.rows
            if any(block.used[part.start : stop]):
                for other, marked in parts[:done]:
                    marked.used[other.start : other.start + other.rows] = bytes(other.rows)
                return False
            block.used[part.start : stop] = b"\1" * part.rows
        return True

    def _arrived(self, key: _Key) -> KeptBlock | None:
        block = self._blocks.get(key)
        return None if block is None or block.payload is None else block

    def _release(self, tenant: TenantIdentity, nonce: bytes, use: _Use) -> None:
        for key in {(tenant, part.block) for part in use.blocks}:
            block = self._blocks[key]  # it cannot expire while a request uses it
            block.requests.discard(nonce)
            if not block.requests:
                self._let_expire(key, block)

    def _let_expire(self, key: _Key, block: KeptBlock) -> None:
        """Drop the block if all its rows were used; otherwise start its lifetime now."""
        if block.used and all(block.used):
            self._drop(key, block)
            return
        block.expires = self._now() + LIFETIME_S
        self._expiring[key] = block
        self._expiring.move_to_end(key)

    def _expire(self) -> None:
        while self._expiring:
            key, block = next(iter(self._expiring.items()))
            if block.expires > self._now():
                return
            self._drop(key, block)
            self._tally["expired"] += 1

    def _drop(self, key: _Key, block: KeptBlock) -> None:
        if self._blocks.get(key) is not block:
            return
        del self._blocks[key]
        self._expiring.pop(key, None)
        tenant, _ = key
        self._held.give_back(tenant, block.size)


PERMIT_S = 3600.0
_PER_TENANT = 64  # permits; one session needs one


class _Permit(NamedTuple):
    tenant: TenantIdentity
    helpers: frozenset[str]
    expires: float
    refusal: Callable[[], Refusal | None]


class Permits:
    """The permits of all tenants. Thread-safe. The operator allows the helpers whose certificates have a `fingerprint`
    in `allowed`."""

    def __init__(self, allowed: frozenset[str], now: Callable[[], float] = time.monotonic) -> None:
        self._allowed = allowed
        self._now = now
        self._permits: OrderedDict[bytes, _Permit] = OrderedDict()  # in order of expiry
        self._by_tenant: dict[TenantIdentity, list[bytes]] = {}
        self._lock = threading.Lock()

    def renew(self, allowed: frozenset[str]) -> None:
        """Allow other helpers in later permits."""
        self._allowed = allowed

    def issue(
        self, tenant: TenantIdentity, helpers: Sequence[str], *, refusal: Callable[[], Refusal | None] = lambda: None
    ) -> tuple[bytes, tuple[str, ...]]:
        """Issue a permit. Returns its token, and those of the helpers (by `fingerprint`) that the operator allows. A
        tenant that has too many permits loses its oldest one. A permit ends once `refusal` returns one, because the
        tenant's certificate is not accepted any more. Raises `Refusal`: the operator allows none of them."""
        named = tuple(helper for helper in helpers if helper in self._allowed)
        if not named:
            raise Refusal(ErrorCode.NOT_SERVED, "this executor accepts blocks of none of these helpers ([relay] from)")
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._expire()
            own = self._by_tenant.setdefault(tenant, [])
            if len(own) == _PER_TENANT:
                del self._permits[own.pop(0)]
            own.append(token)
            self._permits[token] = _Permit(tenant, frozenset(named), self._now() + PERMIT_S, refusal)
        return token, named

    def tenant_of(self, token: bytes, *, helper: str) -> TenantIdentity:
        """The tenant that has permitted a helper. Raises `Refusal` if there is no such permit, it does not name the
        helper, or the tenant's certificate is not accepted any more."""
        with self._lock:
            self._expire()
            permit = self._permits.get(token)
        if permit is None or helper not in permit.helpers or permit.refusal() is not None:
            raise Refusal(ErrorCode.REFUSED, "no permit for this helper: the tenant must ask for a new one")
        return permit.tenant

    def has_permit(self, tenant: TenantIdentity) -> bool:
        with self._lock:
            self._expire()
            return tenant in self._by_tenant

    def _expire(self) -> None:
        while self._permits and next(iter(self._permits.values())).expires <= self._now():
            token, permit = self._permits.popitem(last=False)
            own = self._by_tenant[permit.tenant]
            own.remove(token)
            if not own:
                del self._by_tenant[permit.tenant]


def without_blocks(
    answer: memoryview, parts: Iterable[tuple[wire.BlockRows, memoryview]], request: wire.Execute
) -> NDArray[np.int32]:
    """Subtract rows of blocks from an answer modulo 2^32, in place if the answer can be written. `answer` is a payload
    in 32 bits, and `parts` are ranges of rows, each with the whole payload of its block in the encoding of the request.
    Returns int32 `[rows, outputs]`. With narrow rings only the low bits are meaningful."""
    rows = np.frombuffer(answer, dtype="<i4").reshape(request.rows, -1)
    if not rows.flags.writeable:
        rows = rows.copy()
    size = request.encoding.size(1, rows.shape[1])
    for part, block in parts:
        piece = block[part.start * size : (part.start + part.rows) * size]
        request.encoding.subtract(piece, rows[part.first : part.first + part.rows])
    return rows
