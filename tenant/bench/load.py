"""Tenants that only ask: real TLS clients, each in a process of its own, as many as wanted, for `bench provider`.

    python -m tenant.bench.load FOLDER < load.json

One process imports everything and forks the tenants, so that sixty-four of them cost one start. Every tenant first gets
its answers alone, one tenant after the other; then all begin at once, and for a while every answer is compared with the
one that the tenant got alone. Only then does the measurement begin, in which one row of each answer is compared: a
tenant should cost less than what it measures. It leaves `TENANT.json`, a `Report`, in FOLDER.

A generating tenant asks for its rows through every layer group, forward: a token of a batch. A training one asks for
them forward and then backward: a step. Between two requests a tenant computes with its adapter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, fresh_nonce

Kind = Literal["generating", "training"]
_DEADLINE_S = 120.0
_NICE = 10  # tenants' machines would not take the provider's cores: here they get what it leaves


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    Args:
        name, certificate, key: who it is.
        kind: of its work.
        rows: of each request: sequences of a batch.
        rank: of its adapter on every layer group.
    """

    name: str
    certificate: Path
    key: Path
    kind: Kind
    rows: int
    rank: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, and for how long.

    Args:
        groups: (inputs, outputs) of each layer group.
        seconds: of the measurement.
        checked_s: of the part before it, in which every answer is compared.
    """

    federation: Path
    groups: tuple[tuple[int, int], ...]
    seconds: float
    checked_s: float
    tenants: tuple[Asker, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has seen.

    Args:
        name: of the tenant.
        turns: seconds of each token or step.
        answers: that were compared, in full or one row of them.
        wrong: of these, how many differ from those that it got alone.
        alone: a digest of those.
        error: what ended it early, or empty.
    """

    name: str
    kind: Kind
    rows: int
    turns: list[float]
    answers: int
    wrong: int
    alone: str
    error: str


class _Tenant:
    def __init__(self, asker: Asker, load: Load) -> None:
        federation = load_federation(load.federation)
        self._asker, self._groups = asker, load.groups
        self._channel = Channel(
            federation.executors[0],
            certificate=asker.certificate,
            key=asker.key,
            model_digest=federation.model_digest,
            deadline_s=_DEADLINE_S,
        )
        generator = torch.Generator().manual_seed(zlib.crc32(asker.name.encode()))
        self._rows = {
            width: torch.randint(
                -(1 << 31), 1 << 31, (asker.rows, width), generator=generator, dtype=torch.int64, device="cpu"
            ).to(torch.int32)
            for width in sorted({width for shape in load.groups for width in shape})
        }
        self._hidden = {
            width: torch.randn(asker.rows, width, generator=generator, dtype=torch.float32, device="cpu")
            for width in self._rows
        }
        self._adapters = {
            width: torch.randn(width, asker.rank, generator=generator, dtype=torch.float32, device="cpu")
            for width in self._rows
        }
        self._alone: list[Tensor] = []
        self._answers = self._wrong = 0

    def measure_alone(self) -> None:
        """The answers to compare with."""
        self._alone = [self._ask(*step) for step in self._turn()]
        digest = hashlib.sha256()
        for answer in self._alone:
            digest.update(wire.RING32.pack(answer))
        self._digest = digest.hexdigest()

    def run(self, load: Load) -> Report:
        """All that it does beside the others."""
        turns: list[float] = []
        error = ""
        begun = time.monotonic()
        measured = begun + load.checked_s
        try:
            while time.monotonic() < measured:
                self._take_turn(slice(None))
            while (start := time.monotonic()) < measured + load.seconds:
                row = len(turns) % max(1, self._asker.rows)
                self._take_turn(slice(row, row + 1))
                turns.append(time.monotonic() - start)
        except SymbiosisError as broken:
            error = str(broken)
        return Report(
            name=self._asker.name,
            kind=self._asker.kind,
            rows=self._asker.rows,
            turns=turns,
            answers=self._answers,
            wrong=self._wrong,
            alone=self._digest,
            error=error,
        )

    def _take_turn(self, compared: slice) -> None:
        for step, expected in zip(self._turn(), self._alone, strict=True):
            answer = self._ask(*step)
            self._answers += 1
            self._wrong += not torch.equal(answer[compared], expected[compared])
            self._compute(*step)

    def _turn(self) -> Iterator[tuple[int, Direction]]:
        for group in range(len(self._groups)):
            yield group, FORWARD
        if self._asker.kind == "training":
            for group in reversed(range(len(self._groups))):
                yield group, BACKWARD

    def _columns(self, group: int, direction: Direction) -> tuple[int, int]:
        inputs, outputs = self._groups[group]
        return (inputs, outputs) if direction == FORWARD else (outputs, inputs)

    def _ask(self, group: int, direction: Direction) -> Tensor:
        inputs, outputs = self._columns(group, direction)
        rows = self._rows[inputs]
        request = wire.Execute(nonce=fresh_nonce(), group=group, direction=direction, arithmetic="ring", rows=len(rows))
        return self._channel.request(request, rows, outputs=outputs)

    def _compute(self, group: int, direction: Direction) -> None:
        """What a LoRA adapter of this group takes beside the base model."""
        inputs, outputs = self._columns(group, direction)
        _ = (self._hidden[inputs] @ self._adapters[inputs]) @ self._adapters[outputs].T


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load, dec_hook=lambda kind, value: kind(value))
    torch.set_num_threads(1)
    os.nice(_NICE)
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    lock = folder / "alone"
    lock.touch()
    children = []
    for asker in load.tenants:
        pid = os.fork()
        if not pid:
            os.close(ready_read)
            os.close(go_write)
            _child(asker, load, folder, ready=ready_write, go=go_read)
        children.append(pid)
    os.close(ready_write)
    os.close(go_read)
    while os.read(ready_read, 4096):  # until every tenant has closed its end
        pass
    os.close(go_write)
    print("go", flush=True)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    sys.exit(bool(failed))


def _child(asker: Asker, load: Load, folder: Path, *, ready: int, go: int) -> None:
    """Never returns: an exception that did would run the parent's code."""
    status = 1
    try:
        tenant = _Tenant(asker, load)
        with (folder / "alone").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tenant.measure_alone()
        os.close(ready)
        os.read(go, 1)  # its end is the signal
        report = tenant.run(load)
        (folder / f"{asker.name}.json").write_bytes(msgspec.json.encode(report))
        status = 0
    except SymbiosisError as error:
        sys.stderr.write(f"{asker.name}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
