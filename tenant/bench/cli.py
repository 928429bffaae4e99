"""`symbiosis-priv bench`: what the split costs, beside what it replaces."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS

if TYPE_CHECKING:  # what imports torch is imported by the commands: not for --help
    from tenant.bench.contest import Contest, Shape
    from tenant.bench.report import Row

app = typer.Typer(no_args_is_help=True, help="Measure what the split costs, beside what it replaces, in one run.")

_POLICIES = ("none", "lockstep", "opportunistic")
_SHARDINGS = "columns,gathered"
_HALF_THE_CORES = max(1, (os.cpu_count() or 1) // 2)

Rows = Annotated[str, typer.Option(help="Rows per call, separated by commas.")]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write every figure to this file.")]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads of each process.")]
Shapes = Annotated[str, typer.Option("--shape", help="INPUTSxOUTPUTS, separated by commas.")]
WeightBits = Annotated[int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")]
Width = Annotated[int, typer.Option(min=64, help="Of the Llama; a multiple of 64.")]
Layers = Annotated[int, typer.Option(min=1, help="Of the Llama.")]
Inner = Annotated[int, typer.Option(min=8, help="Width inside of the MLP.")]
Maskings = Annotated[str, typer.Option("--masking", help="Schemes to measure, separated by commas.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a batch.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
PoolMemory = Annotated[int, typer.Option(min=0, help="Memory of each tenant for pads drawn ahead, in MiB.")]
_ALL_MASKINGS = "none,pad,local"


@app.command()
def step(
    *,
    width: Width = 2048,
    layers: Layers = 4,
    inner: Inner = 5632,
    batch: Batch = 4,
    tokens: Tokens = 128,
    masking: Maskings = _ALL_MASKINGS,
    repeat: Repeat = 3,
    threads: Threads = _HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """A LoRA step (q and v) of a Llama, whole and split: CPU seconds and peak memory of every process."""
    from tenant.bench.step import measure_step
    from tenant.bench.worker import Step

    names, shape, task = _maskings(masking), _shape(width, layers, inner), Step(batch=batch, tokens=tokens)
    with _contest(shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as (running, tell):
        rows = measure_step(running, shape, task, names, repeat=repeat, on_turn=tell)
    _finish("step", rows, json)


@app.command()
def token(
    *,
    width: Width = 2048,
    layers: Layers = 4,
    inner: Inner = 5632,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before the first that is measured.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens per turn.")] = 16,
    masking: Maskings = _ALL_MASKINGS,
    repeat: Repeat = 3,
    threads: Threads = _HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """A generated token of a Llama, whole and split."""
    from tenant.bench.step import measure_token
    from tenant.bench.worker import Generate

    names, shape, task = _maskings(masking), _shape(width, layers, inner), Generate(prompt=prompt, tokens=tokens)
    with _contest(shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as (running, tell):
        rows = measure_token(running, shape, task, names, repeat=repeat, on_turn=tell)
    _finish("token", rows, json)


@app.command()
def start(
    *,
    width: Width = 2048,
    layers: Layers = 16,
    inner: Inner = 8192,
    repeat: Repeat = 3,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a provider, and for making keys.")] = (
        os.cpu_count() or 1
    ),
    json: Json = None,
) -> None:
    """A provider's start, cold and warm, and the tenant's verification keys, beside reading the checkpoint.

    Writes a checkpoint of the given shape (a billion weights, 2 GB) and 2 bytes per weight of cache; both are deleted.
    """
    from tenant.bench.contest import Shape
    from tenant.bench.start import measure_start

    shape = Shape(width=_multiple(width, "--width"), layers=layers, inner=inner)
    with _measuring() as (folder, tell):
        rows = measure_start(folder, shape, threads=threads, repeat=repeat, on_turn=tell)
    _finish("start", rows, json)


@app.command()
def linear(
    *,
    rows: Rows = "1,16,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas; multiples of 64.")] = "768,2048",
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    repeat: Repeat = 50,
    threads: Threads = _HALF_THE_CORES,
    json: Json = None,
) -> None:
    """One masked, verified linear and its parts, beside a bare TLS echo of the same bytes and the bare product."""
    from tenant.bench.linear import measure_linears

    counts, widths = _numbers(rows, "--rows"), [_multiple(w, "--width") for w in _numbers(width, "--width")]
    results: list[Row] = []
    with _measuring() as (folder, tell):

        def done(row: Row) -> None:
            results.append(row)
            tell(f"measured {row['rows']} rows of width {row['width']}")

        for w in widths:
            measure_linears(
                folder / str(w),
                width=w,
                row_counts=counts,
                masking=_scheme(masking),
                repeat=repeat,
                threads=threads,
                on_result=done,
            )
    _finish("linear", results, json)


@app.command()
def network(
    *,
    condition: Annotated[
        str, typer.Option(help="Bandwidth, round trip and loss each way, like 100mbit/100ms/0.1%; several by commas.")
    ] = "1gbit/5ms,100mbit/5ms,100mbit/100ms",
    width: Width = 512,
    layers: Layers = 4,
    inner: Inner = 1408,
    batch: Batch = 1,
    tokens: Tokens = 128,
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    line: Annotated[
        str, typer.Option(help="How to make the line: netem, packets or proxy; auto for the best of them here.")
    ] = "auto",
    repeat: Repeat = 5,
    threads: Threads = _HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """Steps and tokens per second over slow lines, beside what round trips and bytes predict.

    The tenant's line has a bandwidth, a delay and losses, in a network
    namespace where this machine makes one, else by a proxy.
    """
    from tenant.bench.lines import KINDS, Condition
    from tenant.bench.network import measure_network

    if line not in (*KINDS, "auto"):
        raise ConfigError(f"--line {line!r}: choose one of auto, {', '.join(KINDS)}")
    conditions = [Condition.parse(text) for text in condition.split(",")]
    with _measuring() as (folder, tell):
        rows, made = measure_network(
            folder,
            _shape(width, layers, inner),
            batch=batch,
            tokens=tokens,
            conditions=conditions,
            masking=_scheme(masking),
            kind=next((kind for kind in KINDS if kind == line), None),
            repeat=repeat,
            threads=threads,
            pool_memory_mib=pool_memory_mib,
            on_turn=tell,
        )
    for work in ("step", "token"):
        _show(
            [
                {name: value for name, value in row.items() if name != "difference"}
                for row in rows
                if row["work"] == work
            ]
        )
    console = Console()
    for row in rows:
        if row["difference"] is not None:
            console.print(f"{row['condition']}, {row['work']}: {row['difference']}", soft_wrap=True)
    console.print(f"line: {made}", soft_wrap=True)
    _write(json, "network", rows)


@app.command()
def chaos(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, at least.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="It trains on until so many were killed.")] = 10,
    generations: Annotated[int, typer.Option(min=0, help="Texts that are generated afterwards.")] = 10,
    executors: Annotated[int, typer.Option(min=1, help="Processes that multiply.")] = 3,
    helpers: Annotated[int, typer.Option(min=1, help="Processes that make effects of pads.")] = 2,
    pad_helpers: Annotated[int, typer.Option(min=1, help="Helpers that share a pad; the others are spares.")] = 1,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two kills, on average.")] = 3.0,
    merciless: Annotated[
        bool, typer.Option("--merciless", help="Kill also the last one of a role, and wait until it is back.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of who is killed when.")] = 0,
    json: Json = None,
) -> None:
    """SIGKILL random providers while a tenant trains and generates; status 1 if one bit comes out differently."""
    from tenant.bench.chaos import Work, chaos_rows, run_chaos

    work = Work(steps=steps, generations=generations, kills=kills)
    with _measuring() as (folder, tell):
        found = run_chaos(
            folder,
            work,
            executors=executors,
            helpers=helpers,
            pad_helpers=pad_helpers,
            every_s=every,
            merciless=merciless,
            seed=seed,
            on_event=tell,
        )
    _finish("chaos", chaos_rows(found, every_s=every), json)
    if not found.identical:
        raise ProtocolError("the disturbed run has ended with other bits than the undisturbed one")


@app.command()
def kernels(
    *,
    rows: Rows = "1,8,64,256",
    shape: Shapes = "2048x2048,2048x11264",
    repeat: Repeat = 10,
    threads: Threads = _HALF_THE_CORES,
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    json: Json = None,
) -> None:
    """Every exact kernel beside float32 in both directions, and which one is chosen."""
    found = _kernels(rows, shape, repeat=repeat, threads=threads, weight_bits=weight_bits, device=device)
    _finish("kernels", found, json)


@app.command()
def gpu(
    *,
    rows: Rows = "1,16,64,256,512",
    shape: Shapes = "2048x2048,2048x11264,4096x4096",
    repeat: Repeat = 10,
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS,
    json: Json = None,
) -> None:
    """Every exact kernel that runs on CUDA beside float32 there; refuses without a CUDA device."""
    found = _kernels(rows, shape, repeat=repeat, threads=_HALF_THE_CORES, weight_bits=weight_bits, device="cuda")
    _finish("gpu", found, json)


@app.command()
def provider(
    *,
    tenants: Annotated[
        str, typer.Option(help="How many at once, generating+training, separated by commas.")
    ] = "1+0,16+0,6+0,6+2,8+4",
    generating_rows: Annotated[str, typer.Option(help="Rows of generating tenants' requests, by turns.")] = "1",
    training_rows: Annotated[str, typer.Option(help="Rows of training tenants' requests, by turns.")] = "2,16,64,256",
    adapters: Annotated[str, typer.Option(help="Ranks of the tenants' adapters, by turns.")] = "8,64",
    policies: Annotated[str, typer.Option(help="Batching policies, separated by commas.")] = ",".join(_POLICIES),
    ranks: Annotated[str, typer.Option(help="Processes that hold the model together, separated by commas.")] = "1",
    shardings: Annotated[str, typer.Option(help="How they share products out, separated by commas.")] = _SHARDINGS,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the synthetic model.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 8.0,
    threads: Threads = _HALF_THE_CORES,
    json: Json = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw tokens per second and latency, as SVG.")] = None,
) -> None:
    """Let many tenants ask one provider, with each batching policy by turns; answers are compared bit by bit."""
    from transformers.utils import logging

    from tenant.bench.picture import draw
    from tenant.bench.tenants import Figures, Mix, Scenario, Variant, measure_tenants, tenants_row

    if hidden % 8:
        raise ConfigError("--hidden: a Llama's width is a multiple of 8 here")
    variants = [
        Variant(policy=policy, ranks=count, sharding=sharding)
        for policy in _of(policies, _POLICIES, "--policies")
        for count in _numbers(ranks, "--ranks")
        for sharding in _of(shardings, _SHARDINGS.split(","), "--shardings")[: None if count > 1 else 1]
    ]
    mix = Mix(
        generating_rows=tuple(_numbers(generating_rows, "--generating-rows")),
        training_rows=tuple(_numbers(training_rows, "--training-rows")),
        ranks=tuple(_numbers(adapters, "--adapters")),
    )
    scenarios = [Scenario(generating=some, training=others) for some, others in _pairs(tenants, "--tenants")]
    logging.disable_progress_bar()
    results: list[Figures] = []
    console = Console(stderr=True)
    with console.status("starting the providers") as status, tempfile.TemporaryDirectory() as folder:

        def done(figures: Figures) -> None:
            results.append(figures)
            status.update(f"measured {figures.variant} with {figures.generating} + {figures.training} tenants")

        measure_tenants(
            Path(folder),
            scenarios=scenarios,
            mix=mix,
            variants=variants,
            hidden=hidden,
            layers=layers,
            seconds=seconds,
            threads=threads,
            on_result=done,
        )
    _finish("provider", [tenants_row(figures) for figures in results], json)
    if picture is not None:
        draw(results, picture)
    if wrong := sum(figures.wrong for figures in results):
        raise ProtocolError(f"{wrong} answers were not the bits that their tenant got alone")


@app.command()
def abuse(
    *,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 4.0,
    threads: Threads = _HALF_THE_CORES,
    json: Json = None,
) -> None:
    """An honest tenant's requests alone and while others flood, read slowly, come and go, or are turned away."""
    from tenant.bench.abuse import measure_abuse

    results: list[Row] = []
    with _measuring() as (folder, tell):

        def done(row: Row) -> None:
            results.append(row)
            tell(f"measured {row['abuse']}")

        measure_abuse(folder, hidden=hidden, seconds=seconds, threads=threads, on_result=done)
    _finish("abuse", results, json)
    if wrong := sum(int(row["wrong"] or 0) for row in results):
        raise ProtocolError(f"{wrong} answers were not the bits that the tenant got alone")


@app.command()
def scale(
    *,
    rows: Rows = "64,128,256,512",
    width: Annotated[str, typer.Option(help="Widths, separated by commas; multiples of 64.")] = "512,1024,2048",
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,2,4",
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    repeat: Repeat = 3,
    threads: Threads = _HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    svg: Annotated[Path | None, typer.Option(help="Also draw a picture per axis into this folder.")] = None,
    json: Json = None,
) -> None:
    """The tenant's cost of a step against rows, width and depth, with slopes in a log-log picture.

    The first of each list stays while another one grows.
    """
    from symbiosis_priv.files import write_atomically
    from tenant.bench.scale import AXES, measure_scale, picture

    widths = [_multiple(w, "--width") for w in _numbers(width, "--width")]
    row_counts, depths = _numbers(rows, "--rows"), _numbers(layers, "--layers")
    with _measuring() as (folder, tell):
        results = measure_scale(
            folder,
            rows=row_counts,
            widths=widths,
            depths=depths,
            masking=_scheme(masking),
            repeat=repeat,
            threads=threads,
            pool_memory_mib=pool_memory_mib,
            on_turn=tell,
        )
    if svg is not None:
        for axis in AXES:
            write_atomically(svg / f"scale-{axis}.svg", picture(results, axis).encode())
    _finish("scale", results, json)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="What --json has written.")],
    *,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables between this document's markers; else to stdout.")
    ] = None,
) -> None:
    """Turn --json files into tables, such as those of docs/benchmarks.md."""
    from tenant.bench.markdown import render, update
    from tenant.bench.report import read

    reports = [read(file) for file in files]
    if markdown is None:
        typer.echo("\n".join(map(render, reports)), nl=False)
    else:
        update(markdown, reports)


@contextmanager
def _measuring() -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder that is gone afterwards, and how to say what is going on."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-priv-bench-") as folder,
        console.status("starting providers and tenants") as status,
    ):
        yield Path(folder), status.update


@contextmanager
def _contest(
    shape: Shape, names: Sequence[str], *, threads: int, pool_memory_mib: int
) -> Iterator[tuple[Contest, Callable[[str], None]]]:
    from tenant.bench.contest import contest

    with (
        _measuring() as (folder, tell),
        contest(folder, shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as running,
    ):
        yield running, tell


def _shape(width: int, layers: int, inner: int) -> Shape:
    from tenant.bench.contest import Shape

    return Shape(width=_multiple(width, "--width"), layers=layers, inner=inner)


def _kernels(rows: str, shape: str, *, repeat: int, threads: int, weight_bits: int, device: str) -> list[Row]:
    import torch

    from tenant.bench.kernels import kernel_rows, measure_kernels

    _check_device(device)
    counts, shapes = _numbers(rows, "--rows"), _shapes(shape)
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
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that is built without CUDA
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(f"there is no device {name!r} here; there are {', '.join(['cpu', *cuda])}") from error


def _finish(benchmark: str, rows: Sequence[Row], json: Path | None) -> None:
    """Show the figures, and write them."""
    _show(rows)
    _write(json, benchmark, rows)


def _show(rows: Sequence[Row]) -> None:
    from rich.table import Table as Screen

    from tenant.bench.markdown import Table

    table = Table.of(rows)
    lines = [table.headings, *table.rows]
    if len(table.headings) > len(rows):  # figures below each other fit a terminal better
        lines = list(map(list, zip(*lines, strict=True)))
    screen = Screen(title=", ".join(f"{name} {value}" for name, value in table.shared.items()), title_justify="left")
    for heading in lines[0]:
        screen.add_column(heading, justify="right")
    for cells in lines[1:]:
        screen.add_row(*cells)
    Console().print(screen)


def _write(path: Path | None, benchmark: str, rows: Sequence[Row]) -> None:
    from tenant.bench import report as reports

    if path is not None:
        reports.write(path, reports.report(benchmark, rows))


def _scheme(name: str) -> str:
    """The name of a scheme that a session can run."""
    from tenant.masking.registry import session_scheme

    return session_scheme(name).name


def _maskings(text: str) -> list[str]:
    return [_scheme(name.strip()) for name in text.split(",")]


def _multiple(number: int, option: str) -> int:
    if number % 64:
        raise ConfigError(f"{option} {number}: write multiples of 64, the dimensions of an attention head")
    return number


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text!r}: write whole numbers separated by commas, like 1,8,64")
    return numbers


def _of(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := set(names) - set(known):
        raise ConfigError(f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return names


def _pairs(text: str, option: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"(\d+)\+(\d+)", part.strip()) for part in text.split(",")]
    pairs = [(int(match[1]), int(match[2])) for match in found if match is not None]
    if len(pairs) < len(found) or not all(map(sum, pairs)):
        raise ConfigError(f"{option} {text!r}: write GENERATING+TRAINING separated by commas, like 1+0,6+2")
    return pairs


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        inputs, cross, outputs = part.partition("x")
        if not cross or not inputs.isdecimal() or not outputs.isdecimal() or not int(inputs) or not int(outputs):
            raise ConfigError(f"--shape {text!r}: write INPUTSxOUTPUTS separated by commas, like 256x256,1024x4096")
        shapes.append((int(inputs), int(outputs)))
    return shapes
