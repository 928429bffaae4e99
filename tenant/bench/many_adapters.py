"""`bench adapters`: how many LoRA jobs fit into the memory of one machine, and how fast they train together.

A job is a process with a LoRA, an optimizer and data of its own. The whole model is read from a checkpoint in bfloat16:
in float32 each job has a copy of it, in bfloat16 all jobs of one machine map the same pages. The split model's jobs are
tenants, each with its own certificate, of one executor, and with pads also of one helper.

Memory is the highest sum of the proportional set sizes (PSS) of all processes that the benchmark starts. All jobs are
forked from one process that has imported the modules, and return the memory of large tensors to the system at once
(`MALLOC_MMAP_THRESHOLD_` of glibc; docs/training.md says what that saves and costs).
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Annotated

import torch
import typer

from tenant.bench import measured_models as models
from tenant.bench.options import Progress, benchmark, numbers
from tenant.bench.processes import Child, ask_all, check_supported, memory_mib, peak_mib
from tenant.bench.report import Goal, Row, figure, where

_LIMIT_MIB = 16384
_THRESHOLD_BYTES = 1 << 20
_STEP, _STEPS = models.Step(batch=1, tokens=128), 4  # steps of each measurement, of all jobs together, at least
_WAIT_S, _LEAST_PAUSE_S, _SHARE = 1800.0, 0.05, 0.05  # of one core, for reading memory
_WHOLE = {"whole, float32": torch.float32, "whole, bfloat16": torch.bfloat16}
_FLOAT32 = "whole, float32"
_SPLIT = {"split, none": 5, "split, pad": 4, "split, pad/24": 4}  # and how many times the adapters should fit
_SHAPE = models.Llama(width=2048, layers=16, inner=5632)

Job = Child[models.Work, list[models.Cost]]
_Measure = Callable[[Sequence[Job], Sequence[Job]], Row]


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    whole = where(rows, variant=_FLOAT32)
    for variant, least in _SPLIT.items():
        found = where(rows, variant=variant)
        if len(found) > 1 and len(whole) > 1:
            over = figure(found[-1], "fit") / figure(whole[-1], "fit")
            yield Goal(f"{variant}: adapters that fit over whole jobs that fit", over, at_least=least)
            rate = max(figure(row, "steps_per_s") for row in found) / max(figure(row, "steps_per_s") for row in whole)
            yield Goal(f"{variant}: steps a second in sum over the whole jobs'", rate, at_least=1)
            grown = figure(found[-1], "executor_peak_mib") / figure(found[0], "executor_peak_mib")
            what = f"{variant}: executor's peak memory with {found[-1]['jobs']} jobs over {found[0]['jobs']}"
            yield Goal(what, grown, at_most=1.1)


@benchmark("adapters", goals=goals)
def adapters(
    folder: Path,
    progress: Progress,
    *,
    shape: models.Llama = _SHAPE,
    jobs: Annotated[str, typer.Option(help="Numbers of jobs, rising, separated by commas.")] = "1,2,4,8,12,16",
) -> Iterator[Row]:
    """Train one LoRA per process, with whole models and with tenants of one executor: memory of all processes, steps a
    second, and how many jobs fit into 16 GiB. Counts of whole jobs that do not fit are left out."""
    check_supported()
    counts = sorted(set(numbers(jobs, "--jobs")))
    model = shape.save(folder / "model")
    multiprocessing.set_forkserver_preload([models.__name__])
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_THRESHOLD_BYTES)
    ensure_running()
    del os.environ["MALLOC_MMAP_THRESHOLD_"]  # not for providers
    rates: dict[int, float] = {}  # steps a second of whole jobs in float32, by their number
    for variant in (*_WHOLE, *_SPLIT):
        done: list[tuple[int, float]] = []
        measure = partial(_measure, variant, shape, progress, done)
        if variant in _WHOLE:
            rows = _whole(measure, done, model, _WHOLE[variant], list(rates) or counts)
        else:
            rows = _split(measure, models.MaskingVariant.parse(variant.rpartition(" ")[2]), model, folder, counts)
        for row in rows:
            count, rate = int(figure(row, "jobs")), figure(row, "steps_per_s")
            if variant == _FLOAT32:
                rates[count] = rate
            # as many whole jobs in float32, or the most that fit
            yield {**row, "over_whole": rate / rates.get(count, list(rates.values())[-1])}


def _whole(
    measure: _Measure, done: Sequence[tuple[int, float]], model: Path, dtype: torch.dtype, counts: Sequence[int]
) -> Iterator[Row]:
    """Measure whole models, each with an equal share of the cores, as long as they fit."""
    for count in counts:
        if done and done[-1][1] + (count - done[-1][0]) * _per_job(done) > _LIMIT_MIB:
            return
        threads = max(1, (os.cpu_count() or 1) // count)
        with contextlib.ExitStack() as running:
            jobs = [
                running.enter_context(Child(f"job {i}", models.serve_tenant, model, None, threads, dtype, i))
                for i in range(count)
            ]
            row = measure(jobs, jobs)
        yield row


def _split(
    measure: _Measure, masking: models.MaskingVariant, model: Path, folder: Path, counts: Sequence[int]
) -> Iterator[Row]:
    """Measure tenants of one executor, which go on when others join them."""
    directory = folder / masking.name.replace("/", "-")
    directory.mkdir()
    threads, names = os.cpu_count() or 1, ("executor", "helper")[: 1 + (masking.scheme == "pad")]
    local = models.provide(model, directory, threads=threads, cache=folder / "cache", helpers=len(names) - 1)
    with local, contextlib.ExitStack() as running:
        jobs: list[Job] = []
        for count in counts:
            first = len(jobs)
            for i in range(first, count):
                remote = models.remote_config(local, masking, models.federation_of(local, i))
                job = Child(f"job {i}", models.serve_tenant, model, remote, 1, torch.float32, i)
                jobs.append(running.enter_context(job))
            row = measure(jobs, jobs[first:])
            yield row | {f"{name}_peak_mib": peak_mib(local.pid(name) or 0) for name in names}


def _measure(
    variant: str,
    shape: models.Llama,
    progress: Progress,
    done: list[tuple[int, float]],
    jobs: Sequence[Job],
    new: Sequence[Job],
) -> Row:
    """Let all jobs train, of which some are new. `done`: numbers of jobs and their memory in MiB, measured so far."""
    count = len(jobs)
    progress(f"{variant}: {count} jobs, warming up")
    for job in new:
        job.wait_ready()
    _, first = _with_memory(partial(_train, new, 1))
    progress(f"{variant}: {count} jobs")
    steps = max(1, _STEPS // count)
    start = time.perf_counter()
    seconds, peak = _with_memory(partial(_train, jobs, steps))
    wall, memory = time.perf_counter() - start, max(first, peak)
    done.append((count, memory))
    return {
        "width": shape.width,
        "layers": shape.layers,
        "variant": variant,
        "jobs": count,
        "memory_mib": memory,
        "fit": count + int((_LIMIT_MIB - memory) // _per_job(done)) if len(done) > 1 else None,
        "steps_per_s": count * steps / wall,
        "over_whole": None,
        "step_s": sum(seconds) / len(seconds),
        "executor_peak_mib": None,
        "helper_peak_mib": None,
    }


def _per_job(done: Sequence[tuple[int, float]]) -> float:
    """Return the memory of one more job."""
    (few, least), (many, most) = done[0], done[-1]
    return most / many if few == many else (most - least) / (many - few)


def _train(jobs: Sequence[Job], steps: int) -> list[float]:
    costs = ask_all(jobs, replace(_STEP, steps=steps), timeout_s=_WAIT_S)
    return [cost.seconds for each in costs for cost in each]


def _with_memory(work: Callable[[], list[float]]) -> tuple[list[float], float]:
    """Do the work. Returns its result, and the highest memory of all child processes meanwhile."""
    peak = 0.0
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        while not working.done():
            start = time.perf_counter()
            peak = max(peak, memory_mib())
            wait([working], timeout=max(_LEAST_PAUSE_S, (time.perf_counter() - start) / _SHARE))
        return working.result(), peak
