"""`bench size`: a model of real size on this machine, end to end.

A row is a part of the work: its time, and the memory that each process has had at most until its end. Forecasts stand
beside it: each provider's memory plan without the limits that one tenant does not reach, and the bytes of a step. The
first step draws the pads of two, so the second one is compared.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import measured_models as models
from tenant.bench.options import Progress, benchmark
from tenant.bench.processes import Child, check_supported, cpu_seconds, peak_mib
from tenant.bench.report import Goal, Row, by, figure
from tenant.cli.options import quiet
from tenant.preparation.keys import prepare
from tenant.session.traffic import of_step

_PROCESSES = ("preparation", "tenant", "executor", "helper")
_LAYERS, _WEIGHT_BITS, _PROMPT = 32, 8, 16
_PREPARE_S = 7200.0
_MIB = 1 << 20
_SPARE_PROVIDER_MIB, _SPARE_TENANT_MIB = 1536, 2560
_STEP = models.Step(batch=1, tokens=128, settled=True)
_LIMITS = ("matrices in flight", "connections")  # of a memory plan, for all tenants
_OFF_BY = 0.05
_CPU_TICK_S = 0.01  # Linux counts a process's time in these steps


@contextmanager
def serve_preparation(model: Path, cache: Path) -> Iterator[Callable[[str], None]]:
    """The work of a `Child`: computes the manifest, which also packs the weights, then a tenant's keys."""
    quiet()
    store = WeightStore(model, weight_bits=_WEIGHT_BITS, cache=cache)

    def do(what: str) -> None:
        digest = store.manifest().digest
        if what == "keys":
            prepare(store, digest=digest, weight_bits=_WEIGHT_BITS, cache=cache)

    yield do


def planned_mib(local: LocalFederation, name: str) -> float:
    """What a provider's memory plan, in its log, expects it to take for one tenant."""
    plan = [json.loads(line) for line in local.logs(name).split("\n") if '"event": "memory_plan"' in line]
    return float(sum(need["mib"] for need in plan if need["what"] not in _LIMITS))


def size_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    parts = by(rows, "part")
    token = parts["a token"]
    for name, spare in (("executor", _SPARE_PROVIDER_MIB), ("helper", _SPARE_PROVIDER_MIB)):
        peak = figure(token, f"{name}_peak_mib") - figure(token, "weights_mib")
        yield Goal(f"{name}'s peak memory beyond its weights, MiB", peak, at_most=spare)
    step = parts["a LoRA step"]
    tenant = figure(step, "tenant_peak_mib") - figure(step, "embedding_mib")
    yield Goal("tenant's peak memory beyond the embedding, MiB", tenant, at_most=_SPARE_TENANT_MIB)
    for name, forecast, measured in (
        ("executor's peak memory", "executor_plan_mib", "executor_peak_mib"),
        ("helper's peak memory", "helper_plan_mib", "helper_peak_mib"),
        ("bytes of a step", "moved_forecast_mib", "moved_mib"),
    ):
        error = abs(figure(step, forecast) / figure(step, measured) - 1)
        yield Goal(f"error of the forecast of the {name}", error, at_most=_OFF_BY)
    busy = max(figure(token, "executor_cpu_s"), figure(token, "helper_cpu_s"), _CPU_TICK_S)
    yield Goal("a token's wall time over its products", figure(token, "wall_s") / busy, at_most=1.15)


@benchmark("size", goals=size_goals)
def size(
    folder: Path,
    progress: Progress,
    *,
    shape: Annotated[str, typer.Option(help="llama-2-7b or llama-3-8b.")] = "llama-2-7b",
    layers: Annotated[int, typer.Option(min=1, max=_LAYERS, help="Layers of the model.")] = _LAYERS,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of each answer.")] = 10,
) -> Iterator[Row]:
    """Prepare and use a model of real size: time, processor time, bytes and peak memory of each process, by part.

    Takes 20 GB of disk (TMPDIR) and as much memory as the packed weights need.
    """
    check_supported()
    if shape not in models.LLAMAS:
        raise ConfigError(f"--shape {shape!r} is not one of {', '.join(models.LLAMAS)}")
    llama = replace(models.LLAMAS[shape], layers=layers)
    model, cache, threads = folder / "model", folder / "cache", models.HALF_THE_CORES
    facts: Row = {"shape": shape, "layers": layers, "weights_mib": None}
    facts["embedding_mib"] = 2 * llama.vocabulary * llama.width / _MIB
    facts |= dict.fromkeys(("executor_plan_mib", "helper_plan_mib", "moved_forecast_mib"))
    pids: dict[str, int] = {}

    def part(name: str, work: Callable[[], object], *, count: int = 1, without: Row | None = None) -> Row:
        """Do a part of the work: `count` equal ones, after what is measured in the row `without`."""
        progress(name)
        before = {who: cpu_seconds(pid) for who, pid in pids.items()}
        start = time.perf_counter()
        done = work()
        wall = time.perf_counter() - start
        costs: list[models.Cost] = done if isinstance(done, list) else []
        row: Row = {**facts, "part": name, "wall_s": (sum(cost.seconds for cost in costs) or wall) / count}
        for who in _PROCESSES:
            spent = cpu_seconds(pids[who]) - before.get(who, 0.0) if who in pids else None
            if spent is not None and without is not None:
                spent -= figure(without, f"{who}_cpu_s")
            row[f"{who}_cpu_s"] = None if spent is None else spent / count
            row[f"{who}_peak_mib"] = peak_mib(pids[who]) if who in pids else None
        return {**row, "moved_mib": sum(cost.moved_mib for cost in costs) / count if costs else None}

    yield part("write the checkpoint", partial(llama.save, model))
    with Child("preparation", serve_preparation, model, cache) as preparation:
        pids["preparation"] = preparation.wait_ready().pid
        yield part("quantise and pack", partial(preparation.ask, "manifest", timeout_s=_PREPARE_S))
        yield part("make the tenant's keys", partial(preparation.ask, "keys", timeout_s=_PREPARE_S))
    del pids["preparation"]
    facts["weights_mib"] = sum(file.stat().st_size for file in (cache / "weights").glob("*.safetensors")) / _MIB
    local = models.provide(model, folder, threads=threads, weight_bits=_WEIGHT_BITS, cache=cache)

    def start() -> None:
        local.start()
        pids.update({name: local.pid(name) or 0 for name in local.names})

    with contextlib.ExitStack() as running:
        running.callback(local.stop)
        yield part("start the providers", start)
        facts |= {f"{name}_plan_mib": planned_mib(local, name) for name in pids}
        remote = models.remote_config(local, models.MaskingVariant.parse("pad"))
        tenant = running.enter_context(Child("tenant", models.serve_tenant, model, remote, threads, "auto"))
        pids["tenant"] = tenant.pid
        ask = partial(tenant.ask, timeout_s=_PREPARE_S)
        yield part("load the tenant", tenant.wait_ready)
        prompt = partial(ask, models.Generate(prompt=_PROMPT, tokens=0))
        yield part("the first prompt, which maps the weights", prompt)
        yield (before := part("a prompt", prompt))
        generate = partial(ask, models.Generate(prompt=_PROMPT, tokens=tokens))
        yield part("a token", generate, count=tokens, without=before)
        yield part("the first LoRA step", partial(ask, _STEP))
        manifest = WeightStore(model, weight_bits=_WEIGHT_BITS, cache=cache).manifest()
        traffic = of_step(manifest.groups, _STEP.batch * _STEP.tokens)
        facts["moved_forecast_mib"] = (traffic.up + traffic.down + traffic.effects) / _MIB  # with its pads' effects
        yield part("a LoRA step", partial(ask, _STEP))
