"""`symbiosis-priv tenant`: finetune, generate, prepare, check."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS

if TYPE_CHECKING:  # what imports torch is imported by the commands: not for --help
    from tenant.hf import RemoteConfig
    from tenant.quality import Likeness, Quality
    from tenant.training import Progress as OnProgress

_SECONDS_PER_LINE = 10.0  # of progress, where there is no terminal

app = typer.Typer(no_args_is_help=True, help="Fine-tune adapters and generate on somebody else's base model.")

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or a name on the Hugging Face hub.")]
Federation = Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")]
Masking = Annotated[str, typer.Option(help="pad, local, none, paper-pool, simulate: who can read your rows.")]
Full = Annotated[
    Path | None, typer.Option("--checkpoint", help="The full checkpoint, if --model holds only your own tensors.")
]
Deadline = Annotated[float, typer.Option(help="Seconds that one request may take, a provider's restart included.")]
Status = Annotated[
    Path | None, typer.Option(help="Keep how each provider is doing in this file, for `federation top --status`.")
]
Text = Annotated[
    Path,
    typer.Option(
        "--text",
        "--data",
        "-t",
        help="Plain text: documents between blank lines, or one a line. Or FILE.jsonl, whose lines all hold text, "
        "prompt and completion, or messages (a chat).",
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens per block.")]
Seed = Annotated[int, typer.Option(help="Of what is random in training or sampling; never of a mask.")]


@app.command()
def finetune(
    *,
    model: Model,
    federation: Federation,
    text: Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the PEFT folder goes.")] = Path("adapter"),
    masking: Masking = "pad",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; instead of --epochs.")] = None,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over the text.")] = 1.0,
    rank: Annotated[int, typer.Option(min=1, help="Rank of LoRA.")] = 8,
    alpha: Annotated[int | None, typer.Option(min=1, help="Alpha of LoRA; twice the rank by default.")] = None,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Dropout of LoRA.")] = 0.0,
    target_modules: Annotated[
        str, typer.Option(help="Linears that get LoRA, by name: q_proj,v_proj. all-linear: all but the LM head.")
    ] = "all-linear",
    learning_rate: Annotated[float, typer.Option(min=0.0, help="AdamW's; decays linearly.")] = 2e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks per forward pass.")] = 4,
    sequence_length: Length = 256,
    gradient_accumulation: Annotated[int, typer.Option(min=1, help="Forward passes per step.")] = 1,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more round trips.")
    ] = False,
    seed: Seed = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")] = False,
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Experiment tracker: tensorboard, wandb, mlflow, ...; repeatable. Hosted ones see losses and options."
        ),
    ] = None,
    deadline_s: Deadline = 120.0,
    checkpoint: Full = None,
    status: Status = None,
) -> None:
    """Fine-tune a LoRA adapter on private data; the frozen layers run at the providers.

    Ctrl-C, SIGTERM, a lost provider and a full disk end it with what is done so far in --output; --resume goes on.
    """
    from tenant import finetune as finetuning
    from tenant import ledger as ledgers

    _quiet()
    options = finetuning.FineTuning(
        steps=steps,
        epochs=epochs,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        target_modules=target_modules,
        learning_rate=learning_rate,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        gradient_checkpointing=gradient_checkpointing,
        sequence_length=sequence_length,
        seed=seed,
        save_every=save_every,
        resume=resume,
        report_to=tuple(report_to or ()),
    )
    with _notes_shown(), _training_progress() as on_progress:
        result = finetuning.finetune(
            model,
            text,
            output,
            remote=_remote(federation, masking, deadline_s=deadline_s, checkpoint=checkpoint, status=status),
            options=options,
            on_progress=on_progress,
        )
    where = "held-out data" if result.held_out else "training data"
    table = _table("fine-tuned", "")
    table.add_row("adapter", str(result.adapter))
    table.add_row(f"loss on {where}", f"{result.loss_before:.4f} -> {result.loss_after:.4f}")
    table.add_row("perplexity", f"{math.exp(result.loss_before):.3f} -> {math.exp(result.loss_after):.3f}")
    if result.shortened:
        table.add_row(f"cut to {sequence_length} tokens", f"{result.shortened:,}")
    table.add_row("steps", f"{len(result.losses):,}")
    table.add_row("tokens", f"{result.tokens:,}")
    table.add_row("tokens per second", f"{result.tokens / result.seconds:,.1f}")
    if result.ledger is not None:
        for row in ledgers.rows(result.ledger, tokens=result.tokens):
            table.add_row(*row)
    Console().print(table)


@app.command()
def generate(
    *,
    model: Model,
    federation: Federation,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", help="What to continue. Every user of this machine can read it in the list of processes."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="What to continue: a UTF-8 file, or - for stdin; nobody else sees it.", allow_dash=True),
    ] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", "-a", help="A PEFT folder.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Upper limit of tokens.")] = 64,
    fixed_length: Annotated[
        bool, typer.Option("--fixed-length", help="Always make that many, so that providers do not see where it ends.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sample at this temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from this much probability.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam search of this width.")] = 1,
    seed: Seed = 0,
    masking: Masking = "pad",
    deadline_s: Deadline = 120.0,
    checkpoint: Full = None,
    status: Status = None,
) -> None:
    """Continue a prompt, word by word; greedy, unless sampling or beams are asked for."""
    from tenant import generate as generation
    from tenant import ledger as ledgers
    from tenant.hf import backend_of

    _quiet()
    words = _prompt(prompt, prompt_file)
    remote = _remote(federation, masking, deadline_s=deadline_s, checkpoint=checkpoint, status=status)
    loaded, tokenizer = generation.open_model(model, remote=remote, adapter=adapter)
    decoding = generation.Decoding(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        beams=beams,
        seed=seed,
        fixed_length=fixed_length,
    )
    try:
        generation.generate(loaded, tokenizer, words, decoding=decoding, stream=True)
        ledger = ledgers.ledger_of(loaded)
    finally:
        backend_of(loaded).close()
    if ledger is not None:
        Console(stderr=True).print(ledgers.one_line(ledger), style="dim", soft_wrap=True)


@app.command()
def prepare(
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The full checkpoint.")],
    federation: Federation,
    slim: Annotated[
        Path | None, typer.Option(help="Also write a checkpoint of your own tensors alone to this folder.")
    ] = None,
) -> None:
    """Read the full checkpoint once: facts and verification keys go to the cache, and it is not needed again."""
    from symbiosis_priv.checkpoint import resolve
    from symbiosis_priv.federation import load_federation
    from symbiosis_priv.weights import WeightStore
    from tenant import ledger as ledgers
    from tenant.preparation import prepare as prepare_model
    from tenant.progress import progress_bar
    from tenant.slim import write_slim
    from tenant.verifier import DEFAULT_COLUMNS

    _quiet()
    pinned = load_federation(federation)
    store = WeightStore(resolve(model), weight_bits=pinned.weight_bits)
    with progress_bar("verification keys") as progress:
        preparation = prepare_model(
            store,
            digest=pinned.model_digest,
            columns=DEFAULT_COLUMNS,
            weight_bits=pinned.weight_bits,
            reread=True,
            progress=progress,
        )
    typer.echo(f"prepared {len(preparation.facts)} layer groups of {pinned.model_digest}")
    if slim is not None:
        kept, left_out = write_slim(store, preparation.manifest, slim)
        typer.echo(f"{slim} holds {ledgers.size(kept)} of tensors; {ledgers.size(left_out)} stay at the providers")


@app.command()
def check(
    *,
    model: Model,
    text: Text,
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS,
    sequence_length: Length = 256,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of text to compare.")] = 8,
) -> None:
    """Measure here, without a provider, what the ring's arithmetic does to a model's quality.

    A model that predicts the next token is judged by its predictions, any other by its last hidden states.
    """
    import torch

    from symbiosis_priv.checkpoint import resolve
    from symbiosis_priv.discovery import architecture, load_config
    from tenant import quality
    from tenant.corpus import load_examples
    from tenant.hf import RemoteConfig, backend_of
    from tenant.loading import is_language_model, load_model, load_tokenizer
    from tenant.progress import progress_bar

    _quiet()
    kind = architecture(load_config(resolve(model)))
    causal = is_language_model(kind)
    load = partial(load_model, model, kind=kind)
    tokenizer = load_tokenizer(model)
    split = load(remote=RemoteConfig(masking="simulate", weight_bits=weight_bits), dtype=torch.float32)
    reference = load(dtype=torch.float32)
    limit = getattr(reference.config, "max_position_embeddings", sequence_length)
    examples, _ = load_examples(text, tokenizer, length=min(sequence_length, limit))
    ids = [example.input_ids for example in examples[:blocks]]
    compare: Callable[..., Any] = quality.compare if causal else quality.compare_embeddings
    table: Callable[..., Table] = _quality_table if causal else _likeness_table
    with progress_bar(f"ring, {weight_bits} bits") as progress:
        ring = compare(reference, split, ids, progress=progress)
    backend_of(split).close()
    with progress_bar("bf16") as progress:
        bf16 = compare(reference, load(dtype=torch.bfloat16), ids, progress=progress)
    Console().print(table({f"ring, {weight_bits} bits": ring, "bf16": bf16}))


def _prompt(given: str | None, file: Path | None) -> str:
    if (given is None) == (file is None):
        raise ConfigError("say what to continue: --prompt-file FILE (- for stdin), or --prompt, which others can read")
    if given is not None:
        return given
    try:
        text = sys.stdin.read() if file == Path("-") else Path(str(file)).read_text(encoding="utf-8")
        return text.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {file} is no UTF-8 text: {error}") from error


def _quiet() -> None:
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # peft 0.21 uses an old name
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _remote(
    federation: Path, masking: str, *, deadline_s: float, checkpoint: Path | None, status: Path | None
) -> RemoteConfig:
    from tenant.hf import RemoteConfig

    return RemoteConfig(
        federation=federation,
        masking=masking,
        deadline_s=deadline_s,
        checkpoint=checkpoint,
        status=status,
        surface="command line",
    )


def _quality_table(models: dict[str, Quality]) -> Table:
    first = next(iter(models.values()))
    table = _table(f"beside unquantised fp32, {first.tokens:,} tokens", *models)
    table.add_row("same first choice", *(f"{q.top1:.3%}" for q in models.values()))
    table.add_row("perplexity", *(f"{q.perplexity:.4f}" for q in models.values()))
    table.add_row("fp32's perplexity", *(f"{q.reference_perplexity:.4f}" for q in models.values()))
    table.add_row("difference", *(f"{q.perplexity_change:+.3%}" for q in models.values()))
    table.add_row("smallest cosine of logits", *(f"{q.min_cosine:.6f}" for q in models.values()))
    return table


def _likeness_table(models: dict[str, Likeness]) -> Table:
    first = next(iter(models.values()))
    table = _table(f"beside unquantised fp32, {first.tokens:,} tokens", *models)
    table.add_row("smallest cosine of hidden states", *(f"{q.min_cosine:.6f}" for q in models.values()))
    table.add_row("mean cosine of hidden states", *(f"{q.mean_cosine:.6f}" for q in models.values()))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


@contextmanager
def _notes_shown() -> Iterator[None]:
    """What an error says about what is saved comes before the error itself."""
    try:
        yield
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise


@contextmanager
def _training_progress() -> Iterator[OnProgress]:
    """Steps and loss on stderr: a bar on a terminal, now and then a line elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("fine-tuning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", visible=False)

        def update(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, total=total, description=f"loss {loss:.4f}", visible=True)

        yield update


class _Lines:
    """The first step, the last one, and at most one every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + _SECONDS_PER_LINE
            typer.echo(f"step {done} of {total}, loss {loss:.4f}", err=True)
