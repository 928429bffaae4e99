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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

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
_POLICIES: Final = ("none", "lockstep", "opportunistic")
_SHARDINGS: Final = ("columns", "gathered")


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for scene in distinct(rows, "generating", "generating_rows", "training", "ranks", "sharding"):
        policies = by(where(rows, **scene), "policy")
        ours = policies.get("opportunistic")
        if ours is None or not (scene["generating"] and scene["training"]):
            continue
        sizes = f"{scene['generating']} with rows {scene['generating_rows']}, {scene['training']} train"
        for other in ("none", "lockstep"):
            if (theirs := policies.get(other)) is not None:
                yield Goal(f"tokens a second over {other}'s, {sizes}", ratio(ours, theirs, "tokens_per_s"), at_least=1)
                yield Goal(f"mean latency over {other}'s, {sizes}", ratio(ours, theirs, "token_mean_ms"), at_most=1)
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
    measured = partial(measure_tenants, folder, scenarios=scenarios, mixes=mixes, variants=variants)
    yield from (row for row, _ in measured(hidden=hidden, layers=layers, seconds=seconds, threads=threads))


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
        mixes: all scenarios run with the first mix, then with the next.
        layers: blocks of the model, of four layer groups each.

    Yields:
        A row, and by each tenant's name a digest of the answers that the tenant received alone. Figures of the row:
        `token` and `step`, times over the turns of all tenants of a kind (None without such tenants); `rows_per_s` of
        all products; `batch_rows` and `batch_requests`, means per product; `product_share`, the share of the executor's
        busy time that was spent in products; `idle_share`, of the whole time; `answers`, the number of answers that
        were compared with the answers received alone, and `wrong`, the number of those that differed.
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
        loads = []
        for name, kind, rows, rank in mix.loads(scenario):
            if name not in self._identities:
                self._identities[name] = self._local.issue_tenant(name)
            load = RequestLoad(
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
            loads.append(load)
        with contextlib.ExitStack() as running:
            tenants: list[Child[Phase, Any]] = [
                running.enter_context(Child(load.name, serve_load, load)) for load in loads
            ]
            alone = {
                load.name: tenant.ask("alone", timeout_s=DEADLINE_S)
                for load, tenant in zip(loads, tenants, strict=True)
            }
            _ask_together(tenants, "checked", seconds=loads[0].checked_s)
            before = self._local.status("executor")["executor"]
            seen: list[LoadResult] = _ask_together(tenants, "measured", seconds=seconds)
            after = self._local.status("executor")["executor"]
        row: Row = {
            "generating": scenario.generating,
            "generating_rows": ", ".join(map(str, sorted({one.rows for one in loads if one.kind == "generating"})))
            or None,
            "training": scenario.training,
            "policy": self._variant.policy,
            "ranks": self._variant.ranks,
            "sharding": self._variant.sharding if self._variant.ranks > 1 else None,
        }
        for kind, per_s, turn in (
            ("generating", "tokens_per_s", "token"),
            ("training", "trained_rows_per_s", "step"),
        ):
            found = [(one.rows, result.turns) for one, result in zip(loads, seen, strict=True) if one.kind == kind]
            turns = [seconds for _, turns in found for seconds in turns]
            row[per_s] = sum(rows * len(turns) for rows, turns in found) / seconds
            if kind == "generating":
                row["token_mean_ms"] = 1000 * statistics.fmean(turns) if turns else None
            for q in (50, 99):
                row[f"{turn}_p{q}_ms"] = percentile(turns, q, unit=1e-3) if turns else None

        def grown(name: str) -> float:
            return float(after[name] - before[name])

        products = max(1, sum(after["batch_rows"]["counts"]) - sum(before["batch_rows"]["counts"]))
        batched, requests = (after[name]["total"] - before[name]["total"] for name in ("batch_rows", "batch_requests"))
        row |= {
            "rows_per_s": batched / grown("uptime"),
            "batch_rows": batched / products,
            "batch_requests": requests / products,
            "product_share": grown("seconds") / (grown("uptime") - grown("idle")),
            "idle_share": grown("idle") / grown("uptime"),
            "resident_mib": after["resident"] / (1 << 20),
        }
        row |= {"answers": sum(found.answers for found in seen), "wrong": sum(found.wrong for found in seen)}
        return row, alone


def _ask_together(tenants: Sequence[Child[Phase, Any]], phase: Phase, *, seconds: float) -> list[Any]:
    for tenant in tenants:
        tenant.send(phase)
    return [tenant.receive(timeout_s=seconds + DEADLINE_S) for tenant in tenants]
