"""`symbiosis-priv bench`: round trips beside a bare TLS echo, and the exact kernels beside float32."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS

if TYPE_CHECKING:  # what imports torch is imported by the commands: not for --help
    from tenant.bench.kernels import KernelTiming
    from tenant.bench.linear import RoundTrip, Timing
    from tenant.bench.tenants import Figures

app = typer.Typer(no_args_is_help=True, help="Measure round trips beside a bare TLS echo of the same bytes.")

Rows = Annotated[str, typer.Option(help="Rows per call, separated by commas.")]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write every figure to this file.")]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads of each process.")]

_HALF_THE_CORES = max(1, (os.cpu_count() or 1) // 2)


@app.command()
def roundtrip(
    *,
    rows: Rows = "1,8,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas; multiples of 8.")] = "256,1024",
    repeat: Repeat = 200,
    threads: Threads = _HALF_THE_CORES,
    json: Json = None,
) -> None:
    """Time a masked, verified linear beside a bare TLS echo of the same bytes, against a real provider process."""
    from transformers.utils import logging

    from tenant.bench.linear import measure_round_trips

    row_counts, widths = _numbers(rows, "--rows"), _numbers(width, "--width")
    if any(w % 8 for w in widths):
        raise ConfigError("--width: a Llama's width is a multiple of 8 here")
    logging.disable_progress_bar()
    results: list[RoundTrip] = []
    console = Console()
    with console.status("starting providers") as status, tempfile.TemporaryDirectory() as folder:

        def done(result: RoundTrip) -> None:
            results.append(result)
            status.update(f"measured {result.rows} rows of width {result.width}")

        for w in widths:
            measure_round_trips(
                Path(folder) / str(w), width=w, row_counts=row_counts, repeat=repeat, threads=threads, on_result=done
            )
    for w in widths:
        console.print(_table([result for result in results if result.width == w]))
    console.print(
        f"microseconds, p50 / p99 of {repeat} repetitions, measured by turns in one run; {threads} torch threads per "
        f"process, {os.cpu_count()} cores, pads prefetched"
    )
    _write(json, results)


@app.command()
def kernels(
    *,
    rows: Rows = "1,8,64,256",
    shape: Annotated[str, typer.Option(help="INPUTSxOUTPUTS, separated by commas.")] = "2048x2048,2048x11264",
    repeat: Repeat = 10,
    threads: Threads = _HALF_THE_CORES,
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    json: Json = None,
) -> None:
    """Time every exact kernel beside float32 in both directions, and show which one is chosen."""
    import torch

    from tenant.bench.kernels import measure_kernels

    counts, shapes = _numbers(rows, "--rows"), _shapes(shape)
    torch.set_num_threads(threads)
    results: list[KernelTiming] = []
    console = Console()
    with console.status("measuring") as status:
        for inputs, outputs in shapes:
            status.update(f"measuring {inputs} x {outputs}")
            results += measure_kernels(
                inputs=inputs,
                outputs=outputs,
                row_counts=counts,
                repeat=repeat,
                weight_bits=weight_bits,
                device=device,
            )
    for start in range(0, len(results), 2 * len(counts)):
        console.print(_kernel_table(results[start : start + 2 * len(counts)]))
    console.print(
        f"microseconds and ratio to float32, median of {repeat} repetitions by turns, {threads} threads on {device}, "
        f"{weight_bits} weight bits; * is what a provider uses"
    )
    _write(json, results)


def _kernel_table(results: list[KernelTiming]) -> Table:
    """One shape; a column per direction and row count, microseconds and their ratio to float32's."""
    columns = [f"{r.direction} {r.rows}" for r in results]
    table = Table(f"{results[0].inputs} x {results[0].outputs}", *columns)
    table.add_row("float32", *(f"{r.float32:,.0f}" for r in results), end_section=True)
    for name in dict.fromkeys(name for r in results for name in r.kernels):
        table.add_row(name, *(_kernel_cell(r, name) for r in results))
    return table


def _kernel_cell(timing: KernelTiming, kernel: str) -> str:
    if kernel not in timing.kernels:
        return "-"
    chosen = "*" if kernel == timing.chosen else ""
    return f"{timing.kernels[kernel]:,.0f} {timing.ratio(kernel):.2f}{chosen}"


@app.command()
def provider(
    *,
    tenants: Annotated[str, typer.Option(help="How many at once, separated by commas.")] = "1,8,16",
    training: Annotated[float, typer.Option(min=0, max=1, help="The share of them that trains.")] = 0.25,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the synthetic model.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 5.0,
    threads: Threads = _HALF_THE_CORES,
    json: Json = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw tokens per second and latency, as SVG.")] = None,
) -> None:
    """Let many tenants ask one provider, with each batching policy by turns; every answer is compared bit by bit."""
    from transformers.utils import logging

    from tenant.bench.picture import draw
    from tenant.bench.tenants import POLICIES, Scenario, measure_tenants

    if hidden % 8:
        raise ConfigError("--hidden: a Llama's width is a multiple of 8 here")
    counts = _numbers(tenants, "--tenants")
    trainers = [int(count * training) for count in counts]
    scenarios = [Scenario(generating=n - t, training=t) for n, t in zip(counts, trainers, strict=True)]
    logging.disable_progress_bar()
    results: list[Figures] = []
    console = Console()
    with console.status("starting a provider for each policy") as status, tempfile.TemporaryDirectory() as folder:

        def done(figures: Figures) -> None:
            results.append(figures)
            status.update(f"measured {figures.policy} with {figures.generating} + {figures.training} tenants")

        measure_tenants(
            Path(folder),
            scenarios=scenarios,
            hidden=hidden,
            layers=layers,
            seconds=seconds,
            threads=threads,
            on_result=done,
        )
    table = Table("tenants", "policy", "tokens/s", "token ms", "trained rows/s", "step ms", "rows", "requests", "MiB")
    for figures in results:
        table.add_row(
            f"{figures.generating} + {figures.training}",
            figures.policy,
            f"{figures.tokens_per_s:,.0f}",
            _pair(figures.token_ms),
            f"{figures.trained_rows_per_s:,.0f}",
            _pair(figures.step_ms),
            f"{figures.batch_rows:,.1f}",
            f"{figures.batch_requests:,.2f}",
            f"{figures.resident_mib:,.0f}",
            end_section=figures.policy == POLICIES[-1],
        )
    console.print(table)
    wrong = sum(figures.wrong for figures in results)
    console.print(
        f"tenants: generating + training; p50 / p99; mean rows and requests of a product; measured by turns in one "
        f"run, {threads} torch threads per provider, {os.cpu_count()} cores that tenants share; "
        f"{wrong} answers differ from those that their tenant got alone"
    )
    if picture is not None:
        draw(results, picture)
    _write(json, results)
    if wrong:
        raise ProtocolError(f"{wrong} answers were not the bits that their tenant got alone")


def _pair(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:,.1f} / {values[1]:,.1f}"


def _table(results: list[RoundTrip]) -> Table:
    """One width; a column per row count."""
    from tenant.bench.linear import PARTS
    from tenant.ledger import size

    table = Table(f"width {results[0].width}", *(f"{r.rows} rows" for r in results))
    table.add_row("bytes both ways", *(size(r.up + r.down) for r in results))
    table.add_row("bare TLS echo", *(_cell(r.echo) for r in results))
    table.add_row("product alone", *(_cell(r.kernel) for r in results))
    table.add_row("masked call", *(_cell(r.masked) for r in results), end_section=True)
    for name in PARTS:
        table.add_row(f"  {name}", *(_cell(r.parts[name]) for r in results))
    table.add_section()
    table.add_row("masked / echo", *(f"{r.over_echo:.2f}" for r in results))
    table.add_row("masked / (echo + product)", *(f"{r.over_floor:.2f}" for r in results))
    return table


def _cell(timing: Timing) -> str:
    return f"{timing.p50:,.0f} / {timing.p99:,.0f}"


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text!r}: write whole numbers separated by commas, like 1,8,64")
    return numbers


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        inputs, cross, outputs = part.partition("x")
        if not cross or not inputs.isdecimal() or not outputs.isdecimal() or not int(inputs) or not int(outputs):
            raise ConfigError(f"--shape {text!r}: write INPUTSxOUTPUTS separated by commas, like 256x256,1024x4096")
        shapes.append((int(inputs), int(outputs)))
    return shapes


def _write(path: Path | None, results: list[RoundTrip] | list[KernelTiming] | list[Figures]) -> None:
    import msgspec

    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
