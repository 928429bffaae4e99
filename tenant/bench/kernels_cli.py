"""The command `bench kernels`, which times every exact kernel."""

from functools import partial
from typing import Annotated

import typer

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from tenant.bench.cli_options import HALF_THE_CORES, Json, Repeat, Rows, Threads, measure, numbers


def kernels(
    *,
    rows: Rows = "1,8,64,256",
    shape: Annotated[str, typer.Option(help="INPUTSxOUTPUTS, separated by commas.")] = "2048x2048,2048x11264",
    repeat: Repeat = 10,
    threads: Threads = HALF_THE_CORES,
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS,
    device: Annotated[str, typer.Option(help="Torch device: cpu, or cuda.")] = "cpu",
    json: Json = None,
) -> None:
    """Time every exact kernel and float32 in both directions, and show which kernel is chosen."""
    import torch

    from tenant.bench.kernels import kernel_rows, measure_kernels

    _check_device(device)
    counts, shapes = numbers(rows, "--rows"), _shapes(shape)
    torch.set_num_threads(threads)
    timed = partial(measure_kernels, row_counts=counts, repeat=repeat, weight_bits=weight_bits, device=device)
    measure(
        "kernels",
        json,
        lambda folder, tell: (
            row
            for inputs, outputs in shapes
            for timing in timed(inputs=inputs, outputs=outputs)
            for row in kernel_rows(timing)
        ),
    )


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
