"""`bench adapters`: how many LoRA jobs fit into the memory of one machine, and how fast they train together.

A job is a process with a LoRA, an optimizer and data of its own. The whole model is read from a checkpoint in bfloat16,
as models are published: in float32 each job has a copy of it, in bfloat16 all jobs of one machine map the same pages.
The split model's jobs are tenants, each with its own certificate, of one executor, and with pads also of one helper.

Memory is the highest sum of the proportional set sizes (PSS) of all processes that the benchmark starts: a page that
several processes map counts once. All jobs are forked from one process that has imported the modules, and return the
memory of large tensors to the system at once (`MALLOC_MMAP_THRESHOLD_` of glibc): a job of width 2048 and 16 layers
takes 331 MiB in place of 591 without masks, for some 15 % more of its processor time.
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
from typing import Annotated, NamedTuple

import torch
import typer

from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import measured_models as models
from tenant.bench.options import Progress, benchmark, numbers
from tenant.bench.processes import Child, ask_all, check_supported, memory_mib, peak_mib
from tenant.bench.real_size import write_checkpoint
from tenant.bench.report import Goal, Row, figure, where
from tenant.model.hf import RemoteConfig

_LIMIT_MIB = 16384
_THRESHOLD_BYTES = 1 << 20
_STEP, _STEPS = models.Step(batch=1, tokens=128), 4  # steps of each measurement, of all jobs together, at least
_WAIT_S, _LEAST_PAUSE_S, _SHARE = 1800.0, 0.05, 0.05  # of one core, for reading memory
_WHOLE, _AS_STORED = "whole, float32", "whole, bfloat16"
_SPLIT = {"split, none": 5, "split, pad": 4, "split, pad/24": 4}  # and how many times the adapters should fit
_SHAPE = models.Llama(width=2048, layers=16, inner=5632)

Job = Child[models.Work, list[models.Cost]]


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    whole = where(rows, variant=_WHOLE)
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
    second, and how many jobs fit into 16 GiB. Counts of whole jobs that do not fit are left out.

    Example: symbiosis-priv bench adapters --jobs 1,2,4
    """
    check_supported()
    counts = sorted(set(numbers(jobs, "--jobs")))
    bench = _Bench(folder, shape, progress)
    yield from bench.whole(_WHOLE, torch.float32, counts)
    yield from bench.whole(_AS_STORED, torch.bfloat16, bench.fitted)
    for variant in _SPLIT:
        yield from bench.split(variant, counts)


class _Measured(NamedTuple):
    jobs: int
    memory: float


class _Bench:
    """The measurements. `fitted`: the counts of whole jobs in float32 that were run."""

    def __init__(self, folder: Path, shape: models.Llama, progress: Progress) -> None:
        self._folder, self._shape, self._progress = folder, shape, progress
        self._model, self._cache = folder / "model", folder / "cache"
        write_checkpoint(shape.config(), self._model)
        multiprocessing.set_forkserver_preload([models.__name__])
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_THRESHOLD_BYTES)
        ensure_running()
        del os.environ["MALLOC_MMAP_THRESHOLD_"]  # not for providers
        self._rate: dict[int, float] = {}
        self.fitted: list[int] = []

    def whole(self, variant: str, dtype: torch.dtype, counts: Sequence[int]) -> Iterator[Row]:
        """Measure whole models, each with an equal share of the cores."""
        done: list[_Measured] = []
        for count in counts:
            if done and done[-1].memory + (count - done[-1].jobs) * _per_job(done) > _LIMIT_MIB:
                return
            threads = max(1, (os.cpu_count() or 1) // count)
            with contextlib.ExitStack() as running:
                children = [self._start(running, i, None, threads, dtype) for i in range(count)]
                row = self._measure(variant, children, children, done)
            if variant == _WHOLE:
                self._rate[count] = figure(row, "steps_per_s")
                self.fitted.append(count)
            yield self._compared(row)

    def split(self, variant: str, counts: Sequence[int]) -> Iterator[Row]:
        """Measure tenants of one executor, which go on when others join them."""
        masking = models.MaskingVariant.parse(variant.rpartition(" ")[2])
        directory = self._folder / masking.name.replace("/", "-")
        directory.mkdir()
        self._progress(f"{variant}: starting providers")
        threads, helpers = os.cpu_count() or 1, int(masking.scheme == "pad")
        local = models.provide(self._model, directory, threads=threads, cache=self._cache, helpers=helpers)
        done: list[_Measured] = []
        with local, contextlib.ExitStack() as running:
            children: list[Job] = []
            for count in counts:
                new = [
                    self._start(running, i, self._tenant(local, masking, i), 1, torch.float32)
                    for i in range(len(children), count)
                ]
                children += new
                row = self._measure(variant, children, new, done)
                for name in ("executor", "helper")[: 1 + helpers]:
                    row[f"{name}_peak_mib"] = peak_mib([local.pid(name) or 0])
                yield self._compared(row)

    def _tenant(self, local: LocalFederation, masking: models.MaskingVariant, i: int) -> RemoteConfig:
        return models.remote_config(local, masking, models.Effort(), federation=models.federation_of(local, i))

    def _start(
        self,
        running: contextlib.ExitStack,
        i: int,
        remote: RemoteConfig | None,
        threads: int,
        dtype: torch.dtype,
    ) -> Job:
        child = Child(f"job {i}", models.serve_tenant, self._model, remote, threads, dtype, i)
        return running.enter_context(child)

    def _measure(self, variant: str, children: Sequence[Job], new: Sequence[Job], done: list[_Measured]) -> Row:
        count = len(children)
        self._progress(f"{variant}: {count} jobs, warming up")
        for child in new:
            child.wait_ready()
        _, first = _with_memory(partial(_train, new, 1))
        self._progress(f"{variant}: {count} jobs")
        steps = max(1, _STEPS // count)
        start = time.perf_counter()
        seconds, peak = _with_memory(partial(_train, children, steps))
        wall = time.perf_counter() - start
        done.append(_Measured(count, max(first, peak)))
        fit = count + int((_LIMIT_MIB - done[-1].memory) // _per_job(done)) if len(done) > 1 else None
        return {
            "width": self._shape.width,
            "layers": self._shape.layers,
            "variant": variant,
            "jobs": count,
            "memory_mib": done[-1].memory,
            "fit": fit,
            "steps_per_s": count * steps / wall,
            "over_whole": None,
            "step_s": sum(seconds) / len(seconds),
            "executor_peak_mib": None,
            "helper_peak_mib": None,
        }

    def _compared(self, row: Row) -> Row:
        """Compare with as many whole jobs in float32, or with the most that fit."""
        whole = self._rate.get(int(figure(row, "jobs")), self._rate[self.fitted[-1]])
        return {**row, "over_whole": figure(row, "steps_per_s") / whole}


def _per_job(done: Sequence[_Measured]) -> float:
    """Return the memory of one more job."""
    first, last = done[0], done[-1]
    return last.memory if first is last else (last.memory - first.memory) / (last.jobs - first.jobs)


def _train(children: Sequence[Job], steps: int) -> list[float]:
    costs = ask_all(children, replace(_STEP, steps=steps), timeout_s=_WAIT_S)
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
