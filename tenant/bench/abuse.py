"""`bench abuse`: what one tenant's abuse costs another: waits beside those without it, bits, what the provider keeps.

An honest tenant asks for one row after the other, first alone and then beside each abuse, and compares every answer
with the first. An abuser would sit at a machine of its own: here it is a process that gets the time of a core that
nobody else wants. What that alone costs, as it shares caches and cores, the control says: a process that only computes.
What the provider's counters say, and of whom, is read before and after.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv import wire
from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError
from symbiosis_priv.federation import Federation, Peer, load_federation
from symbiosis_priv.local import LocalFederation
from symbiosis_priv.revocation import revoke
from symbiosis_priv.ring import FORWARD
from symbiosis_priv.tls import client_context
from tenant.bench import processes
from tenant.bench.report import Row
from tenant.bench.status import METRICS, status_of
from tenant.connections.channel import Channel, fresh_nonce

_GROUP = 0  # q, k and v
_ROWS = 256  # of an abuser's request
_CONNECTIONS = 4  # of a flood
_READERS = 16
_SILENT_A_SECOND, _SILENT_FROM, _SILENT = 400, 250, 2000
_DEADLINE_S = 60.0
_SETTLE_S, _LOOK_S = 5.0, 0.05
_COUNTERS = ("requests", "refused", "abandoned", "slow", "failed")
_MIB = 1 << 20
_NICE = 19


@dataclass(frozen=True)
class _Abuser:
    """Who it is, whom it asks, and for what."""

    identity: Identity
    peer: Peer
    digest: str
    inputs: int
    outputs: int
    visits: int

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return client_context(certificate=self.identity.certificate, key=self.identity.key, pins=self.peer.pins)

    def channel(self) -> Channel:
        """A tenant's connection."""
        return Channel(
            self.peer,
            certificate=self.identity.certificate,
            key=self.identity.key,
            model_digest=self.digest,
            deadline_s=_DEADLINE_S,
        )

    def ask(self, channel: Channel) -> None:
        """One large request."""
        request = _request(_ROWS)
        channel.request(request, torch.ones(_ROWS, self.inputs, dtype=torch.int32, device="cpu"), outputs=self.outputs)

    @contextmanager
    def connected(self) -> Iterator[ssl.SSLSocket]:
        """A connection that has said hello, or at least shaken hands."""
        raw = socket.create_connection((self.peer.host, self.peer.port), timeout=_DEADLINE_S)
        with raw, self._context.wrap_socket(raw, server_hostname=self.peer.host) as connection:
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=self.digest)
            connection.sendall(wire.encode(hello))
            yield connection


def _compute(abuser: _Abuser) -> None:
    """Nothing to do with the provider."""
    block = bytes(1 << 16)
    while True:
        hashlib.sha256(block)


def _flood(abuser: _Abuser) -> None:
    """Large requests, one after the other."""
    channel = abuser.channel()
    with contextlib.suppress(SymbiosisError):  # it may be turned away
        while True:
            abuser.ask(channel)


def _read_nothing(abuser: _Abuser) -> None:
    """A large request whose answer is never read."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            connection = connections.enter_context(abuser.connected())
            matrix = bytes(_ROWS * abuser.inputs * wire.ITEM_BYTES)
            connection.sendall(wire.encode(_request(_ROWS), payload_bytes=len(matrix)))
            connection.sendall(matrix)
        time.sleep(_DEADLINE_S)


def _send_nothing(abuser: _Abuser) -> None:
    """Large requests are announced, and their bytes never come."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            connection = connections.enter_context(abuser.connected())
            size = _ROWS * abuser.inputs * wire.ITEM_BYTES
            connection.sendall(wire.encode(_request(_ROWS), payload_bytes=size))
        time.sleep(_DEADLINE_S)


def _leave(abuser: _Abuser) -> None:
    """Large requests, whose tenant is gone before the answer."""
    matrix = bytes(_ROWS * abuser.inputs * wire.ITEM_BYTES)
    while True:
        with contextlib.suppress(OSError), abuser.connected() as connection:
            connection.sendall(wire.encode(_request(_ROWS), payload_bytes=len(matrix)))
            connection.sendall(matrix)


def _come_and_go(abuser: _Abuser) -> None:
    """One connection after the other."""
    for _ in range(abuser.visits):
        with contextlib.suppress(OSError), abuser.connected():
            pass


def _say_nothing(abuser: _Abuser) -> None:
    """400 silent connections a second from 250 addresses."""
    with contextlib.ExitStack() as connections:
        begun = time.monotonic()
        for number in range(_SILENT):
            time.sleep(max(0.0, begun + number / _SILENT_A_SECOND - time.monotonic()))
            source = (f"127.1.0.{1 + number % _SILENT_FROM}", 0)
            address = abuser.peer.host, abuser.peer.port
            connections.enter_context(socket.create_connection(address, timeout=_DEADLINE_S, source_address=source))
        time.sleep(_DEADLINE_S)


def _request(rows: int) -> wire.Execute:
    return wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=rows)


@dataclass(frozen=True)
class _Abuse:
    """One kind of it.

    Args:
        attack: what an abuser does; it may return.
        threads: of one process, that do it at the same time.
        seen: what the provider has counted of it, at least, before anything is measured.
        ends: measured until it has ended, however long that takes.
        revoked: the abuser's certificate, while it is at it.
    """

    attack: Callable[[_Abuser], None]
    threads: int = 1
    seen: Mapping[str, int] = field(default_factory=dict)
    ends: bool = False
    revoked: bool = False


def _abuses(visits: int) -> dict[str, _Abuse]:
    flooding = {"connections": _CONNECTIONS, "requests": _CONNECTIONS}
    return {
        "control: a process that only computes": _Abuse(_compute),
        "a flood of large requests": _Abuse(_flood, _CONNECTIONS, seen=flooding),
        "answers that nobody reads": _Abuse(_read_nothing, seen={"requests": _READERS}),
        "payloads that never come": _Abuse(_send_nothing, seen={"connections": _READERS}),
        "requests whose tenant leaves": _Abuse(_leave, _CONNECTIONS, seen={"connections": _CONNECTIONS}),
        f"{visits:,} connections": _Abuse(_come_and_go, seen={"connections": 1}, ends=True),
        f"{_SILENT_A_SECOND} silent connections a second": _Abuse(_say_nothing, seen={"strangers": _SILENT_FROM}),
        "a tenant revoked in mid-request": _Abuse(_flood, _CONNECTIONS, seen=flooding, revoked=True),
    }


def measure_abuse(
    directory: Path,
    *,
    hidden: int,
    seconds: float,
    threads: int,
    on_result: Callable[[Row], None],
    visits: int = 1000,
) -> None:
    """Start a provider and let an honest tenant ask it beside each abuse.

    Args:
        directory: new or empty.
        hidden: width of the model.
        seconds: of each measurement.
        threads: torch threads of the provider.
        on_result: told every line as soon as it is there.
        visits: connections of whoever comes and goes.
    """
    model = directory / "model"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    revoked = directory / "revoked.txt"
    revoked.touch()
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": threads},
        "tls": {"revoked": revoked},
        "metrics": METRICS,
    }
    with (
        LocalFederation(model, directory / "federation", helpers=0, provider_options=options) as local,
        contextlib.closing(_Bench(local, revoked, columns=(hidden, 3 * hidden), visits=visits)) as bench,
    ):
        bench.honest(seconds)  # the first requests load the weights
        for name, abuse in _abuses(visits).items():
            on_result(bench.run(name, abuse, seconds=seconds))


class _Bench:
    def __init__(self, local: LocalFederation, revoked: Path, *, columns: tuple[int, int], visits: int) -> None:
        self._local, self._revoked, self._visits = local, revoked, visits
        self._federation: Federation = load_federation(local.federation)
        self._inputs, self._outputs = columns
        peer = self._federation.executors[0]
        self._channel = Channel(
            peer,
            certificate=self._federation.tenant_certificate,
            key=self._federation.tenant_key,
            model_digest=self._federation.model_digest,
            deadline_s=_DEADLINE_S,
        )
        generator = torch.Generator().manual_seed(0)
        self._row = torch.randint(
            -(1 << 31), 1 << 31, (1, self._inputs), generator=generator, dtype=torch.int64, device="cpu"
        ).int()
        self._expected = self._ask()
        self._wrong = 0

    def run(self, name: str, abuse: _Abuse, *, seconds: float) -> Row:
        """The honest tenant alone, then beside the abuse."""
        self._wrong = 0
        alone = self.honest(seconds)
        before, held = self._status(), self._held()
        abuser = self._abuser()
        process, begun = self._start(abuse, abuser), time.monotonic()
        try:
            while any(self._counted(abuser, before).get(what, 0) < least for what, least in abuse.seen.items()):
                if time.monotonic() > begun + _DEADLINE_S:
                    raise DeadlineExceededError(f"the provider has not seen {name!r} within {_DEADLINE_S:g} s")
                time.sleep(_LOOK_S)
            if abuse.revoked:
                time.sleep(seconds / 4)
                revoke(self._revoked, [abuser.identity.certificate])
            beside, used = self.honest(seconds), _processor_seconds(process)
            while abuse.ends and process.is_alive():
                beside += self.honest(seconds / 4)
                used = max(used, _processor_seconds(process))
            peak, cores = self._held(), used / (time.monotonic() - begun)
            counted = self._counted(abuser, before)
        finally:
            process.kill()
            process.join()
        left = self._left(held)
        counted |= self._counted(abuser, before)
        return {
            "abuse": name,
            "alone_p50_ms": _percentile(alone, 50),
            "beside_p50_ms": _percentile(beside, 50),
            "beside_over_alone": _percentile(beside, 50) / _percentile(alone, 50),
            "alone_p99_ms": _percentile(alone, 99),
            "beside_p99_ms": _percentile(beside, 99),
            "longest_ms": 1000 * max(beside),
            "wrong": self._wrong,
            "abuser_cores": cores,
            "counted": ", ".join(f"{word} {n:,}" for word, n in counted.items()) or "nothing",
            "beside_mib": (peak[0] - held[0]) / _MIB,
            **dict(zip(("left_mib", "left_files", "left_threads"), left, strict=True)),
        }

    def close(self) -> None:
        """The honest tenant leaves."""
        self._channel.close()

    def honest(self, seconds: float) -> list[float]:
        """Seconds of each request."""
        waits, end = [], time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            answer = self._ask()
            waits.append(time.monotonic() - begun)
            self._wrong += not torch.equal(answer, self._expected)
        return waits

    def _ask(self) -> torch.Tensor:
        return self._channel.request(_request(1), self._row, outputs=self._outputs)

    def _abuser(self) -> _Abuser:
        """Somebody new, with a good certificate."""
        keys = self._local.directory / "keys"
        authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
        identity = issue(keys, authority=authority, kind=Kind.TENANT, name=f"abuser-{time.monotonic_ns()}")
        peer, digest = self._federation.executors[0], self._federation.model_digest
        return _Abuser(identity, peer, digest, self._inputs, self._outputs, self._visits)

    def _start(self, abuse: _Abuse, abuser: _Abuser) -> BaseProcess:
        """At it as soon as this returns."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        begun = context.Event()
        process = context.Process(target=_run, args=(abuse, abuser, begun), daemon=True)
        process.start()
        if not begun.wait(_DEADLINE_S):
            process.kill()
            raise DeadlineExceededError(f"an abuser has not begun within {_DEADLINE_S:g} s")
        return process

    def _counted(self, abuser: _Abuser, before: dict[str, Any]) -> dict[str, int]:
        """What the provider has counted since of an abuser, and of those who have no name."""
        name = abuser.identity.certificate.stem
        then, now = _counts(before, name), _counts(self._status(), name)
        return {what: now[what] - then[what] for what in now if now[what] > then[what]}

    def _status(self) -> dict[str, Any]:
        return status_of(self._local, "executor")

    def _alone(self) -> bool:
        """Whether nobody but the honest tenant is connected."""
        status = self._status()
        return status["connections"] == 1 and not status["handshakes"]["present"]

    def _held(self) -> tuple[int, int, int]:
        """(bytes, open files, threads) of the provider."""
        folder = Path(f"/proc/{self._local.pid('executor')}")
        pages = int((folder / "statm").read_text().split()[1])
        files, tasks = (len(list((folder / kind).iterdir())) for kind in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, tasks

    def _left(self, before: tuple[int, int, int]) -> tuple[float, int, int]:
        """What is more than before, when everybody has gone."""
        end = time.monotonic() + _SETTLE_S
        while True:
            alone, now = self._alone(), self._held()
            if (alone and now[1] <= before[1] and now[2] <= before[2]) or time.monotonic() > end:
                break
            time.sleep(_LOOK_S)
        return (now[0] - before[0]) / _MIB, now[1] - before[1], now[2] - before[2]


def _run(abuse: _Abuse, abuser: _Abuser, begun: Event) -> None:
    processes.give_way(_NICE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    with ThreadPoolExecutor(abuse.threads) as pool:
        running = [pool.submit(abuse.attack, abuser) for _ in range(abuse.threads)]
        begun.set()
        for future in running:
            future.result()


def _processor_seconds(process: BaseProcess) -> float:
    """That a process has had; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _percentile(waits: list[float], q: int) -> float:
    return float(np.percentile(np.array(waits) * 1000, q))


def _counts(status: dict[str, Any], abuser: str) -> Counter[str]:
    handshakes = status["handshakes"]
    found = Counter({"strangers": handshakes["present"] + handshakes["late"] + handshakes["crowded_out"]})
    found["connections"] = sum(n for name, n in status["visits"].items() if name.startswith(f"{abuser}@"))
    for tenant in status["tenants"]:
        if tenant["tenant"].startswith(f"{abuser}@"):
            found.update({name: tenant["counts"][name] for name in _COUNTERS})
    return found
