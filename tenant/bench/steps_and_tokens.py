"""`bench step` and `bench token`: a fine-tuning step of LoRA and a generated token, whole and split, by turns.

The whole model and each split model is a separate process. A turn ends when all processes are idle again, so a turn's
cost includes the pads that a session draws for its next step.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Final, NamedTuple

import typer

from symbiosis_priv.errors import ConfigError, DeadlineExceededError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import measured_models as models
from tenant.bench.options import Batch, Maskings, Progress, Tokens, benchmark, numbers
from tenant.bench.processes import Child, check_supported, cpu_seconds, peak_mib
from tenant.bench.report import Goal, Row, by, distinct, figure, ratio, where

WHOLE, _PRODUCTS = "whole, fp32", "products, fp32"
TURN_S = 600.0
_WARM_UP = 1
_POLL_S, _IDLE_S, _IDLE_POLLS = 0.1, 0.02, 3  # idle: less CPU time than _IDLE_S in each of _IDLE_POLLS polls
_PAPER: Final = {(8, "q"): 1.25, (64, "q"): 1.39, (8, "qkvo"): 1.54, (64, "qkvo"): 1.70}  # Symbiosis, table 2
_SHAPE, _EFFORT, _MASKINGS = models.Llama(width=2048, layers=4, inner=5632), models.Effort(), "none,pad,local"


def step_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for shape in distinct(rows, "width", "rank", "targets"):
        variants = by(where(rows, **shape), "variant")
        width, lora = figure(shape, "width"), (shape["rank"], shape["targets"])
        if (pad := variants.get("split, pad")) is None:
            continue
        if lora in _PAPER:
            what = f"a step with pads over the whole model's, rank {lora[0]} on {lora[1]}"
            yield Goal(what, figure(pad, "wall_over_whole"), at_most=_PAPER[lora])
            continue
        if width >= 2048:
            what = f"tenant's CPU with pads over the whole model's, width {width:.0f}"
            yield Goal(what, figure(pad, "tenant_cpu_over_whole"), at_most=0.30 if width < 4096 else 0.20)
            what = f"executor's CPU over that of the same products in float32, width {width:.0f}"
            yield Goal(what, figure(pad, "executor_cpu_over_float32"), at_most=0.5)
        if (none := variants.get("split, none")) is not None:
            for measured, name in (("tenant_cpu_s", "tenant's CPU"), ("wall_s", "wall time")):
                what = f"{name} with pads over that without masks, width {width:.0f}"
                yield Goal(what, ratio(pad, none, measured), at_most=1.2)


def token_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    variants = by(rows, "variant")
    none, pad = variants.get("split, none"), variants.get("split, pad")
    if none is not None:
        yield Goal("a token without masks over the whole model's", figure(none, "token_over_whole"), at_most=1.0)
    if none is not None and pad is not None:
        yield Goal("a token with pads over one without masks", ratio(pad, none, "token_ms"), at_most=1.15)


@benchmark("step", goals=step_goals)
def step(
    folder: Path,
    progress: Progress,
    *,
    shape: models.Llama = _SHAPE,
    batch: Batch = 4,
    tokens: Tokens = 128,
    rank: Annotated[str, typer.Option(help="Ranks of the LoRA, separated by commas.")] = "8",
    targets: Annotated[str, typer.Option(help="Projections that it adapts, by their letters: q,qkvo.")] = "qv",
    masking: Maskings = _MASKINGS,
    effort: models.Effort = _EFFORT,
) -> Iterator[Row]:
    """Measure a LoRA step of a Llama, whole and split: CPU seconds and peak memory of every process, and the
    executor's CPU over that of the same products in float32."""
    maskings, loras = models.parse_maskings(masking), product(targets.split(","), numbers(rank, "--rank"))
    if set(targets) - set("qkvo,") or "" in targets.split(","):
        raise ConfigError(f"--targets {targets!r}: write letters of q, k, v, o, like q,qkvo")
    with comparison(folder, shape, maskings, effort) as running:
        for on, size in loras:
            task = models.Step(batch=batch, tokens=tokens, lora=models.Lora(size, on))
            yield from _measure_step(running, shape, task, repeat=effort.repeat, on_turn=progress)


@benchmark("token", goals=token_goals)
def token(
    folder: Path,
    progress: Progress,
    *,
    shape: models.Llama = _SHAPE,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of each answer.")] = 16,
    masking: Maskings = _MASKINGS,
    effort: models.Effort = _EFFORT,
) -> Iterator[Row]:
    """Measure a generated token of a Llama, whole and split."""
    with comparison(folder, shape, models.parse_maskings(masking), effort) as running:
        task = models.Generate(prompt=prompt, tokens=tokens)
        found = running.by_turns(dict.fromkeys(running.names, task), repeat=effort.repeat, on_turn=progress)
    for name, typical in found.items():
        yield {
            **_shape(shape),
            "prompt": prompt,
            "tokens": tokens,
            "variant": _variant(name),
            "token_ms": 1e3 * typical.each_s,
            "moved_mib": typical.moved_mib / tokens if name != WHOLE else None,
            "token_over_whole": typical.each_s / found[WHOLE].each_s,
            "tenant_cpu_ms": 1e3 * typical.cpu_s[0] / tokens,
        }


class Typical(NamedTuple):
    """Medians over the turns of a task: seconds of all and of each of its steps or tokens, MiB that the tenant sent and
    received, and CPU seconds of tenant, executor and helper until all processes were idle again."""

    wall_s: float
    each_s: float
    moved_mib: float
    cpu_s: tuple[float, float, float]


class Comparison:
    """Running providers and tenants, made by `comparison`."""

    def __init__(self, local: LocalFederation, tenants: dict[str, Child[models.Work, list[models.Cost]]]) -> None:
        self._providers = [local.pid("executor") or 0, local.pid("helper") or 0]
        self._tenants = tenants
        self.names = list(tenants)

    def by_turns(self, tasks: Mapping[str, models.Work], *, repeat: int, on_turn: Progress) -> dict[str, Typical]:
        """Let tenants run tasks, `repeat` times after a warm-up. A name that is no tenant's is work of the whole
        model."""
        turns: dict[str, list[tuple[list[models.Cost], list[float]]]] = {name: [] for name in tasks}
        for turn in range(_WARM_UP + repeat):
            for name, task in tasks.items():
                on_turn(f"{_variant(name)}, turn {turn + 1} of {_WARM_UP + repeat}")
                turns[name].append(self._turn(name if name in self._tenants else WHOLE, task))
        found = {}
        for name, done in turns.items():
            costs, spent = zip(*done[_WARM_UP:], strict=True)
            found[name] = Typical(
                median(sum(cost.seconds for cost in turn) for turn in costs),
                median(cost.seconds for turn in costs for cost in turn),
                median(sum(cost.moved_mib for cost in turn) for turn in costs),
                (median(cpu[0] for cpu in spent), median(cpu[1] for cpu in spent), median(cpu[2] for cpu in spent)),
            )
        return found

    def _turn(self, name: str, task: models.Work) -> tuple[list[models.Cost], list[float]]:
        """Let one tenant run a task while the others wait. Returns its costs and the CPU seconds of each process."""
        pids = self.pids(name)
        before = list(map(cpu_seconds, pids))
        costs = self._tenants[name].ask(task, timeout_s=TURN_S)
        until = time.monotonic() + TURN_S
        polls, last = 0, list(map(cpu_seconds, pids))
        while polls < _IDLE_POLLS:
            if time.monotonic() > until:
                raise DeadlineExceededError(f"the processes are still busy {TURN_S:g} s after the answer")
            time.sleep(_POLL_S)
            now = list(map(cpu_seconds, pids))
            polls = polls + 1 if sum(now) - sum(last) < _IDLE_S else 0
            last = now
        return costs, [after - then for after, then in zip(last, before, strict=True)]

    def pids(self, name: str) -> list[int]:
        """Return the processes of a tenant, the executor and the helper."""
        return [self._tenants[name].pid, *self._providers]


@contextmanager
def comparison(
    directory: Path, shape: models.Llama, maskings: Sequence[models.MaskingVariant], effort: models.Effort
) -> Iterator[Comparison]:
    """Context manager: start an executor, a helper, the whole model (`WHOLE`), and a split tenant per masking."""
    check_supported()
    model = shape.save(directory / "model")
    providers = models.provide(model, directory, threads=effort.threads, maskings=maskings)
    with providers as local, ExitStack() as stack:
        remotes = {WHOLE: None, **{one.name: models.remote_config(local, one) for one in maskings}}
        tenants = {}
        for name, remote in remotes.items():
            child = Child(f"tenant {name}", models.serve_tenant, model, remote, effort.threads)
            tenants[name] = stack.enter_context(child).wait_ready()
        yield Comparison(local, tenants)


def _measure_step(
    running: Comparison, shape: models.Llama, task: models.Step, *, repeat: int, on_turn: Progress
) -> Iterator[Row]:
    """Measure a step with each tenant, and its products in float32. Yields a row per variant."""
    products = models.Products(rows=task.batch * task.tokens)
    tasks: dict[str, models.Work] = {**dict.fromkeys(running.names, task), _PRODUCTS: products}
    found = running.by_turns(tasks, repeat=repeat, on_turn=on_turn)
    whole, float32 = found[WHOLE], found[_PRODUCTS].cpu_s[0]
    for name in running.names:
        typical, peaks, split = found[name], list(map(peak_mib, running.pids(name))), name != WHOLE
        tenant, executor, helper = typical.cpu_s
        yield {
            **_shape(shape),
            "batch": task.batch,
            "tokens": task.tokens,
            "rank": task.lora.rank,
            "targets": task.lora.targets,
            "variant": _variant(name),
            "wall_s": typical.wall_s,
            "wall_over_whole": typical.wall_s / whole.wall_s,
            "moved_mib": typical.moved_mib if split else None,
            "tenant_cpu_s": tenant,
            "executor_cpu_s": executor if split else None,
            "helper_cpu_s": helper if split else None,
            "tenant_cpu_over_whole": tenant / whole.cpu_s[0] if whole.cpu_s[0] else None,
            "executor_cpu_over_float32": executor / float32 if split and float32 else None,
            "tenant_peak_mib": peaks[0],
            "executor_peak_mib": peaks[1] if split else None,
            "helper_peak_mib": peaks[2] if split else None,
        }


def _variant(name: str) -> str:
    return name if name in (WHOLE, _PRODUCTS) else f"split, {name}"


def _shape(shape: models.Llama) -> Row:
    return {"width": shape.width, "inner": shape.inner, "layers": shape.layers}
