"""The commands of `symbiosis-priv bench`. A command imports its measurement when it runs, because the import needs
torch."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, RingBits
from symbiosis_priv.system.files import output_file, read_text, write_atomically
from tenant.bench.cli_options import (
    HALF_THE_CORES,
    Batch,
    Effort,
    Json,
    Masking,
    Maskings,
    Progress,
    Repeat,
    Rows,
    Seconds,
    Threads,
    Tokens,
    finish,
    measure,
    measuring,
    names,
    numbers,
    pairs,
    refuse_wrong,
    scheme,
    show,
    widths,
)
from tenant.bench.measured_models import Bert, Llama, QueuedRequests
from tenant.bench.results import result_file, tables
from tenant.bench.results.result_file import Row
from tenant.cli.options import takes

if TYPE_CHECKING:  # torch is imported when a command runs, so that --help does not wait for it
    from tenant.bench.many_tenants import Scenario, Variant

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the cost of split execution, compared with whole-model execution in the same run.",
)

_SHAPE = Llama(width=2048, layers=4, inner=5632)
_SMALL = Llama(width=512, layers=4, inner=1408)
_BILLION = Llama(width=2048, layers=16, inner=8192)
_BERT_BASE, _TRAFFIC = Bert(), QueuedRequests()
_EFFORT, _FIVE_TIMES, _ONCE = Effort(), Effort(repeat=5), Effort(repeat=1)
_MASKINGS = "none,pad,local"
_POLICIES = "none,lockstep,opportunistic"
_SHARDINGS = "columns,gathered"

Tenants = Annotated[str, typer.Option(help="How many at once, generating+training, separated by commas.")]
Policies = Annotated[str, typer.Option(help="Batching policies, separated by commas.")]
Ranks = Annotated[str, typer.Option(help="Processes that hold the model together, separated by commas.")]
Shardings = Annotated[str, typer.Option(help="How ranks divide a product, separated by commas.")]


@app.command()
@takes
def step(
    *,
    shape: Llama = _SHAPE,
    batch: Batch = 4,
    tokens: Tokens = 128,
    masking: Maskings = _MASKINGS,
    effort: Effort = _EFFORT,
    json: Json = None,
) -> None:
    """Measure a LoRA step (q and v) of a Llama, whole and split: CPU seconds and peak memory of every process."""
    from tenant.bench.processes.tenant_process import Step
    from tenant.bench.steps_and_tokens import measure_step

    task = Step(batch=batch, tokens=tokens)
    _compare("step", partial(measure_step, shape=shape, task=task), shape, masking, effort, json)


@app.command()
@takes
def token(
    *,
    shape: Llama = _SHAPE,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before the first that is measured.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens per turn.")] = 16,
    masking: Maskings = _MASKINGS,
    effort: Effort = _EFFORT,
    json: Json = None,
) -> None:
    """Measure a generated token of a Llama, whole and split."""
    from tenant.bench.processes.tenant_process import Generate
    from tenant.bench.steps_and_tokens import measure_token

    task = Generate(prompt=prompt, tokens=tokens)
    _compare("token", partial(measure_token, shape=shape, task=task), shape, masking, effort, json)


def _compare(
    benchmark: str, work: Callable[..., list[Row]], shape: Llama, masking: str, effort: Effort, json: Path | None
) -> None:
    from tenant.bench.steps_and_tokens import comparison

    maskings = [scheme(name) for name in masking.split(",")]

    def run(folder: Path, progress: Progress) -> list[Row]:
        with comparison(folder, shape, maskings, effort) as running:
            return work(running, maskings=maskings, repeat=effort.repeat, on_turn=progress)

    measure(benchmark, json, run)


@app.command()
@takes
def scale(
    *,
    rows: Rows = "64,128,256,512",
    width: Annotated[str, typer.Option(help="Widths, separated by commas; multiples of 64.")] = "512,1024,2048",
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,2,4",
    masking: Masking = "pad",
    effort: Effort = _EFFORT,
    svg: Annotated[Path | None, typer.Option(help="Also draw a picture per axis into this folder.")] = None,
    json: Json = None,
) -> None:
    """Measure the tenant's cost of a step against rows, width and depth, with slopes in a log-log picture.

    Two of the lists stay at their first value while the third one varies.
    """
    from tenant.bench.scaling import AXES, measure_scale, picture

    points = {"rows": numbers(rows, "--rows"), "widths": widths(width), "depths": numbers(layers, "--layers")}
    pictures = {axis: file for axis in AXES if svg and (file := output_file(svg / f"scale-{axis}.svg"))}
    name = scheme(masking)
    found = measure(
        "scale",
        json,
        lambda folder, progress: measure_scale(folder, **points, masking=name, effort=effort, on_turn=progress),
    )
    for axis, file in pictures.items():
        write_atomically(file, picture(found, axis).encode())


@app.command()
@takes
def start(
    *,
    shape: Llama = _BILLION,
    repeat: Repeat = 3,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a provider, and for making keys.")] = (
        os.cpu_count() or 1
    ),
    json: Json = None,
) -> None:
    """Time a provider's start, cold and warm, the tenant's verification keys, and reading the checkpoint.

    Writes a checkpoint of the given shape (a billion weights, 2 GB) and 2 bytes per weight of cache; both are deleted.
    """
    from tenant.bench.startup import measure_start

    measure("start", json, partial(measure_start, shape=shape, threads=threads, repeat=repeat))


@app.command()
def linear(
    *,
    rows: Rows = "1,16,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas; multiples of 64.")] = "768,2048",
    masking: Masking = "pad",
    repeat: Repeat = 50,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
) -> None:
    """Time one masked, verified linear and its parts, a bare TLS echo of the same bytes, and the bare product.

    Pads are drawn before the clock starts. "back to back" is a call with the pads that were drawn during the call
    before.
    """
    from tenant.bench.masked_linear import measure_linears

    counts, sizes, name = numbers(rows, "--rows"), widths(width), scheme(masking)
    measure(
        "linear",
        json,
        lambda folder, progress: measure_linears(
            folder, widths=sizes, row_counts=counts, masking=name, repeat=repeat, threads=threads
        ),
    )


@app.command()
@takes
def network(
    *,
    condition: Annotated[
        str, typer.Option(help="Bandwidth, round trip and loss, like 100mbit/100ms/0.1%; several separated by commas.")
    ] = "1gbit/1ms,1gbit/10ms,1gbit/50ms,100mbit/1ms,100mbit/10ms,100mbit/50ms",
    shape: Llama = _SMALL,
    batch: Batch = 2,
    tokens: Tokens = 64,
    overlap: Annotated[
        int, typer.Option(min=1, help="Parts of a batch, also one after the other; 1 measures whole batches only.")
    ] = 2,
    masking: Maskings = "pad,pad/24/relay",
    link: Annotated[
        str, typer.Option(help="How to emulate the link: netem or proxy; auto for the best that this machine has.")
    ] = "auto",
    effort: Effort = _FIVE_TIMES,
    json: Json = None,
) -> None:
    """Measure steps and tokens per second over a slow network, and predict them from round trips and bytes.

    The tenant's link is emulated with a bandwidth, a delay and losses: in a
    network namespace if this machine can make one, else by a proxy.
    """
    from tenant.bench.network.link import KINDS, Condition
    from tenant.bench.network.slow_network import measure_network

    if link not in (*KINDS, "auto"):
        raise ConfigError(f"--link {link!r}: choose one of auto, {', '.join(KINDS)}")
    if batch % overlap:
        raise ConfigError(f"--overlap {overlap}: choose a divisor of --batch {batch}")
    conditions = [Condition.parse(text) for text in condition.split(",")]
    with measuring() as (folder, progress):
        rows, emulated = measure_network(
            folder,
            shape,
            batch=batch,
            tokens=tokens,
            parts=overlap,
            conditions=conditions,
            maskings=[scheme(name) for name in masking.split(",")],
            kind=next((kind for kind in KINDS if kind == link), None),
            effort=effort,
            on_turn=progress,
        )
    for work in dict.fromkeys(row["work"] for row in rows):
        show([{name: row[name] for name in row if name != "difference"} for row in rows if row["work"] == work])
    console = terminal.console()
    for row in rows:
        if row["difference"] is not None:
            what = f"{row['condition']}, {row['work']}, {row['masking']}"
            console.print(f"{what}: {row['difference']}", soft_wrap=True)
    console.print(f"link: {emulated}", soft_wrap=True)
    finish("network", json, rows)


@app.command("bytes")
def moved(*, masking: Maskings = "pad,pad/24,pad/24/relay", json: Json = None) -> None:
    """Compute the bytes that a tenant moves for a token and a step of Llama-2-7B and Llama-3-8B."""
    from tenant.bench.network.moved_bytes import moved_bytes

    maskings = [scheme(name) for name in masking.split(",")]
    measure("bytes", json, lambda folder, progress: moved_bytes(maskings))


@app.command()
def provider(
    *,
    tenants: Tenants = "1+0,16+0,6+0,6+2,8+4",
    generating_rows: Annotated[
        str,
        typer.Option(
            help="Rows of generating tenants' requests, in rotation; with slashes, one mix after the other: "
            "1/2,4,8,16,32,64,128,256 for one row each, then for batches."
        ),
    ] = "1",
    training_rows: Annotated[
        str, typer.Option(help="Rows of training tenants' requests, in rotation.")
    ] = "2,16,64,256",
    adapters: Annotated[str, typer.Option(help="Ranks of the tenants' adapters, in rotation.")] = "8,64",
    policies: Policies = _POLICIES,
    ranks: Ranks = "1",
    shardings: Shardings = _SHARDINGS,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the synthetic model.")] = 1,
    seconds: Seconds = 8.0,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
    picture: Annotated[
        Path | None, typer.Option(callback=output_file, help="Also draw tokens per second and latency, as SVG.")
    ] = None,
) -> None:
    """Let many tenants send requests to one provider, with each batching policy by turns; compare all answers."""
    from tenant.bench import many_tenants

    if hidden % 8:
        raise ConfigError("--hidden: write a multiple of 8")
    mixes = [
        many_tenants.Mix(
            generating_rows=tuple(numbers(rows, "--generating-rows")),
            training_rows=tuple(numbers(training_rows, "--training-rows")),
            ranks=tuple(numbers(adapters, "--adapters")),
        )
        for rows in generating_rows.split("/")
    ]
    scenarios, variants = _scenarios(tenants), _variants(policies, ranks, shardings)
    measured = partial(
        many_tenants.measure_tenants,
        scenarios=scenarios,
        mixes=mixes,
        variants=variants,
        hidden=hidden,
        layers=layers,
        seconds=seconds,
        threads=threads,
    )
    found = measure("provider", json, lambda folder, progress: (row for row, _ in measured(folder)))
    if picture is not None:
        write_atomically(picture, many_tenants.picture(found).encode())
    refuse_wrong(found, "wrong")


@app.command()
@takes
def tasks(
    *,
    shape: Bert = _BERT_BASE,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; PEFT methods alternate.")] = 256,
    batch: Annotated[int, typer.Option(min=2, help="Rows of a mixed batch, each of another task.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of these rows.")] = 8,
    traffic: QueuedRequests = _TRAFFIC,
    effort: Effort = _EFFORT,
    json: Json = None,
) -> None:
    """Serve many tasks over one BERT: memory, mixed batches (whole and split), coordinated batching (PetS)."""
    from tenant.bench.many_tasks import measure_tasks

    measure(
        "tasks",
        json,
        lambda folder, progress: measure_tasks(
            folder,
            shape,
            tasks=tasks,
            batch=min(batch, tasks),
            tokens=tokens,
            traffic=traffic,
            effort=effort,
            on_turn=progress,
        ),
    )


@app.command()
@takes
def endpoint(
    *,
    shape: Llama = _SHAPE,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint, compared with plain transformers; a random Llama if left out.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each answer.")] = 32,
    masking: Masking = "pad",
    effort: Effort = _ONCE,
    json: Json = None,
) -> None:
    """Answer many requests together with the endpoint's engine, and one after another with `generate()`."""
    from tenant.bench.many_requests import measure_streams

    checkpoint = None if model is None else resolve(model)
    work = partial(measure_streams, streams=streams, prompt=prompt, tokens=tokens, masking=scheme(masking))
    measure(
        "endpoint", json, lambda folder, progress: work(folder, checkpoint or shape, effort=effort, on_turn=progress)
    )


@app.command()
def bits(
    *,
    tenants: Tenants = "1+0,6+2,48+16",
    policies: Policies = _POLICIES,
    ranks: Ranks = "1,2,4",
    shardings: Shardings = _SHARDINGS,
    seconds: Seconds = 1.0,
    json: Json = None,
) -> None:
    """Compare the answers of concurrent tenants with the answers of the same tenants alone, for each combination of
    policy, ranks and sharding. Status 1 if one bit differs."""
    from tenant.bench.many_tenants import compare_bits

    scenarios, variants = _scenarios(tenants), _variants(policies, ranks, shardings)
    found = measure(
        "bits",
        json,
        lambda folder, progress: compare_bits(folder, scenarios=scenarios, variants=variants, seconds=seconds),
    )
    refuse_wrong(found, "wrong", "tenants_with_other_answers_alone")


@app.command()
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

    from tenant.bench.kernels import measure_kernels

    counts, shapes = numbers(rows, "--rows"), _shapes(shape)
    torch.set_num_threads(threads)
    timed = partial(measure_kernels, row_counts=counts, repeat=repeat, weight_bits=weight_bits, device=device)
    measure(
        "kernels",
        json,
        lambda folder, progress: (row for inputs, outputs in shapes for row in timed(inputs=inputs, outputs=outputs)),
    )


@app.command()
def quality(
    *,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of an encoder; all-MiniLM-L6-v2 is downloaded if left out.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to compare on; Python's own documentation if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to compare.")] = 2048,
    ring_bits: Annotated[str, typer.Option(help="Bits of the integers on the wire, separated by commas.")] = "32,24",
    weight_bits: Annotated[str, typer.Option(help="Bits of a quantised weight, separated by commas.")] = "8,9,10",
    json: Json = None,
) -> None:
    """Compare rings and weight bits with bfloat16 on real weights: cosines to float32, rows that leave narrow rings."""
    from tenant.bench.quality import fetch, measure_quality

    rings = [bits for bits in get_args(RingBits) if bits in numbers(ring_bits, "--ring-bits")]
    if len(rings) < len(numbers(ring_bits, "--ring-bits")):
        raise ConfigError(f"--ring-bits {ring_bits}: choose from {', '.join(map(str, get_args(RingBits)))}")
    words = None if text is None else read_text(text)
    counts = numbers(weight_bits, "--weight-bits")
    measure(
        "quality",
        json,
        lambda folder, progress: measure_quality(
            fetch(folder) if model is None else model,
            text=words,
            tokens=tokens,
            rings=rings,
            weight_bits=counts,
            progress=progress,
        ),
    )


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="What --json has written.")],
    *,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables between this document's markers; else to stdout.")
    ] = None,
) -> None:
    """Turn --json files into tables, such as those of docs/benchmarks-detail.md."""
    reports = [result_file.read(file) for file in files]
    if markdown is None:
        typer.echo("\n".join(map(tables.render, reports)), nl=False)
    else:
        tables.update(markdown, reports)


def _shapes(text: str) -> list[tuple[int, int]]:
    """Parse `2048x2048,2048x11264`."""
    found = [re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", part) for part in text.split(",")]
    shapes = [(int(match[1]), int(match[2])) for match in found if match is not None]
    if len(shapes) < len(found):
        raise ConfigError(f"--shape {text!r}: write INPUTSxOUTPUTS separated by commas, like 256x256,1024x4096")
    return shapes


def _scenarios(tenants: str) -> "list[Scenario]":
    from tenant.bench.many_tenants import Scenario

    return [Scenario(generating=some, training=others) for some, others in pairs(tenants, "--tenants")]


def _variants(policies: str, ranks: str, shardings: str) -> "list[Variant]":
    """Return all combinations. A single rank does not divide products, so it is measured with one sharding."""
    from tenant.bench.many_tenants import Variant

    ways = names(shardings, _SHARDINGS.split(","), "--shardings")
    return [
        Variant(policy=policy, ranks=count, sharding=sharding)
        for policy in names(policies, _POLICIES.split(","), "--policies")
        for count in numbers(ranks, "--ranks")
        for sharding in (ways if count > 1 else ways[:1])
    ]
