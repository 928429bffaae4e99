"""Many tenants at one provider: compares batching policies and shardings by turns in one run.

Each variant has its own provider. All providers serve the same synthetic model, and only one provider is busy at any
time. Each tenant is a process with a TLS connection (`request_load`) that sends requests and computes with an adapter,
but has no model. Tenants and providers share one machine, so the CPU time of tenants affects the figures.
"""

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.display import figures
from symbiosis_priv.harness.local import METRICS
from tenant.bench.measured_models import small_llama
from tenant.bench.processes.children import Child
from tenant.bench.processes.providers import provide
from tenant.bench.processes.request_load import DEADLINE_S, Kind, LoadResult, Phase, RequestLoad, serve_load
from tenant.bench.results.result_file import Row, number, percentile

_CHECKED_S = 2.0
_POLICIES: Final = ("none", "lockstep", "opportunistic")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The number of concurrent tenants of each kind."""

    generating: int
    training: int


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Request sizes and adapter ranks. The tenants of a kind use them in rotation.

    Args:
        generating_rows, training_rows: rows of each request.
    """

    generating_rows: tuple[int, ...]
    training_rows: tuple[int, ...]
    ranks: tuple[int, ...]

    def loads(self, scenario: Scenario) -> Iterator[tuple[str, Kind, int, int]]:
        """Yield (name, kind, rows, rank) of each tenant."""
        kinds: tuple[tuple[Kind, int, tuple[int, ...]], ...] = (
            ("generating", scenario.generating, self.generating_rows),
            ("training", scenario.training, self.training_rows),
        )
        for kind, count, sizes in kinds:
            pairs = [(rows, rank) for rank in self.ranks for rows in sizes]
            for i, (rows, rank) in zip(range(count), itertools.cycle(pairs), strict=False):
                yield f"{kind}-{i}", kind, rows, rank


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A configuration of a provider.

    Args:
        sharding: how the ranks divide a product.
    """

    policy: str
    ranks: int = 1
    sharding: str = "columns"

    def __str__(self) -> str:
        return self.policy if self.ranks == 1 else f"{self.policy}-{self.ranks}-{self.sharding}"


def measure_tenants(
    directory: Path,
    *,
    scenarios: Sequence[Scenario],
    mixes: Sequence[Mix],
    variants: Sequence[Variant],
    hidden: int,
    layers: int,
    seconds: float,
    threads: int,
) -> Iterator[tuple[Row, dict[str, str]]]:
    """Start a provider per variant, and let the tenants of each scenario send requests to each provider by turns.

    Args:
        mixes: request sizes and adapter ranks: all scenarios run with the first mix, then with the next.
        layers: blocks of the model, of four layer groups each.

    Yields:
        A row, and by each tenant's name a digest of the answers that the tenant received alone. Figures of the row:
        `token` and `step`, times over the turns of all tenants of a kind (None without such tenants); `rows_per_s` of
        all products; `batch_rows` and `batch_requests`, means per product; `product_share`, the share of the executor's
        busy time that was spent in products; `idle_share`, of the whole time; `answers`, the number of answers that
        were compared with the answers received alone, and `wrong`, the number of those that differed.

    Raises:
        SymbiosisError: a tenant has failed.
    """
    model = small_llama(hidden, inner=2 * hidden, layers=layers).save(directory / "model")
    most = max(s.generating + s.training for s in scenarios)
    with contextlib.ExitStack() as running:
        benches = [
            running.enter_context(_Bench(directory / str(variant), model, variant, threads=threads, tenants=most))
            for variant in variants
        ]
        for mix, scenario, bench in itertools.product(mixes, scenarios, benches):
            yield bench.run(scenario, mix, seconds=seconds)


def compare_bits(
    directory: Path, *, scenarios: Sequence[Scenario], variants: Sequence[Variant], seconds: float
) -> Iterator[Row]:
    """Start one small provider after the other and compare the tenants' answers.

    Each answer to a concurrent tenant is compared with the answer that the tenant received alone. The answers received
    alone are compared with those of the first provider (`tenants_with_other_answers_alone`). Arguments and errors as
    for `measure_tenants`.
    """
    mixes = [Mix(generating_rows=(1, 3, 8), training_rows=(2, 17, 64), ranks=(8,))]
    measured = partial(measure_tenants, scenarios=scenarios, mixes=mixes, hidden=64, layers=1, seconds=seconds)
    first: dict[str, str] = {}
    for variant in variants:
        folder = directory / str(variant)
        folder.mkdir()
        for row, alone in measured(folder, variants=[variant], threads=1):
            first = {**alone, **first}
            yield {
                **{name: row[name] for name in ("policy", "ranks", "sharding")},
                "tenants": number(row["generating"]) + number(row["training"]),
                "answers": row["answers"],
                "wrong": row["wrong"],
                "tenants_with_other_answers_alone": sum(first[tenant] != digest for tenant, digest in alone.items()),
            }


def picture(rows: Sequence[Row]) -> str:
    """Draw an SVG: tokens per second above, median milliseconds of a token below, with a bar per policy and number of
    tenants."""
    titles = {"tokens_per_s": "tokens per second", "token_p50_ms": "milliseconds of a token, median"}
    return figures.stacked([_bars(rows, title, figure) for figure, title in titles.items()])


def _bars(rows: Sequence[Row], title: str, figure: str) -> str:
    def place(row: Row) -> tuple[float, str, int]:
        tenants = number(row["generating"]) + number(row["training"])
        return tenants, str(row["generating_rows"]), _POLICIES.index(str(row["policy"]))

    bars = [
        figures.Bar(
            f"{row['policy']}, {row['generating']} x {row['generating_rows']} rows + {row['training']}",
            number(row[figure] or 0.0),
            colour=figures.COLOURS[_POLICIES.index(str(row["policy"]))],
        )
        for row in sorted(rows, key=place)
    ]
    return figures.bars(title, bars, figures.Axis(title, 0.0, max(bar.value for bar in bars) or 1.0))


class _Bench:
    """A provider, and its tenants' certificates."""

    def __init__(self, directory: Path, model: Path, variant: Variant, *, threads: int, tenants: int) -> None:
        options: dict[str, dict[str, object]] = {
            "executor": {"threads": threads, "ranks": variant.ranks, "sharding": variant.sharding},
            "scheduler": {"policy": variant.policy},
            "limits": {"max_connections": max(256, 2 * tenants)},
            "metrics": METRICS,
        }
        self._variant = variant
        cache = model.parent / "cache"  # shared by all providers, because they serve the same weights
        self._local = provide(model, directory, threads=threads, helpers=0, cache=cache, provider_options=options)
        groups = WeightStore(model, cache=cache).manifest().groups
        self._groups = tuple((group.inputs, group.stacked_outputs) for group in groups)
        self._identities: dict[str, Identity] = {}

    def __enter__(self) -> Self:
        self._local.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    def run(self, scenario: Scenario, mix: Mix, *, seconds: float) -> tuple[Row, dict[str, str]]:
        """Measure a scenario."""
        loads = [self._load(*load, seconds) for load in mix.loads(scenario)]
        with contextlib.ExitStack() as running:
            tenants: list[Child[Phase, Any]] = [
                running.enter_context(Child(load.name, serve_load, load)) for load in loads
            ]
            alone = {
                load.name: tenant.ask("alone", timeout_s=DEADLINE_S)
                for load, tenant in zip(loads, tenants, strict=True)
            }
            _ask_together(tenants, "checked", seconds=loads[0].checked_s)
            before = self._executor()
            seen: list[LoadResult] = _ask_together(tenants, "measured", seconds=seconds)
            after = self._executor()
        row = self._row(scenario, loads, seen, seconds)
        return {**row, **_executor_figures(before, after), **_compared(seen)}, alone

    def _load(self, name: str, kind: Kind, rows: int, rank: int, seconds: float) -> RequestLoad:
        if name not in self._identities:
            self._identities[name] = self._local.issue_tenant(name)
        return RequestLoad(
            name=name,
            identity=self._identities[name],
            kind=kind,
            rows=rows,
            rank=rank,
            federation=self._local.federation,
            groups=self._groups,
            seconds=seconds,
            checked_s=min(_CHECKED_S, seconds),
        )

    def _executor(self) -> dict[str, Any]:
        """Return the entry of the executor in the provider's `/status`."""
        executor: dict[str, Any] = self._local.status("executor")["executor"]
        return executor

    def _row(self, scenario: Scenario, loads: Sequence[RequestLoad], seen: Sequence[LoadResult], seconds: float) -> Row:
        of_kind = {
            kind: [(load.rows, found.turns) for load, found in zip(loads, seen, strict=True) if load.kind == kind]
            for kind in ("generating", "training")
        }
        per_s = {kind: sum(rows * len(turns) for rows, turns in found) / seconds for kind, found in of_kind.items()}
        millis = {kind: _millis([t for _, turns in found for t in turns]) for kind, found in of_kind.items()}
        sizes = sorted({rows for rows, _ in of_kind["generating"]})
        return {
            "generating": scenario.generating,
            "generating_rows": ", ".join(map(str, sizes)) or None,
            "training": scenario.training,
            "policy": self._variant.policy,
            "ranks": self._variant.ranks,
            "sharding": self._variant.sharding if self._variant.ranks > 1 else None,
            "tokens_per_s": per_s["generating"],
            **{f"token_{name}_ms": value for name, value in millis["generating"].items()},
            "trained_rows_per_s": per_s["training"],
            **{f"step_{name}_ms": value for name, value in millis["training"].items() if name != "mean"},
        }


def _ask_together(tenants: Sequence[Child[Phase, Any]], phase: Phase, *, seconds: float) -> list[Any]:
    for tenant in tenants:
        tenant.send(phase)
    return [tenant.receive(timeout_s=seconds + DEADLINE_S) for tenant in tenants]


def _executor_figures(before: dict[str, Any], after: dict[str, Any]) -> Row:
    def grown(name: str) -> float:
        return float(after[name] - before[name])

    products = max(1, sum(after["batch_rows"]["counts"]) - sum(before["batch_rows"]["counts"]))
    rows, requests = (after[name]["total"] - before[name]["total"] for name in ("batch_rows", "batch_requests"))
    return {
        "rows_per_s": rows / grown("uptime"),
        "batch_rows": rows / products,
        "batch_requests": requests / products,
        "product_share": grown("seconds") / (grown("uptime") - grown("idle")),
        "idle_share": grown("idle") / grown("uptime"),
        "resident_mib": after["resident"] / (1 << 20),
    }


def _compared(seen: Sequence[LoadResult]) -> Row:
    return {"answers": sum(found.answers for found in seen), "wrong": sum(found.wrong for found in seen)}


def _millis(turns: Sequence[float]) -> Row:
    if not turns:
        return {"mean": None, "p50": None, "p99": None}
    p50, p99 = (percentile(turns, q, unit=1e-3) for q in (50, 99))
    return {"mean": 1000 * statistics.fmean(turns), "p50": p50, "p99": p99}
