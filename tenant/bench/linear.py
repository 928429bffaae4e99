"""What a masked linear costs, measured beside a bare TLS echo of the same bytes, in one run and by turns.

Every repetition measures each quantity once, one after the other, so that whatever else the machine does meanwhile hits
all of them alike. Pads are prefetched, as they are in a running session: the clock only runs once the pool holds one.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv import wire
from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.keystream import SessionSecret, add_keystream, expand, mask_key
from symbiosis_priv.local import LocalFederation
from symbiosis_priv.ring import FORWARD
from symbiosis_priv.weights import WeightStore
from tenant.backend import RingBackend
from tenant.bench.echo import EchoClient, EchoServer
from tenant.channel import Channel, fresh_nonce
from tenant.facts import Preparation
from tenant.preparation import prepare
from tenant.rows import FloatRows
from tenant.session import Session, SessionOptions
from tenant.verifier import DEFAULT_COLUMNS

PARTS = ("quantise", "mask", "network + product", "unmask, verify, dequantise")
_WARM_UP = 5
_PREFETCH_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Timing:
    """Of one quantity over all repetitions, in microseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """From measurements in seconds."""
        p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
        return cls(float(p50), float(p99))


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """One line of the table: a square linear of `width`, and `rows` rows of it.

    Args:
        up, down: bytes of a request and its answer, frames included.
        echo: bare TLS echo of the same bytes.
        kernel: the product alone, in this process.
        masked: a whole masked and verified call: float rows in, float rows out.
        parts: of a masked call, measured one by one.
    """

    width: int
    rows: int
    up: int
    down: int
    echo: Timing
    kernel: Timing
    masked: Timing
    parts: dict[str, Timing]

    @property
    def over_echo(self) -> float:
        """Masked call over echo, medians."""
        return self.masked.p50 / self.echo.p50

    @property
    def over_floor(self) -> float:
        """Masked call over echo and kernel together, medians."""
        return self.masked.p50 / (self.echo.p50 + self.kernel.p50)


def measure_round_trips(
    directory: Path,
    *,
    width: int,
    row_counts: list[int],
    repeat: int,
    threads: int,
    on_result: Callable[[RoundTrip], None],
) -> None:
    """Start providers and an echo server, and measure a `width` x `width` linear.

    Args:
        directory: new or empty.
        width: of the layer, a multiple of 8.
        row_counts: rows per call.
        repeat: repetitions.
        threads: torch threads of each process, this one included.
        on_result: told every line as soon as it is there.
    """
    torch.set_num_threads(threads)
    model = synthetic_checkpoint(directory / "model", width=width)
    options = {"executor": {"threads": threads}}
    with LocalFederation(model, directory / "federation", provider_options=options) as local:
        federation = load_federation(local.federation)
        store = WeightStore(model, cache=local.directory / "cache")
        preparation = prepare(
            store, digest=federation.model_digest, columns=DEFAULT_COLUMNS, cache=local.directory / "cache"
        )
        bench = _Bench(federation, preparation, store, width=width)
        with contextlib.closing(bench), EchoServer(local.directory, federation.executors[0]) as server:
            for rows in row_counts:
                on_result(bench.run(rows, repeat=repeat, port=server.port))


def synthetic_checkpoint(folder: Path, *, width: int) -> Path:
    """A Llama of one layer and random weights whose output projection is `width` x `width`."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class _Bench:
    def __init__(self, federation: Federation, preparation: Preparation, store: WeightStore, *, width: int) -> None:
        self._federation = federation
        self._facts = preparation.facts
        self._keys = preparation.keys
        self._width = width
        self._index = next(i for i, facts in enumerate(preparation.facts) if facts.entry.members[0].endswith("o_proj"))
        self._group = self._facts[self._index]
        self._matrix = store.matrix(self._index)
        self._session = Session(federation, preparation, options=SessionOptions())
        self._backend = RingBackend(preparation.facts, self._session)
        self._channel = Channel(
            federation.executors[0],
            certificate=federation.tenant_certificate,
            key=federation.tenant_key,
            model_digest=federation.model_digest,
            deadline_s=60.0,
        )

    def close(self) -> None:
        self._backend.close()
        self._channel.close()

    def run(self, rows: int, *, repeat: int, port: int) -> RoundTrip:
        """Measure everything for one row count."""
        x = torch.randn(rows, self._width, dtype=torch.float32, device="cpu")
        secret = SessionSecret()
        key = mask_key(secret.seed_for("bench"), group_name=self._group.entry.name, direction=FORWARD)
        times: dict[str, list[float]] = {name: [] for name in ("echo", "kernel", "masked", *PARTS)}
        up, down = self._frame_bytes(x, key)
        peer = self._federation.executors[0]
        total = repeat + _WARM_UP
        with EchoClient(self._federation, peer, port=port, up=up, down=down, repetitions=total) as echo:
            for turn in range(total):
                if turn == _WARM_UP:
                    times = {name: [] for name in times}
                times["echo"].append(_seconds(echo.exchange))
                masked = self._measure_parts(x, key, times)
                times["kernel"].append(_seconds(functools.partial(self._matrix.product, masked)))
                if turn:
                    self._wait_for_pads(rows)
                times["masked"].append(_seconds(lambda: self._backend.linear(self._index, FORWARD, x)))
        timings = {name: Timing.of(seconds) for name, seconds in times.items()}
        return RoundTrip(
            width=self._width,
            rows=rows,
            up=up,
            down=down,
            echo=timings["echo"],
            kernel=timings["kernel"],
            masked=timings["masked"],
            parts={name: timings[name] for name in PARTS},
        )

    def _measure_parts(self, x: Tensor, key: bytes, times: dict[str, list[float]]) -> Tensor:
        """A masked call step by step, as `RingBackend` and `Session` do it; the masked rows."""
        effect = self._matrix.product(expand(key, first_row=0, rows=len(x), width=self._width))  # ahead of time
        r, v = self._keys.columns(self._index, FORWARD)
        masked = torch.empty(x.shape, dtype=torch.int32, device="cpu")
        y = torch.empty((len(x), self._width), dtype=torch.float32, device="cpu")
        expected = torch.empty(len(x), dtype=torch.int64, device="cpu")
        rows = FloatRows(self._group, FORWARD, [x], [y])
        clock = _Clock(times)
        rows.encode(masked, column=v, expected=expected)
        clock.lap("quantise")
        add_keystream(key, first_row=0, to=masked)
        clock.lap("mask")
        request = wire.Execute(
            nonce=fresh_nonce(), group=self._index, direction=FORWARD, arithmetic="ring", rows=len(masked)
        )
        answer = self._channel.request(request, masked, outputs=self._width)
        clock.lap("network + product")
        accepted = rows.decode(0, answer, effects=[effect], column=r, expected=expected)
        clock.lap("unmask, verify, dequantise")
        assert accepted
        return masked

    def _frame_bytes(self, x: Tensor, key: bytes) -> tuple[int, int]:
        """What one request and its answer take on the wire."""
        self._channel.welcome()  # or the greeting would count
        traffic = self._channel.traffic
        sent, received = traffic.bytes_sent, traffic.bytes_received
        self._measure_parts(x, key, {name: [] for name in PARTS})
        return traffic.bytes_sent - sent, traffic.bytes_received - received

    def _wait_for_pads(self, rows: int) -> None:
        """Until the pool holds a pad for the next call."""
        deadline = time.monotonic() + _PREFETCH_DEADLINE_S
        while True:
            if self._session.ledger().pads_ready >= rows:
                return
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"no pad for {rows} rows within {_PREFETCH_DEADLINE_S:g} s")
            time.sleep(2e-4)


class _Clock:
    def __init__(self, times: dict[str, list[float]]) -> None:
        self._times = times
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        self._times[name].append(now - self._last)
        self._last = now


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
