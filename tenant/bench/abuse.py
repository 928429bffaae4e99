"""`bench abuse`: what one tenant's abuse costs another: waits beside those without it, bits, what the provider keeps.

An honest tenant asks for one row after the other, first alone and then beside each abuse, and compares every answer
with the first. The abusers are processes of their own with little priority, because their machines would not take the
provider's cores. Whom the provider's usage counters name is read before and after.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv import wire
from symbiosis_priv.addresses import parse_address
from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError
from symbiosis_priv.federation import Federation, Peer, load_federation
from symbiosis_priv.local import LocalFederation
from symbiosis_priv.revocation import revoke
from symbiosis_priv.ring import FORWARD
from symbiosis_priv.tls import client_context
from tenant.bench.report import Row
from tenant.connections.channel import Channel, fresh_nonce

_GROUP = 0  # q, k and v
_ROWS = 256  # of an abuser's request
_CONNECTIONS = 4  # of a flood
_READERS = 16
_VISITS = 1000
_NICE = 10
_DEADLINE_S = 60.0
_SETTLE_S = 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class _Abuser:
    """Who it is, whom it asks, and for what."""

    identity: Identity
    peer: Peer
    digest: str
    inputs: int
    outputs: int

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
        context = client_context(certificate=self.identity.certificate, key=self.identity.key, pins=self.peer.pins)
        raw = socket.create_connection((self.peer.host, self.peer.port), timeout=_DEADLINE_S)
        with raw, context.wrap_socket(raw, server_hostname=self.peer.host) as connection:
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=self.digest)
            connection.sendall(wire.encode(hello))
            yield connection


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
    """A thousand connections."""
    for _ in range(_VISITS):
        with contextlib.suppress(OSError), abuser.connected():
            pass


def _request(rows: int) -> wire.Execute:
    return wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=rows)


_ABUSES: dict[str, tuple[Callable[[_Abuser], None], int]] = {
    "a flood of large requests": (_flood, _CONNECTIONS),
    "answers that nobody reads": (_read_nothing, 1),
    "payloads that never come": (_send_nothing, 1),
    "requests whose tenant leaves": (_leave, _CONNECTIONS),
    "1,000 connections": (_come_and_go, 1),
    "a tenant revoked in mid-request": (_flood, _CONNECTIONS),
}


def measure_abuse(
    directory: Path, *, hidden: int, seconds: float, threads: int, on_result: Callable[[Row], None]
) -> None:
    """Start a provider and let an honest tenant ask it beside each abuse.

    Args:
        directory: new or empty.
        hidden: width of the model.
        seconds: of each measurement.
        threads: torch threads of the provider.
        on_result: told every line as soon as it is there.
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
        "metrics": {"listen": "127.0.0.1:0"},
    }
    with LocalFederation(model, directory / "federation", helpers=0, provider_options=options) as local:
        bench = _Bench(local, revoked, columns=(hidden, 3 * hidden))
        bench.honest(seconds)  # the first requests load the weights
        for name, (attack, processes) in _ABUSES.items():
            on_result(bench.run(name, attack, processes, seconds=seconds))


class _Bench:
    def __init__(self, local: LocalFederation, revoked: Path, *, columns: tuple[int, int]) -> None:
        self._local, self._revoked = local, revoked
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

    def run(self, name: str, attack: Callable[[_Abuser], None], processes: int, *, seconds: float) -> Row:
        """The honest tenant alone, then beside the abuse."""
        self._wrong = 0
        alone = self.honest(seconds)
        before, held = self._counts(), self._held()
        attackers = self._start(attack, processes)
        try:
            revoking = name.endswith("mid-request")
            if revoking:
                time.sleep(seconds / 4)
                revoke(self._revoked, [self._abuser.identity.certificate])
            beside = self.honest(seconds)
            peak = self._held()
        finally:
            for process in attackers:
                process.kill()
                process.join()
        after = self._counts()
        return {
            "abuse": name,
            "alone_p50_ms": _percentile(alone, 50),
            "beside_p50_ms": _percentile(beside, 50),
            "beside_over_alone": _percentile(beside, 50) / _percentile(alone, 50),
            "alone_p99_ms": _percentile(alone, 99),
            "beside_p99_ms": _percentile(beside, 99),
            "longest_ms": 1000 * max(beside),
            "wrong": self._wrong,
            "counted": ", ".join(f"{word} {n:,}" for word, n in _grown(before, after).items()) or "nothing",
            "beside_mib": (peak[0] - held[0]) / _MIB,
            **dict(zip(("left_mib", "left_files", "left_threads"), self._left(held), strict=True)),
        }

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

    def _start(self, attack: Callable[[_Abuser], None], processes: int) -> Sequence[BaseProcess]:
        keys = self._local.directory / "keys"
        authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
        identity = issue(keys, authority=authority, kind=Kind.TENANT, name=f"abuser-{time.monotonic_ns()}")
        peer, digest = self._federation.executors[0], self._federation.model_digest
        self._abuser = _Abuser(identity, peer, digest, self._inputs, self._outputs)
        context = multiprocessing.get_context("spawn")
        begun = [context.Event() for _ in range(processes)]
        attackers = [context.Process(target=_run, args=(attack, self._abuser, event), daemon=True) for event in begun]
        for process in attackers:
            process.start()
        for event in begun:
            if not event.wait(_DEADLINE_S):
                raise DeadlineExceededError(f"an abuser has not begun within {_DEADLINE_S:g} s")
        return attackers

    def _counts(self) -> dict[str, dict[str, int]]:
        """Of every tenant."""
        return {tenant["tenant"]: tenant["counts"] for tenant in self._status()["tenants"]}

    def _status(self) -> dict[str, Any]:
        lines = self._local.logs("executor").splitlines()
        ready = next(json.loads(line) for line in lines if '"event": "listening"' in line)
        connection = http.client.HTTPConnection(*parse_address(ready["metrics"]), timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", "/status")
            status: dict[str, Any] = json.loads(connection.getresponse().read())
        return status

    def _held(self) -> tuple[int, int, int]:
        """(bytes, open files, threads) of the provider."""
        folder = Path(f"/proc/{self._local.pid('executor')}")
        pages = int((folder / "statm").read_text().split()[1])
        files, tasks = (len(list((folder / kind).iterdir())) for kind in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, tasks

    def _left(self, before: tuple[int, int, int]) -> tuple[float, int, int]:
        """What is more than before, when everybody has gone."""
        end = time.monotonic() + _SETTLE_S
        while self._status()["connections"] > 1 and time.monotonic() < end:
            time.sleep(0.05)
        now = self._held()
        return (now[0] - before[0]) / _MIB, now[1] - before[1], now[2] - before[2]


def _run(attack: Callable[[_Abuser], None], abuser: _Abuser, begun: Event) -> None:
    os.nice(_NICE)
    torch.set_num_threads(1)
    begun.set()
    attack(abuser)


def _percentile(waits: list[float], q: int) -> float:
    return float(np.percentile(np.array(waits) * 1000, q))


def _grown(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, int]:
    """What has been counted of abusers, in the counters' order."""
    names = [tenant for tenant in after if tenant.startswith("abuser")]
    found: dict[str, int] = {}
    for counter in ("requests", "refused", "abandoned", "slow", "failed"):
        grown = sum(after[name][counter] - before.get(name, {}).get(counter, 0) for name in names)
        if grown:
            found[counter] = grown
    return found
