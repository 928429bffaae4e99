"""Tenants that only ask: real TLS clients, each in a process of its own, as many as wanted, for `bench provider`.

    python -m tenant.bench.load FOLDER < load.json

One process imports everything and forks the tenants, so that sixty-four of them cost one start. Every tenant first gets
its answers alone, one tenant after the other; then all begin at once, and every answer is compared with the one that
the tenant got alone. A tenant leaves `TENANT.json`, a `Report`, in FOLDER.

A generating tenant asks for its rows through every layer group, forward: a token of a batch. A training one asks for
them forward and then backward: a step.
"""

from __future__ import annotations

import fcntl
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

from symbiosis_priv import wire
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.ring import BACKWARD, FORWARD, Direction
from tenant.channel import Channel, fresh_nonce

Kind = Literal["generating", "training"]
_DEADLINE_S = 120.0


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: how it is called, its certificate and key, and what it asks for."""

    name: str
    certificate: Path
    key: Path
    kind: Kind
    rows: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, and for how long.

    Args:
        groups: (inputs, outputs) of each layer group.
    """

    federation: Path
    groups: tuple[tuple[int, int], ...]
    seconds: float
    tenants: tuple[Asker, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has seen.

    Args:
        turns: seconds of each token or step.
        wrong: answers that differ from those that it got alone.
        error: what ended it early, or empty.
    """

    kind: Kind
    rows: int
    turns: list[float]
    wrong: int
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
        widest = max(max(shape) for shape in load.groups)
        self._rows = torch.randint(
            -(1 << 31), 1 << 31, (asker.rows, widest), generator=generator, dtype=torch.int64, device="cpu"
        ).to(torch.int32)
        self._alone: list[Tensor] = []

    def measure_alone(self) -> None:
        """The answers to compare with."""
        self._alone = [self._ask(*step) for step in self._turn()]

    def run(self, seconds: float) -> Report:
        turns: list[float] = []
        wrong = 0
        error = ""
        begun = time.monotonic()
        try:
            while (start := time.monotonic()) < begun + seconds:
                for step, expected in zip(self._turn(), self._alone, strict=True):
                    wrong += not torch.equal(self._ask(*step), expected)
                turns.append(time.monotonic() - start)
        except SymbiosisError as broken:
            error = str(broken)
        return Report(kind=self._asker.kind, rows=self._asker.rows, turns=turns, wrong=wrong, error=error)

    def _turn(self) -> Iterator[tuple[int, Direction]]:
        for group in range(len(self._groups)):
            yield group, FORWARD
        if self._asker.kind == "training":
            for group in reversed(range(len(self._groups))):
                yield group, BACKWARD

    def _ask(self, group: int, direction: Direction) -> Tensor:
        inputs, outputs = self._groups[group] if direction == FORWARD else reversed(self._groups[group])
        rows = self._rows[:, :inputs].contiguous()
        request = wire.Execute(nonce=fresh_nonce(), group=group, direction=direction, arithmetic="ring", rows=len(rows))
        return self._channel.request(request, rows, outputs=outputs)


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load, dec_hook=lambda kind, value: kind(value))
    torch.set_num_threads(1)
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
        report = tenant.run(load.seconds)
        (folder / f"{asker.name}.json").write_bytes(msgspec.json.encode(report))
        status = 0
    except SymbiosisError as error:
        sys.stderr.write(f"{asker.name}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
