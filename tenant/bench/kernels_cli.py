"""The commands `bench kernels` and `bench gpu`, which time every exact kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from tenant.bench.cli_options import HALF_THE_CORES, Json, Repeat, Rows, Threads, measure, numbers

if TYPE_CHECKING:  # torch is imported when a command runs, so that --help does not wait for it
    from tenant.bench.result_file import Row

Shapes = Annotated[str, typer.Option("--shape", help="INPUTSxOUTPUTS, separated by commas.")]
WeightBits = Annotated[int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")]


def kernels(
    *,
    rows: Rows = "1,8,64,256",
    shape: Shapes = "2048x2048,2048x11264",
    repeat: Repeat = 10,
    threads: Threads = HALF_THE_CORES,
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    json: Json = None,
) -> None:
    """Every exact kernel beside float32 in both directions, and which one is chosen."""
    found = _kernels(rows, shape, repeat=repeat, threads=threads, weight_bits=weight_bits, device=device)
    measure("kernels", json, lambda folder, tell: found)


def gpu(
    *,
    rows: Rows = "1,16,64,256,512",
    shape: Shapes = "2048x2048,2048x11264,4096x4096",
    repeat: Repeat = 10,
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS,
    json: Json = None,
) -> None:
    """Every exact kernel that runs on CUDA beside float32 there; refuses without a CUDA device."""
    found = _kernels(rows, shape, repeat=repeat, threads=HALF_THE_CORES, weight_bits=weight_bits, device="cuda")
    measure("gpu", json, lambda folder, tell: found)


def _kernels(rows: str, shape: str, *, repeat: int, threads: int, weight_bits: int, device: str) -> list[Row]:
    import torch

    from tenant.bench.kernels import kernel_rows, measure_kernels

    _check_device(device)
    counts, shapes = numbers(rows, "--rows"), _shapes(shape)
    torch.set_num_threads(threads)
    return [
        row
        for inputs, outputs in shapes
        for timing in measure_kernels(
            inputs=inputs, outputs=outputs, row_counts=counts, repeat=repeat, weight_bits=weight_bits, device=device
        )
        for row in kernel_rows(timing)
    ]


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name, dtype=torch.int32)
    except (RuntimeError, AssertionError) as error:  # the latter error if torch was built without CUDA
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(f"there is no device {name!r} here; there are {', '.join(['cpu', *cuda])}") from error


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        inputs, cross, outputs = part.partition("x")
        if not cross or not inputs.isdecimal() or not outputs.isdecimal() or not int(inputs) or not int(outputs):
            raise ConfigError(f"--shape {text!r}: write INPUTSxOUTPUTS separated by commas, like 256x256,1024x4096")
        shapes.append((int(inputs), int(outputs)))
    return shapes
