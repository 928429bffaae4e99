"""`bench provider`: many tenants at one provider, with each batching policy and sharding by turns in one run.

Each variant has its own provider. All providers serve the same synthetic model, and only one provider is busy at any
time. Each tenant is a process with a TLS connection (`request_load`) that sends requests and computes with an adapter,
but has no model. Tenants and providers share one machine, so the CPU time of tenants affects the figures.
"""

import contextlib
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import METRICS
from tenant.bench.measured_models import HALF_THE_CORES, provide, small_llama
from tenant.bench.options import Progress, Seconds, Threads, benchmark, names, numbers
from tenant.bench.processes import Child
from tenant.bench.report import Goal, Row, by, distinct, figure, percentile, ratio, where
from tenant.bench.request_load import DEADLINE_S, Kind, LoadResult, Phase, RequestLoad, serve_load

_CHECKED_S = 2.0
_POLICIES: Final = ("none", "opportunistic")
_SHARDINGS: Final = ("columns", "gathered")


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for scene in distinct(rows, "generating", "generating_rows", "training", "ranks", "sharding"):
        policies = by(where(rows, **scene), "policy")
        if len(policies) == 2 and scene["generating"] and scene["training"]:
            ours, none = policies["opportunistic"], policies["none"]
            sizes = f"{scene['generating']} with rows {scene['generating_rows']}, {scene['training']} train"
            yield Goal(f"tokens a second over none's, {sizes}", ratio(ours, none, "tokens_per_s"), at_least=1)
            yield Goal(f"mean latency over none's, {sizes}", ratio(ours, none, "token_mean_ms"), at_most=1)
    alone = [row for row in rows if row["policy"] == "opportunistic" and not row["training"]]
    counts = by(alone, "generating")
    mixed = where(rows, policy="opportunistic", generating=6, training=2)
    if 6 in counts and mixed:
        what = "median latency of six tenants with two training ones, over six alone"
        yield Goal(what, ratio(mixed[0], counts[6], "token_p50_ms"), at_most=1.5)
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
        str, typer.Option(help="How many at once, generating+training, separated by commas.")
    ] = "1+0,16+0,6+0,6+2,8+4",
    generating_rows: Annotated[
        str,
        typer.Option(
            help="Rows of generating tenants' requests, in rotation; with slashes, one mix after the other: "
            "1/2,4,8,16,32,64,128,256 for one row each, then for batches."
        ),
    ] = "1",
    training_rows: Annotated[
        str, typer.Option(help="Rows of training tenants' requests, in rotation.")
    ] = "2,16,64,256",
    adapters: Annotated[str, typer.Option(help="Ranks of the tenants' adapters, in rotation.")] = "8,64",
    policies: Annotated[str, typer.Option(help="Batching policies, separated by commas.")] = ",".join(_POLICIES),
    ranks: Annotated[str, typer.Option(help="Processes that hold the model together, separated by commas.")] = "1",
    shardings: Annotated[str, typer.Option(help="How ranks divide a product, separated by commas.")] = (
        ",".join(_SHARDINGS)
    ),
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the synthetic model.")] = 1,
    seconds: Seconds = 8.0,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Let many tenants send requests to one provider, with each batching policy by turns; compare all answers.

    Status 1 if one bit of an answer differs from the answer that the same tenant received alone.

    Example: symbiosis-priv bench provider --tenants 1+0,6+2 --policies none,opportunistic --hidden 1024
    """
    if hidden % 8:
        raise ConfigError("--hidden: write a multiple of 8")
    mixes = [
        Mix(
            generating_rows=tuple(numbers(rows, "--generating-rows")),
            training_rows=tuple(numbers(training_rows, "--training-rows")),
            ranks=tuple(numbers(adapters, "--adapters")),
        )
        for rows in generating_rows.split("/")
    ]
    counts = [re.fullmatch(r"(\d+)\+(\d+)", part.strip()) for part in tenants.split(",")]
    scenarios = [Scenario(generating=int(count[1]), training=int(count[2])) for count in counts if count is not None]
    if len(scenarios) < len(counts) or not all(scene.generating + scene.training for scene in scenarios):
        raise ConfigError(f"--tenants {tenants!r}: write GENERATING+TRAINING separated by commas, like 1+0,6+2")
    ways = names(shardings, _SHARDINGS, "--shardings")
    variants = [
        Variant(policy=policy, ranks=count, sharding=sharding)
        for policy in names(policies, _POLICIES, "--policies")
        for count in numbers(ranks, "--ranks")
        for sharding in (ways if count > 1 else ways[:1])  # a single rank does not divide products
    ]
    model = small_llama(hidden, inner=2 * hidden, layers=layers).save(folder / "model")
    most = max(scene.generating + scene.training for scene in scenarios)
    benches = [_Bench(folder / str(one), model, one, threads=threads, tenants=most) for one in variants]
    with contextlib.ExitStack() as running:
        for bench in benches:
            running.enter_context(bench.local)
        for mix, scenario, bench in itertools.product(mixes, scenarios, benches):
            yield bench.run(scenario, mix, seconds=seconds)


class Scenario(NamedTuple):
    """The number of concurrent tenants of each kind."""

    generating: int
    training: int


class Mix(NamedTuple):
    """Request sizes, in rows, and adapter ranks. The tenants of a kind use them in rotation."""

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


class Variant(NamedTuple):
    """A configuration of a provider; `sharding` says how the ranks divide a product."""

    policy: str
    ranks: int = 1
    sharding: str = "columns"

    def __str__(self) -> str:
        return self.policy if self.ranks == 1 else f"{self.policy}-{self.ranks}-{self.sharding}"


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
        self.local = provide(model, directory, threads=threads, helpers=0, cache=cache, provider_options=options)
        groups = WeightStore(model, cache=cache).manifest().groups
        self._groups = tuple((group.inputs, group.stacked_outputs) for group in groups)
        self._identities: dict[str, Identity] = {}

    def run(self, scenario: Scenario, mix: Mix, *, seconds: float) -> Row:
        loads = [self._load(*tenant, seconds=seconds) for tenant in mix.loads(scenario)]
        with contextlib.ExitStack() as running:
            tenants: list[Child[Phase, Any]] = [
                running.enter_context(Child(load.name, serve_load, load)) for load in loads
            ]
            for tenant in tenants:
                tenant.ask("alone", timeout_s=DEADLINE_S)
            _ask_together(tenants, "checked", seconds=loads[0].checked_s)
            before = self.local.status("executor")["executor"]
            results: list[LoadResult] = _ask_together(tenants, "measured", seconds=seconds)
            after = self.local.status("executor")["executor"]
        found = list(zip(loads, results, strict=True))
        sizes = sorted({load.rows for load in loads if load.kind == "generating"})
        return {
            "generating": scenario.generating,
            "generating_rows": ", ".join(map(str, sizes)) or None,
            "training": scenario.training,
            "policy": self._variant.policy,
            "ranks": self._variant.ranks,
            "sharding": self._variant.sharding if self._variant.ranks > 1 else None,
            **_speed(found, "generating", "tokens_per_s", "token", seconds),
            **_speed(found, "training", "trained_rows_per_s", "step", seconds),
            **_products(before, after),
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


def _ask_together(tenants: Sequence[Child[Phase, Any]], phase: Phase, *, seconds: float) -> list[Any]:
    for tenant in tenants:
        tenant.send(phase)
    return [tenant.receive(timeout_s=seconds + DEADLINE_S) for tenant in tenants]
