"""`bench network`: times a step and a token over an emulated link, and compares them with a prediction.

The prediction is the time of the same work over a link without limits, plus the number of turns times the round trip,
plus the bytes divided by the bandwidth, without any overlap. Each condition uses a new tenant process, because TCP
keeps an estimate of the link's state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from symbiosis_priv.checkpoints.weights import WeightStore
from tenant.bench import process_costs
from tenant.bench.children import Child
from tenant.bench.cli_options import Effort
from tenant.bench.contest import TURN_S
from tenant.bench.link.condition import Condition
from tenant.bench.link.emulation import Kind, Link, open_link
from tenant.bench.llama import Llama
from tenant.bench.providers import provide, remote_config
from tenant.bench.result_file import Row
from tenant.bench.tenant_process import Cost, Generate, Step, Task, serve_tenant
from tenant.session.traffic import PredictedTraffic, of_step, of_token

WARM_UP = 2
"""Steps, and tokens, that are not part of the means: connections and pools are filling."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind of work under one condition.

    Args:
        first_s: seconds of the first step or token, which uses new connections.
        costs: costs of the others, without the warm-up.
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
        """Mean of a count of the session's ledger; an integer if it is one."""
        mean = fmean(cost.counted[name] for cost in self.costs)
        return int(mean) if mean.is_integer() else mean


def measure_network(
    directory: Path,
    shape: Llama,
    *,
    batch: int,
    tokens: int,
    conditions: Sequence[Condition],
    masking: str,
    kind: Kind | None,
    effort: Effort,
    on_turn: Callable[[str], None],
) -> tuple[list[Row], str]:
    """A row per condition and kind of work, the link without limits first; also the kind of emulation and its reason.

    Args:
        batch, tokens: size of a fine-tuning step.
        kind: kind of the link; the best that this machine has if None.
        effort: steps, and generated tokens, of each measurement; threads; memory of the tenant for pads.
    """
    process_costs.check_supported()
    model = shape.save(directory / "model")
    work: dict[str, Task] = {
        "step": Step(batch=batch, tokens=tokens, steps=WARM_UP + effort.repeat),
        "token": Generate(prompt=8, tokens=WARM_UP + effort.repeat),
    }
    with ExitStack() as stack:
        link = stack.enter_context(open_link(kind))
        local = stack.enter_context(provide(model, directory, threads=effort.threads, host=link.host))
        groups = WeightStore(model, cache=local.cache).manifest().groups
        design = {"step": of_step(groups, rows=batch * tokens), "token": of_token(groups)}
        remote = replace(remote_config(local, masking, effort), federation=link.federation(local.federation))
        rows: list[Row] = []
        free: Mapping[str, Measured] = {}
        for condition in (Condition(), *conditions):
            on_turn(f"{condition}, emulated by {link.kind}")
            link.impose(condition)
            with Child("tenant", serve_tenant, model, remote, effort.threads, network=link.network) as tenant:
                found = {name: _measure(tenant, task, link) for name, task in work.items()}
            free = free or found
            rows += [_row(name, condition, design[name], found[name], free[name]) for name in work]
        shared: Row = {"width": shape.width, "inner": shape.inner, "layers": shape.layers, "batch": batch}
        rows = [{**shared, "tokens": tokens, "masking": masking, "link": link.kind, **row} for row in rows]
        return rows, f"{link.kind} ({link.why_not_better})" if link.why_not_better else link.kind


def _measure(tenant: Child[Task, list[Cost]], task: Task, link: Link) -> Measured:
    before = process_costs.cpu_seconds(link.emulators)
    costs = tenant.ask(task, timeout_s=TURN_S)
    emulation_s = (process_costs.cpu_seconds(link.emulators) - before) / len(costs)
    return Measured(first_s=costs[0].seconds, costs=costs[WARM_UP:], emulation_s=emulation_s)


def _row(name: str, condition: Condition, design: PredictedTraffic, found: Measured, free: Measured) -> Row:
    up, down = found.counted("bytes_to_executors"), found.counted("bytes_from_executors")
    effects = found.counted("bytes_to_helpers") + found.counted("bytes_from_helpers")
    latency_s = design.turns * condition.round_trip_ms / 1e3
    transfer_s, effects_s = (up + down) / condition.bytes_per_s, effects / condition.bytes_per_s
    predicted_s = free.seconds + latency_s + transfer_s + effects_s
    difference_s = found.seconds - predicted_s
    return {
        "condition": str(condition),
        "work": name,
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
        difference_s: measured minus predicted seconds.
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
