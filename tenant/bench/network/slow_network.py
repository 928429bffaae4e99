"""`bench network`: times a step and a token over an emulated link, and compares them with a prediction.

The prediction is the time of the same work over a link without limits, plus the number of turns times the round trip,
plus the bytes divided by the bandwidth, as if computing and transfers never took place at the same time. The parts of
an overlapped batch share their round trips. Each condition uses a new tenant process, because TCP keeps an estimate of
the link's state.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from tenant.bench.cli_options import Effort
from tenant.bench.measured_models import Llama
from tenant.bench.network.emulation import open_link
from tenant.bench.network.link import Condition, Kind, Link
from tenant.bench.processes import process_costs
from tenant.bench.processes.children import Child
from tenant.bench.processes.providers import parsed, provide, relayed, remote_config
from tenant.bench.processes.tenant_process import Cost, Generate, Step, Task, serve_tenant
from tenant.bench.results.result_file import Row
from tenant.bench.steps_and_tokens import TURN_S
from tenant.session.traffic import PredictedTraffic, of_step, of_token

WARM_UP = 2
"""Number of steps or tokens before the measured ones, while connections are opened and pools filled."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind of work under one condition.

    Args:
        first_s: seconds of the first step or token, which uses new connections.
        emulation_s: CPU seconds of the emulation per step or token.
    """

    first_s: float
    costs: Sequence[Cost]
    emulation_s: float

    @property
    def seconds(self) -> float:
        """Mean seconds of one step or token."""
        return fmean(cost.seconds for cost in self.costs)

    def counted(self, name: str) -> float:
        """Return the mean of a count of the session's ledger."""
        mean = fmean(cost.counted[name] for cost in self.costs)
        return int(mean) if mean.is_integer() else mean


def measure_network(
    directory: Path,
    shape: Llama,
    *,
    batch: int,
    tokens: int,
    parts: int,
    conditions: Sequence[Condition],
    maskings: Sequence[str],
    kind: Kind | None,
    effort: Effort,
    on_turn: Callable[[str], None],
) -> tuple[list[Row], str]:
    """Measure, and return a row per condition, kind of work and masking, and the kind of emulation with its reason.

    The link without limits comes first. `over_first` is the time divided by that of a whole batch, or of a token, with
    the first masking.

    Args:
        batch, tokens: size of a fine-tuning step.
        parts: number of parts of a batch, which are measured one after the other and overlapped; 1 for whole batches
            only.
        kind: kind of the link; if None, the best kind that works on this machine.
        effort: number of steps and generated tokens of each measurement, threads, and the tenant's memory for pads.
    """
    process_costs.check_supported()
    model = shape.save(directory / "model")
    work = _work(batch, tokens, parts, steps=WARM_UP + effort.repeat)
    with ExitStack() as stack:
        link = stack.enter_context(open_link(kind))
        local = stack.enter_context(
            provide(model, directory, threads=effort.threads, host=link.host, relay=relayed(maskings))
        )
        groups, federation = WeightStore(model, cache=local.cache).manifest().groups, link.federation(local.federation)
        found: dict[tuple[Condition, str], list[Row]] = {}
        free: dict[tuple[str, str], Measured] = {}
        first: dict[tuple[Condition, str], float] = {}
        for condition, masking in product((Condition(), *conditions), maskings):
            on_turn(f"{masking}: {condition}, emulated by {link.kind}")
            link.apply(condition)
            remote = remote_config(local, masking, effort, federation=federation)
            with Child("tenant", serve_tenant, model, remote, effort.threads, network=link.network) as tenant:
                for name, task in work.items():
                    measured = _measure(tenant, task, link)
                    unlimited = free.setdefault((name, masking), measured)
                    row = _row(condition, _design(groups, task, masking), measured, unlimited)
                    first_s = first.setdefault((condition, name.partition(",")[0]), measured.seconds)
                    labels: Row = {"condition": str(condition), "work": name, "masking": masking}
                    rows_of_work = found.setdefault((condition, name), [])
                    rows_of_work.append({**labels, **row, "over_first": measured.seconds / first_s})
        shared: Row = {"width": shape.width, "inner": shape.inner, "layers": shape.layers, "batch": batch}
        rows = [{**shared, "tokens": tokens, "link": link.kind, **row} for rows in found.values() for row in rows]
        return rows, f"{link.kind} ({link.why_not_better})" if link.why_not_better else link.kind


def _work(batch: int, tokens: int, parts: int, *, steps: int) -> dict[str, Task]:
    step = Step(batch=batch, tokens=tokens, steps=steps)
    found: dict[str, Task] = {"step": step}
    if parts > 1:
        found[f"step, {parts} parts"] = replace(step, parts=parts)
        found[f"step, {parts} parts overlapped"] = replace(step, parts=parts, overlap=True)
    return found | {"token": Generate(prompt=8, tokens=steps)}


def _design(groups: Sequence[GroupEntry], task: Task, masking: str) -> PredictedTraffic:
    transport = parsed(masking).transport
    if isinstance(task, Generate):
        return of_token(groups, transport)
    part = of_step(groups, task.batch // task.parts * task.tokens, transport)
    whole = sum([part] * task.parts, PredictedTraffic())
    return replace(whole, turns=part.turns) if task.overlap else whole


def _measure(tenant: Child[Task, list[Cost]], task: Task, link: Link) -> Measured:
    before = process_costs.cpu_seconds(link.emulators)
    costs = tenant.ask(task, timeout_s=TURN_S)
    emulation_s = (process_costs.cpu_seconds(link.emulators) - before) / len(costs)
    return Measured(first_s=costs[0].seconds, costs=costs[WARM_UP:], emulation_s=emulation_s)


def _row(condition: Condition, design: PredictedTraffic, found: Measured, free: Measured) -> Row:
    up, down = found.counted("bytes_to_executors"), found.counted("bytes_from_executors")
    effects = found.counted("bytes_to_helpers") + found.counted("bytes_from_helpers")
    latency_s = design.turns * condition.round_trip_ms / 1e3
    transfer_s, effects_s = (up + down) / condition.bytes_per_s, effects / condition.bytes_per_s
    predicted_s = free.seconds + latency_s + transfer_s + effects_s
    difference_s = found.seconds - predicted_s
    return {
        "per_second": 1 / found.seconds,
        "round_trips": found.counted("executor_round_trips"),
        "round_trips_by_design": design.round_trips,
        "bytes_up": round(up),
        "bytes_up_by_design": design.up,
        "bytes_down": round(down),
        "bytes_down_by_design": design.down,
        "bytes_of_effects": round(effects),
        "bytes_of_effects_by_design": design.effects,
        "without_limits_s": free.seconds,
        "latency_s": latency_s,
        "transfer_s": transfer_s,
        "effects_s": effects_s,
        "predicted_s": predicted_s,
        "measured_s": found.seconds,
        "measured_over_predicted": found.seconds / predicted_s,
        "first_s": found.first_s,
        "difference": explain(difference_s, effects_s, turns=design.turns, emulation_s=found.emulation_s)
        if found is not free
        else None,
    }


def explain(difference_s: float, effects_s: float, *, turns: int, emulation_s: float) -> str:
    """Explain the difference between a measured time and the prediction.

    Args:
        effects_s: predicted seconds for the bytes of effects.
    """
    if difference_s >= 0:
        each = f"{_time(difference_s / turns)} more per turn"
        return f"{each}; the emulation takes {_time(emulation_s / turns)} of CPU" if emulation_s else each
    hidden = min(-difference_s, effects_s)
    noise = -difference_s - hidden
    parts = [f"{_time(hidden)} of effects arrive while rows are sent"] if hidden else []
    return "; ".join([*parts, f"{_time(noise)} is noise"] if noise else parts)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.095 else f"{1e3 * seconds:.2g} ms"
