"""`bench size`: a model of real size on this machine, end to end.

The weights are random numbers from a seed, written layer by layer, so no process ever holds the model. Executor and
helper map the same packed file. A row is a part of the work: its time, and the memory that each process has had at
most until its end. Forecasts stand beside it: each provider's memory plan without the limits that one tenant does not
reach, and the bytes of a step. The first step draws the pads of two, so the second one is compared.
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

import torch
import typer
from safetensors.torch import save_file
from transformers import LlamaConfig

from symbiosis_priv.checkpoints.discovery.skeleton import build
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import measured_models as models
from tenant.bench.options import Progress, benchmark
from tenant.bench.processes import Child, check_supported, cpu_seconds, peak_mib
from tenant.bench.report import Goal, Row, by, figure, number
from tenant.cli.options import quiet
from tenant.preparation.keys import prepare
from tenant.session.traffic import of_step

_PROCESSES = ("preparation", "tenant", "executor", "helper")
_LAYERS, _WEIGHT_BITS, _PROMPT = 32, 8, 16
_PREPARE_S = 7200.0
_MIB = 1 << 20
_SPARE_PROVIDER_MIB, _SPARE_TENANT_MIB = 1536, 2560
_STEP = models.Step(batch=1, tokens=128)
_LIMITS = ("matrices in flight", "connections")  # of a memory plan, for all tenants
_OFF_BY = 0.05
_CPU_TICK_S = 0.01  # Linux counts a process's time in these steps


def write_checkpoint(config: LlamaConfig, folder: Path) -> None:
    """Write a checkpoint with random weights in bfloat16, a file per layer, and always the same."""
    folder.mkdir()
    config.save_pretrained(folder)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in build(config).named_parameters():
        parts = name.split(".")
        files.setdefault(f"layer-{parts[2]}" if "layers" in parts else "rest", {})[name] = tuple(parameter.shape)
    index: dict[str, str] = {}
    for seed, (file, shapes) in enumerate(files.items()):
        drawn = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16, device="cpu")
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16, device="cpu").normal_(std=0.02, generator=drawn)
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@contextmanager
def serve_preparation(model: Path, cache: Path, weight_bits: int) -> Iterator[Callable[[str], None]]:
    """The work of a `Child`: computes the manifest, which also packs the weights, then a tenant's keys."""
    quiet()
    store = WeightStore(model, weight_bits=weight_bits, cache=cache)

    def do(what: str) -> None:
        digest = store.manifest().digest
        if what == "keys":
            prepare(store, digest=digest, weight_bits=weight_bits, cache=cache)

    yield do


def planned_mib(local: LocalFederation, name: str) -> float:
    """What a provider's memory plan, in its log, expects it to take for one tenant."""
    plan = [json.loads(line) for line in local.logs(name).split("\n") if '"event": "memory_plan"' in line]
    return float(sum(need["mib"] for need in plan if need["what"] not in _LIMITS))


def forecast_mib(manifest: Manifest) -> float:
    """The bytes of a step, and of the effects of its pads."""
    traffic = of_step(manifest.groups, _STEP.batch * _STEP.tokens)
    return (traffic.up + traffic.down + traffic.effects) / _MIB


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

    Takes 20 GB of disk (TMPDIR) and as much memory as the packed weights need. Example: symbiosis-priv bench size
    """
    check_supported()
    if shape not in models.LLAMAS:
        raise ConfigError(f"--shape {shape!r} is not one of {', '.join(models.LLAMAS)}")
    config = replace(models.LLAMAS[shape], layers=layers).config()
    model, cache = folder / "model", folder / "cache"
    embedding = 2 * config.vocab_size * config.hidden_size / _MIB
    shared: Row = {"shape": shape, "layers": layers, "weights_mib": None, "embedding_mib": embedding}
    forecasts: Row = dict.fromkeys(("executor_plan_mib", "helper_plan_mib", "moved_forecast_mib"))
    pids: dict[str, int] = {}
    effort = models.Effort()

    def part(name: str, work: Callable[[], object], *, count: int = 1, without: Row | None = None) -> Row:
        """Do a part of the work: `count` equal ones, after what is measured in the row `without`."""
        progress(name)
        before = {who: cpu_seconds([pid]) for who, pid in pids.items()}
        start = time.perf_counter()
        done = work()
        wall = time.perf_counter() - start
        costs: list[models.Cost] = done if isinstance(done, list) else []
        moved = sum(n for cost in costs for key, n in cost.counted.items() if key.startswith("bytes_"))
        spent = {who: cpu_seconds([pid]) - before.get(who, 0.0) for who, pid in pids.items()}
        seconds = sum(cost.seconds for cost in costs) or wall

        def begun(who: str) -> float:
            return 0.0 if without is None else number(without[f"{who}_cpu_s"])

        return {
            **shared,
            "part": name,
            "wall_s": seconds / count,
            **{f"{who}_cpu_s": (spent[who] - begun(who)) / count if who in spent else None for who in _PROCESSES},
            **{f"{who}_peak_mib": peak_mib([pids[who]]) if who in pids else None for who in _PROCESSES},
            "moved_mib": moved / count / _MIB if costs else None,
            **forecasts,
        }

    yield part("write the checkpoint", partial(write_checkpoint, config, model))
    with Child("preparation", serve_preparation, model, cache, _WEIGHT_BITS) as preparation:
        pids["preparation"] = preparation.wait_ready().pid
        yield part("quantise and pack", partial(preparation.ask, "manifest", timeout_s=_PREPARE_S))
        yield part("make the tenant's keys", partial(preparation.ask, "keys", timeout_s=_PREPARE_S))
    del pids["preparation"]
    shared["weights_mib"] = sum(file.stat().st_size for file in (cache / "weights").glob("*.safetensors")) / _MIB
    local = models.provide(model, folder, threads=effort.threads, weight_bits=_WEIGHT_BITS, cache=cache)

    def start() -> None:
        local.start()
        pids.update({name: local.pid(name) or 0 for name in ("executor", "helper")})

    with contextlib.ExitStack() as running:
        running.callback(local.stop)
        yield part("start the providers", start)
        forecasts |= {f"{name}_plan_mib": planned_mib(local, name) for name in pids}
        remote = models.remote_config(local, models.MaskingVariant.parse("pad"), effort)
        tenant = running.enter_context(Child("tenant", models.serve_tenant, model, remote, effort.threads, "auto"))
        pids["tenant"] = tenant.pid
        yield part("load the tenant", tenant.wait_ready)
        prompt = partial(tenant.ask, models.Generate(prompt=_PROMPT, tokens=0), timeout_s=_PREPARE_S)
        yield part("the first prompt, which maps the weights", prompt)
        yield (before := part("a prompt", prompt))
        generate = partial(tenant.ask, models.Generate(prompt=_PROMPT, tokens=tokens), timeout_s=_PREPARE_S)
        yield part("a token", generate, count=tokens, without=before)
        step = partial(tenant.ask, _STEP, timeout_s=_PREPARE_S)
        yield part("the first LoRA step", step)
        store = WeightStore(model, weight_bits=_WEIGHT_BITS, cache=cache)
        forecasts["moved_forecast_mib"] = forecast_mib(store.manifest())
        yield part("a LoRA step", step)
