"""`bench abuse`: measures how one tenant's abuse affects another tenant's waiting time and the provider's memory.

An honest tenant requests one row after the other, first alone and then during each abuse, and compares every answer
with its first answer. Beside tenants that decode, the honest tenant fine-tunes: its requests have many rows. In
practice an abuser has its own machine; here an abuser is a process with the lowest priority, a valid tenant
certificate, and the key of a helper whose blocks the provider accepts. As a control, a process that only computes shows
the effect of shared caches and cores. The provider's counters are read before and after each abuse.
"""

import contextlib
import hashlib
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError
from symbiosis_priv.federation import Peer, load_federation
from symbiosis_priv.harness.local import METRICS, LocalFederation
from symbiosis_priv.kernels import probe_rows
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context
from tenant.bench.measured_models import HALF_THE_CORES, Threads, small_llama
from tenant.bench.options import Progress, Seconds, benchmark
from tenant.bench.processes import Child, Resources, cpu_seconds, resources
from tenant.bench.report import Goal, Row, figure, percentile
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask

VISITS = 1000
"""Connections of the abuser that connects and leaves."""
_SETTLE_S, _LOOK_S = 5.0, 0.05
_COUNTERS = ("requests", "refused", "abandoned", "slow", "failed")
_MIB = 1 << 20
_DEADLINE_S = 60.0
_GROUP = 0  # the group of q, k and v
_ROWS = 256  # rows of an abuser's request
_CONNECTIONS = 4  # number of connections
_READERS = 16
_SILENT_A_SECOND, _SILENT_FROM, _SILENT = 400, 250, 2000
_NICE = 19
_FINE_TUNING_ROWS = 1024
_DECODING_MS = (0.5, 1.5, 3.0)  # pauses between two rows


@dataclass(frozen=True)
class Client:
    """A tenant with a valid certificate, and its provider. `inputs`, `outputs`: columns of requests and answers."""

    identity: Identity
    peer: Peer
    digest: str
    inputs: int
    outputs: int

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return client_context(certificate=self.identity.certificate, key=self.identity.key, pins=self.peer.pins)

    def channel(self) -> Channel:
        return Channel(self.peer, context=self._context, model_digest=self.digest, deadline_s=_DEADLINE_S)

    @contextmanager
    def connected(self) -> Iterator[ClientConnection]:
        """A connection that has sent its hello, and reads nothing."""
        with self.peer.connection(self._context) as connection:
            deadline = time.monotonic() + _DEADLINE_S
            connection.open(deadline)
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=self.digest)
            connection.send(hello, deadline=deadline)
            yield connection

    def request(self, connection: ClientConnection, *, sends_rows: bool = True) -> None:
        """Announce one large request. With `sends_rows`, send its rows too."""
        size = wire.RING32.size(_ROWS, self.inputs)
        rows = bytes(size * sends_rows)
        connection.send(request_of(_ROWS), rows, announced=size, deadline=time.monotonic() + _DEADLINE_S)


def compute(abuser: Client) -> None:
    """Compute, without any connection to the provider."""
    block = bytes(1 << 16)
    while True:
        hashlib.sha256(block)


def flood(abuser: Client) -> None:
    """Send large requests, one after the other."""
    channel = abuser.channel()
    rows = mask(torch.ones(_ROWS, abuser.inputs, dtype=torch.int32, device="cpu"), UNMASKED_BY_CHOICE)
    with contextlib.suppress(SymbiosisError):  # the provider may refuse the abuser
        while True:
            channel.request(request_of(_ROWS), rows, outputs=abuser.outputs)


def decode(abuser: Client, *, pause_s: float) -> None:
    """Send one row after the other, as an honest tenant that decodes."""
    channel, row = abuser.channel(), torch.ones(1, abuser.inputs, dtype=torch.int32, device="cpu")
    while True:
        channel.request(request_of(1), mask(row, UNMASKED_BY_CHOICE), outputs=abuser.outputs)
        time.sleep(pause_s)


def read_nothing(abuser: Client, *, sends_rows: bool = True) -> None:
    """Announce large requests, and read no answer. Without `sends_rows`, the rows never come."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            abuser.request(connections.enter_context(abuser.connected()), sends_rows=sends_rows)
        time.sleep(_DEADLINE_S)


def leave(abuser: Client) -> None:
    while True:
        with contextlib.suppress(SymbiosisError), abuser.connected() as connection:
            abuser.request(connection)


def come_and_go(abuser: Client, *, visits: int) -> None:
    for _ in range(visits):
        with contextlib.suppress(SymbiosisError), abuser.connected():
            pass


def say_nothing(abuser: Client) -> None:
    """Open 400 connections a second from 250 addresses and send nothing."""
    with contextlib.ExitStack() as connections:
        begun = time.monotonic()
        for number in range(_SILENT):
            time.sleep(max(0.0, begun + number / _SILENT_A_SECOND - time.monotonic()))
            source = (f"127.1.0.{1 + number % _SILENT_FROM}", 0)
            address = abuser.peer.host, abuser.peer.port
            connections.enter_context(socket.create_connection(address, timeout=_DEADLINE_S, source_address=source))
        time.sleep(_DEADLINE_S)


def request_of(rows: int) -> wire.Execute:
    """A request to the first layer group."""
    return wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=rows)


@dataclass(frozen=True)
class Abuse:
    """One kind of abuse: `threads` threads run `attack`, which may return. `seen`: counters that the provider must have
    reached before the measurement starts; `rows`: of the honest tenant's requests; `ends`: measure until the abuse has
    ended; `revoked`: revoke the abuser's certificate during the abuse."""

    attack: Callable[[Client], None]
    threads: int = 1
    seen: Mapping[str, int] = field(default_factory=dict)
    rows: int = 1
    ends: bool = False
    revoked: bool = False


def abuses() -> dict[str, Abuse]:
    """Every kind of abuse, by its name in the report."""
    flooding = {"connections": _CONNECTIONS, "requests": _CONNECTIONS}
    silent = {"pending handshakes": _SILENT_FROM}
    return {
        "control: a process that only computes": Abuse(compute),
        **{
            f"a row every {ms:g} ms, beside fine-tuning": Abuse(
                partial(decode, pause_s=ms / 1000), seen={"requests": _CONNECTIONS}, rows=_FINE_TUNING_ROWS
            )
            for ms in _DECODING_MS
        },
        "a flood of large requests": Abuse(flood, _CONNECTIONS, seen=flooding),
        "answers that nobody reads": Abuse(read_nothing, seen={"requests": _READERS}),
        "payloads that never come": Abuse(partial(read_nothing, sends_rows=False), seen={"connections": _READERS}),
        "requests whose tenant leaves": Abuse(leave, _CONNECTIONS, seen={"connections": _CONNECTIONS}),
        f"{VISITS:,} connections": Abuse(partial(come_and_go, visits=VISITS), seen={"connections": 1}, ends=True),
        f"{_SILENT_A_SECOND} silent connections a second": Abuse(say_nothing, seen=silent),
        "a tenant revoked in mid-request": Abuse(flood, _CONNECTIONS, seen=flooding, revoked=True),
    }


@contextmanager
def serve_abuse(abuse: Abuse, abuser: Client) -> Iterator[Callable[[None], bool]]:
    """The work of a `Child`: an abuse, with the lowest priority. The answer is True while the abuse runs."""
    # Linux divides cores among sessions first, and within a session by priority (`autogroup` in sched(7))
    os.setsid()
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # the system has no autogroups
        Path("/proc/self/autogroup").write_text(str(_NICE))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    threads = [threading.Thread(target=abuse.attack, args=(abuser,), daemon=True) for _ in range(abuse.threads)]
    for thread in threads:
        thread.start()
    yield lambda _: any(thread.is_alive() for thread in threads)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if row["rows"] == _FINE_TUNING_ROWS:
            yield Goal(
                f"a fine-tuning tenant's rate over alone: {row['abuse']}", figure(row, "rate_kept"), at_least=0.8
            )
        elif not str(row["abuse"]).startswith("control"):
            what = f"an honest tenant's median over alone: {row['abuse']}"
            yield Goal(what, figure(row, "beside_over_alone"), at_most=1.5)


@benchmark("abuse", goals=goals)
def abuse(
    folder: Path,
    progress: Progress,
    *,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model.")] = 2048,
    seconds: Seconds = 4.0,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Measure an honest tenant's requests alone, and while others flood, read slowly, reconnect, or are revoked.

    Status 1 if one bit of an answer to the honest tenant is wrong."""
    model = small_llama(hidden, inner=hidden).save(folder / "model")
    revoked = folder / "revoked.txt"
    revoked.touch()
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": threads},
        "tls": {"revoked": revoked},
        "metrics": METRICS,
    }
    with LocalFederation(model, folder / "federation", helpers=0, provider_options=options) as local:
        bench = _Bench(local, revoked, columns=(hidden, 3 * hidden))
        with contextlib.closing(bench.channel):
            bench.honest(seconds)  # the first requests load the weights
            for name, abuse in abuses().items():
                yield bench.run(name, abuse, seconds=seconds)


class _Bench:
    def __init__(self, local: LocalFederation, revoked: Path, *, columns: tuple[int, int]) -> None:
        self._local, self._revoked = local, revoked
        self._federation = load_federation(local.federation)
        self._inputs, self._outputs = columns
        honest = Identity(self._federation.tenant_certificate, self._federation.tenant_key)
        self.channel = self._client(honest).channel()
        self._rows = {count: probe_rows(count, self._inputs) for count in (1, _FINE_TUNING_ROWS)}
        self._expected = {count: self._ask(count) for count in self._rows}
        self._wrong = 0

    def run(self, name: str, abuse: Abuse, *, seconds: float) -> Row:
        """Measure the honest tenant alone, then during the abuse."""
        self._wrong = 0
        alone = self.honest(seconds, abuse.rows)
        before, held = self._status(), self._held()
        abuser = self._client(self._local.issue_tenant(f"abuser-{time.monotonic_ns()}"))
        child: Child[None, bool] = Child(f"abuser of {name!r}", serve_abuse, abuse, abuser)
        try:
            child.wait_ready()
            begun = time.monotonic()
            while any(self._counted(abuser, before).get(what, 0) < least for what, least in abuse.seen.items()):
                if time.monotonic() > begun + _DEADLINE_S:
                    raise DeadlineExceededError(f"the provider has not seen {name!r} within {_DEADLINE_S:g} s")
                time.sleep(_LOOK_S)
            if abuse.revoked:
                time.sleep(seconds / 4)
                revoke(self._revoked, [abuser.identity.certificate])
            beside = self.honest(seconds, abuse.rows)
            while abuse.ends and child.ask(None, timeout_s=_DEADLINE_S):
                beside += self.honest(seconds / 4, abuse.rows)
            used = cpu_seconds(child.pid)
            peak, cores = self._held(), used / (time.monotonic() - begun)
            counted = self._counted(abuser, before)
        finally:
            child.close(grace_s=0)
        end = time.monotonic() + _SETTLE_S
        while True:  # until only the honest tenant is connected, and the provider has released what it held
            status, left = self._status(), self._held()
            alone_again = status["connections"] == 1 and not status["handshakes"]["present"]
            released = alone_again and left.files <= held.files and left.threads <= held.threads
            if released or time.monotonic() > end:
                break
            time.sleep(_LOOK_S)
        counted |= self._counted(abuser, before)
        before_ms, ms = ({p: percentile(waits, p, unit=1e-3) for p in (50, 99)} for waits in (alone, beside))
        return {
            "abuse": name,
            "rows": abuse.rows,
            "alone_p50_ms": before_ms[50],
            "beside_p50_ms": ms[50],
            "beside_over_alone": ms[50] / before_ms[50],
            "rate_kept": len(beside) / sum(beside) / (len(alone) / sum(alone)),
            "alone_p99_ms": before_ms[99],
            "beside_p99_ms": ms[99],
            "longest_ms": 1000 * max(beside),
            "wrong": self._wrong,
            "abuser_cores": cores,
            "counted": ", ".join(f"{word} {n:,}" for word, n in counted.items()) or "nothing",
            "beside_mib": (peak.bytes - held.bytes) / _MIB,
            "left_mib": (left.bytes - held.bytes) / _MIB,
            "left_files": left.files - held.files,
            "left_threads": left.threads - held.threads,
        }

    def honest(self, seconds: float, rows: int = 1) -> list[float]:
        """Send requests of `rows` rows for `seconds` seconds, at least one. Returns the duration of each."""
        waits: list[float] = []
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end or not waits:
            answer = self._ask(rows)
            waits.append(time.monotonic() - begun)
            self._wrong += not torch.equal(answer, self._expected[rows])
        return waits

    def _ask(self, rows: int) -> torch.Tensor:
        sent = mask(self._rows[rows], UNMASKED_BY_CHOICE)
        return self.channel.request(request_of(rows), sent, outputs=self._outputs)

    def _client(self, identity: Identity) -> Client:
        peer, digest = self._federation.executors[0], self._federation.model_digest
        return Client(identity, peer, digest, self._inputs, self._outputs)

    def _counted(self, abuser: Client, before: dict[str, Any]) -> dict[str, int]:
        """The increase of the provider's counters for an abuser and for unauthenticated connections since `before`."""
        name = abuser.identity.certificate.stem
        then, now = _counts(before, name), _counts(self._status(), name)
        return {what: now[what] - then[what] for what in now if now[what] > then[what]}

    def _status(self) -> dict[str, Any]:
        return self._local.status("executor")

    def _held(self) -> Resources:
        return resources(self._local.pid("executor") or 0)


def _counts(status: dict[str, Any], abuser: str) -> Counter[str]:
    handshakes = status["handshakes"]
    found = Counter({"pending handshakes": handshakes["present"] + handshakes["late"] + handshakes["crowded_out"]})
    found["connections"] = sum(n for name, n in status["visits"].items() if name.startswith(f"{abuser}@"))
    for tenant in status["tenants"]:
        if tenant["tenant"].startswith(f"{abuser}@"):
            found.update({name: tenant["counts"][name] for name in _COUNTERS})
    return found
