"""`bench network`: times a step and a token over an emulated link. `bench bytes`: the bytes that a tenant moves for a
token and for a step of Llama-2-7B and Llama-3-8B.

The parts of an overlapped batch share their round trips. Each condition uses a new tenant process, because TCP keeps an
estimate of the link's state.

`bench bytes` computes the bytes from the shapes (`session.traffic`). `bench network` counts the bytes of smaller models
at the socket, and its test requires that both are equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final

import typer

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.checkpoints.discovery.skeleton import traced
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from tenant.bench import measured_models as models
from tenant.bench.link import Condition, open_link
from tenant.bench.options import Batch, Maskings, Progress, Tokens, benchmark, show
from tenant.bench.processes import Child, check_supported
from tenant.bench.report import Goal, Row, figure, where
from tenant.bench.steps_and_tokens import TURN_S
from tenant.session.traffic import PredictedTraffic, Transport, of_pass, of_step, of_token

WARM_UP = 2
"""Number of steps or tokens before the measured ones, while connections are opened and pools filled."""
MODELS: Final = {
    "Llama-2-7B": models.Llama(width=4096, layers=32, inner=11008, heads=32, key_heads=32),
    "Llama-3-8B": models.Llama(width=4096, layers=32, inner=14336, heads=32, key_heads=8),
}
"""The models of `bench bytes`, without their LM heads."""
_SHAPE, _FIVE_TIMES = models.Llama(width=512, layers=4, inner=1408), models.Effort(repeat=5)
_NARROW_AND_RELAYED = "pad/24/relay"
_STEP_ROWS: Final = 512
_WORK: Final[dict[str, tuple[int, tuple[Direction, ...]]]] = {
    "token": (1, (FORWARD,)),
    f"step of {_STEP_ROWS} tokens": (_STEP_ROWS, (FORWARD, BACKWARD)),
    "its forward pass": (_STEP_ROWS, (FORWARD,)),
    "its backward pass": (_STEP_ROWS, (BACKWARD,)),
}


def network_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in where(rows, masking=_NARROW_AND_RELAYED):
        if str(row["condition"]).startswith("100 Mbit/s") and str(row["work"]).endswith("overlapped"):
            what = f"an overlapped step over today's, {row['condition']}"
            yield Goal(what, figure(row, "over_first"), at_most=0.5)


def show_network(rows: Sequence[Row]) -> None:
    """Show a table for each kind of work."""
    for work in dict.fromkeys(row["work"] for row in rows):
        show(where(rows, work=work))


@benchmark("network", goals=network_goals, show=show_network)
def network(
    folder: Path,
    progress: Progress,
    *,
    condition: Annotated[
        str, typer.Option(help="Bandwidth and round trip, like 100mbit/100ms; several separated by commas.")
    ] = "1gbit/1ms,1gbit/10ms,1gbit/50ms,100mbit/1ms,100mbit/10ms,100mbit/50ms",
    shape: models.Llama = _SHAPE,
    batch: Batch = 2,
    tokens: Tokens = 64,
    overlap: Annotated[
        int, typer.Option(min=1, help="Parts of a batch, also one after the other; 1 measures whole batches only.")
    ] = 2,
    masking: Maskings = "pad,pad/two,pad/24/relay",
    effort: models.Effort = _FIVE_TIMES,
) -> Iterator[Row]:
    """Measure steps and tokens per second over a slow network, with round trips and bytes.

    The tenant's link is emulated on loopback.

    Example: symbiosis-priv bench network --layers 3 --condition 100mbit/10ms
    """
    if batch % overlap:
        raise ConfigError(f"--overlap {overlap}: choose a divisor of --batch {batch}")
    conditions, maskings = [Condition.parse(text) for text in condition.split(",")], models.parse_maskings(masking)
    check_supported()
    model = shape.save(folder / "model")
    steps = WARM_UP + effort.repeat
    step = models.Step(batch=batch, tokens=tokens, steps=steps)
    work: dict[str, models.Task] = {"step": step}
    if overlap > 1:
        work[f"step, {overlap} parts"] = replace(step, parts=overlap)
        work[f"step, {overlap} parts overlapped"] = replace(step, parts=overlap, overlap=True)
    work["token"] = models.Generate(prompt=8, tokens=steps)
    with ExitStack() as stack:
        link = stack.enter_context(open_link())
        providers = models.provide(model, folder, threads=effort.threads, maskings=maskings, host=link.host)
        local = stack.enter_context(providers)
        groups = WeightStore(model, cache=local.cache, scope=local.scope).manifest().groups
        federation = link.federation(local.federation)
        found: dict[tuple[Condition, str], list[Row]] = {}
        first: dict[tuple[Condition, str], float] = {}  # seconds of a whole batch, or a token, with the first masking
        for link_condition, variant in product((Condition(), *conditions), maskings):
            progress(f"{variant.name}: {link_condition}")
            link.apply(link_condition)
            remote = models.remote_config(local, variant, effort, federation=federation)
            with Child("tenant", models.serve_tenant, model, remote, effort.threads) as tenant:
                for what, task in work.items():
                    if variant.transport.round_trips == 2 and isinstance(task, models.Step):
                        continue  # with gradients, a pass takes four
                    costs = tenant.ask(task, timeout_s=TURN_S)
                    labels: Row = {"condition": str(link_condition), "work": what, "masking": variant.name}
                    row = _row(link_condition, _predicted(groups, task, variant.transport), costs)
                    first_s = first.setdefault((link_condition, what.partition(",")[0]), figure(row, "measured_s"))
                    rows = found.setdefault((link_condition, what), [])
                    rows.append({**labels, **row, "over_first": figure(row, "measured_s") / first_s})
    shared: Row = {"width": shape.width, "inner": shape.inner, "layers": shape.layers, "batch": batch}
    yield from ({**shared, "tokens": tokens, **row} for rows in found.values() for row in rows)


def _predicted(groups: Sequence[GroupEntry], task: models.Task, transport: Transport) -> PredictedTraffic:
    if isinstance(task, models.Generate):
        return of_token(groups, transport)
    part = of_step(groups, task.batch // task.parts * task.tokens, transport)
    whole = sum([part] * task.parts, PredictedTraffic())
    return replace(whole, turns=part.turns) if task.overlap else whole


def _row(condition: Condition, design: PredictedTraffic, costs: Sequence[models.Cost]) -> Row:
    """Figures of a step or token: means of `costs`, of which the first `WARM_UP` do not count."""

    def counted(name: str) -> float:
        mean = fmean(cost.counted[name] for cost in costs[WARM_UP:])
        return int(mean) if mean.is_integer() else mean

    seconds = fmean(cost.seconds for cost in costs[WARM_UP:])
    return {
        "per_second": 1 / seconds,
        "round_trips": counted("executor_round_trips"),
        "round_trips_by_design": design.round_trips,
        "turns": design.turns,
        "bytes_up": round(counted("bytes_to_executors")),
        "bytes_up_by_design": design.up,
        "bytes_down": round(counted("bytes_from_executors")),
        "bytes_down_by_design": design.down,
        "bytes_of_effects": round(counted("bytes_to_helpers") + counted("bytes_from_helpers")),
        "bytes_of_effects_by_design": design.effects,
        "latency_s": design.turns * condition.round_trip_ms / 1e3,
        "measured_s": seconds,
        "first_s": costs[0].seconds,
    }


def bytes_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in where(rows, masking=_NARROW_AND_RELAYED):
        if not str(row["work"]).startswith("its"):
            what = f"{row['model']}, {row['work']}: bytes over"
            yield Goal(f"{what} today's", figure(row, "over_first_masking"), at_most=0.46)
            yield Goal(f"{what} float16's without masks", figure(row, "over_float16_unmasked"), at_most=1.55)


@benchmark("bytes", goals=bytes_goals)
def bytes_(folder: Path, progress: Progress, *, masking: Maskings = "pad,pad/24,pad/24/relay") -> Iterator[Row]:
    """Compute the bytes that a tenant moves for a token and a step of Llama-2-7B and Llama-3-8B.

    Example: symbiosis-priv bench bytes --masking pad,pad/24/relay
    """
    maskings = models.parse_maskings(masking)
    for model, shape in MODELS.items():
        config = replace(shape, layers=2).config()
        config.architectures = ["LlamaForCausalLM"]
        found = traced(config, Scope(round_trips=2)).groups
        blocks = [[group for group in found if f".{block}." in group.members[0]] for block in (0, 1)]
        specs = [*blocks[0] * (shape.layers - 1), *blocks[1]]
        groups = [GroupEntry(digest="", **vars(group)) for group in specs]
        ordinary = [group for group in groups if group.composed is None]
        for work, (rows, directions) in _WORK.items():
            plain = sum(2 * rows * sum(group.columns(d)) for d in directions for group in ordinary[d == BACKWARD :])
            first = None
            for variant in maskings:
                traffic = sum((of_pass(groups, d, rows, variant.transport) for d in directions), PredictedTraffic())
                moved = traffic.up + traffic.down + traffic.effects
                first = first or moved
                yield {
                    "model": model,
                    "work": work,
                    "masking": variant.name,
                    "up_mb": traffic.up / 1e6,
                    "down_mb": traffic.down / 1e6,
                    "effects_mb": traffic.effects / 1e6,
                    "moved_mb": moved / 1e6,
                    "over_first_masking": moved / first,
                    "over_float16_unmasked": moved / plain,
                }
