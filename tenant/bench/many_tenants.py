"""`bench provider`: many tenants at one provider, which serves a synthetic model.

Each tenant is a process with a TLS connection (`request_load`) that sends requests and computes with an adapter,
but has no model. Tenants and providers share one machine, so the CPU time of tenants affects the figures.
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import METRICS
from tenant.bench.measured_models import HALF_THE_CORES, provide, small_llama
from tenant.bench.options import Progress, Seconds, Threads, benchmark
from tenant.bench.processes import Child, ask_all, cpu_seconds
from tenant.bench.report import Goal, Row, by, figure, percentile, ratio, where
from tenant.bench.request_load import DEADLINE_S, Kind, LoadResult, Phase, RequestLoad, serve_load

_CHECKED_S = 2.0
_SLOW, _RUNS_S = "slow", 0.025  # a slow tenant runs for this time, and stands still three times as long
_TRAINING_ROWS: Final = (2, 16, 64, 256)
_ADAPTER_RANKS: Final = (8, 64)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    counts = by(where(rows, training=0, slow=0), "generating")
    for beside, others in (
        ("two training ones", {"training": 2, "slow": 0}),
        ("a slow one", {"training": 0, "slow": 1}),
    ):
        found = where(rows, generating=6, **others)
        if 6 in counts and found:
            what = f"mean time of a token of six tenants with {beside}, over six alone"
            yield Goal(what, ratio(found[0], counts[6], "token_mean_ms"), at_most=1.05)
    if 1 in counts and 16 in counts:
        tokens = ratio(counts[16], counts[1], "tokens_per_s")
        yield Goal("tokens of sixteen tenants over those of one", tokens, at_least=4)
    if 16 in counts:
        what = "products' share of the executor's busy time, sixteen tenants"
        yield Goal(what, figure(counts[16], "product_share"), at_least=0.9)


@benchmark("provider", goals=goals)
def provider(
    folder: Path,
    progress: Progress,
    *,
    tenants: Annotated[
        str, typer.Option(help="How many at once, generating+training+slow, separated by commas.")
    ] = "1+0,16+0,6+0,6+2,6+0+1,8+4,0+8",
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    seconds: Seconds = 8.0,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Let many tenants send requests to one provider, and compare all answers. A slow tenant generates too, with a
    quarter of a core; its own speed is not shown.

    Status 1 if one bit of an answer differs from the answer that the same tenant received alone.

    Example: symbiosis-priv bench provider --tenants 1+0,6+2 --hidden 1024
    """
    if hidden % 8:
        raise ConfigError("--hidden: write a multiple of 8")
    counts = [re.fullmatch(r"(\d+)\+(\d+)(?:\+(\d+))?", part.strip()) for part in tenants.split(",")]
    scenarios = [Scenario(*(int(number or 0) for number in count.groups())) for count in counts if count is not None]
    if len(scenarios) < len(counts) or not all(scene.generating + scene.training for scene in scenarios):
        raise ConfigError(
            f"--tenants {tenants!r}: write GENERATING+TRAINING(+SLOW) separated by commas, like 1+0,6+0+1"
        )
    model = small_llama(hidden, inner=2 * hidden, layers=1).save(folder / "model")
    most = max(map(sum, scenarios))
    bench = _Bench(folder / "provider", model, threads=threads, tenants=most)
    with bench.local:
        for scenario in scenarios:
            yield bench.run(scenario, seconds=seconds)


class Scenario(NamedTuple):
    """The number of concurrent tenants of each kind."""

    generating: int
    training: int
    slow: int = 0

    def loads(self) -> Iterator[tuple[str, Kind, int, int]]:
        """Yield (name, kind, rows of a request, rank of the adapter) of each tenant: the tenants of a kind use the rows
        and ranks in rotation."""
        kinds: tuple[tuple[str, Kind, int, Sequence[int]], ...] = (
            ("generating", "generating", self.generating, (1,)),
            ("training", "training", self.training, _TRAINING_ROWS),
            (_SLOW, "generating", self.slow, (1,)),
        )
        for name, kind, count, sizes in kinds:
            pairs = [(rows, rank) for rank in _ADAPTER_RANKS for rows in sizes]
            for i, (rows, rank) in zip(range(count), itertools.cycle(pairs), strict=False):
                yield f"{name}-{i}", kind, rows, rank


class _Bench:
    """A provider, and its tenants' certificates."""

    def __init__(self, directory: Path, model: Path, *, threads: int, tenants: int) -> None:
        options: dict[str, dict[str, object]] = {
            "executor": {"threads": threads},
            "limits": {"max_connections": max(256, 2 * tenants)},
            "metrics": METRICS,
        }
        cache = model.parent / "cache"
        self.local = provide(model, directory, threads=threads, helpers=0, cache=cache, provider_options=options)
        groups = WeightStore(model, cache=cache).manifest().groups
        self._groups = tuple((group.inputs, group.stacked_outputs) for group in groups)
        self._identities: dict[str, Identity] = {}

    def run(self, scenario: Scenario, *, seconds: float) -> Row:
        loads = [self._load(*tenant, seconds=seconds) for tenant in scenario.loads()]
        with contextlib.ExitStack() as running:
            tenants: list[Child[Phase, Any]] = [
                running.enter_context(Child(load.name, serve_load, load)) for load in loads
            ]
            for tenant in tenants:
                tenant.ask("alone", timeout_s=DEADLINE_S)
            ask_all(tenants, "checked", timeout_s=loads[0].checked_s + DEADLINE_S)
            pid = self.local.pid("executor")
            assert pid is not None, "it runs"
            before, cpu = self.local.status("executor")["executor"], cpu_seconds([pid])
            slow = [tenant.pid for load, tenant in zip(loads, tenants, strict=True) if load.name.startswith(_SLOW)]
            with _slowed(slow):
                results: list[LoadResult] = ask_all(tenants, "measured", timeout_s=seconds + DEADLINE_S)
            after, cpu = self.local.status("executor")["executor"], cpu_seconds([pid]) - cpu
        found = [(load, its) for load, its in zip(loads, results, strict=True) if not load.name.startswith(_SLOW)]
        return {
            "generating": scenario.generating,
            "training": scenario.training,
            "slow": scenario.slow,
            **_speed(found, "generating", "tokens_per_s", "token", seconds),
            **_speed(found, "training", "trained_rows_per_s", "step", seconds),
            **_products(before, after),
            # of the whole provider; for a narrow model nearly all of it is the gateway's
            "request_cpu_ms": 1000 * cpu / max(1, sum(result.answers for result in results)),
            "answers": sum(result.answers for result in results),
            "wrong": sum(result.wrong for result in results),
        }

    def _load(self, name: str, kind: Kind, rows: int, rank: int, *, seconds: float) -> RequestLoad:
        if name not in self._identities:
            self._identities[name] = self.local.issue_tenant(name)
        return RequestLoad(
            name=name,
            identity=self._identities[name],
            kind=kind,
            rows=rows,
            rank=rank,
            federation=self.local.federation,
            groups=self._groups,
            seconds=seconds,
            checked_s=min(_CHECKED_S, seconds),
        )


def _speed(
    found: Sequence[tuple[RequestLoad, LoadResult]], kind: Kind, per_s: str, turn: str, seconds: float
) -> dict[str, float | None]:
    """Rows per second of the tenants of a kind, and the times of their turns (None without such tenants)."""
    of_kind = [(load.rows, result.turns) for load, result in found if load.kind == kind]
    turns = [spent for _, turns in of_kind for spent in turns]
    row = {
        per_s: sum(rows * len(turns) for rows, turns in of_kind) / seconds,
        f"{turn}_mean_ms": 1000 * statistics.fmean(turns) if turns else None,
    }
    return row | {f"{turn}_p{q}_ms": percentile(turns, q, unit=1e-3) if turns else None for q in (50, 99)}


def _products(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What an executor has done between two statuses. `batch_rows`, `batch_requests`: means per product;
    `product_share`: products' share of its busy time; `idle_share`: of the whole time."""
    uptime, idle, busy = (float(after[name] - before[name]) for name in ("uptime", "idle", "seconds"))
    products = max(1, sum(after["batch_rows"]["counts"]) - sum(before["batch_rows"]["counts"]))
    rows, requests = (after[name]["total"] - before[name]["total"] for name in ("batch_rows", "batch_requests"))
    return {
        "rows_per_s": rows / uptime,
        "batch_rows": rows / products,
        "batch_requests": requests / products,
        "product_share": busy / (uptime - idle),
        "idle_share": idle / uptime,
        "resident_mib": after["resident"] / (1 << 20),
    }


@contextmanager
def _slowed(pids: Sequence[int]) -> Iterator[None]:
    """Context manager: let these processes run a quarter of the time."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while pids and not ended.wait(_RUNS_S):
            for sent, pause in ((signal.SIGSTOP, 3 * _RUNS_S), (signal.SIGCONT, 0.0)):
                for pid in pids:
                    os.kill(pid, sent)
                ended.wait(pause)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stop_and_go)
        try:
            yield
        finally:
            ended.set()
        done.result()
