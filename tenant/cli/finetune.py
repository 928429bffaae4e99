"""`tenant finetune`: fine-tunes a LoRA adapter on private data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from tenant.cli.options import Model, Remote, Text, loading, table_of, takes
from tenant.training import corpus
from tenant.training.options import FineTuning
from tenant.training.output import check_output

if TYPE_CHECKING:  # importing torch would delay --help
    from tenant.training.trainer import Progress as OnProgress


_SECONDS_PER_LINE = 10.0  # between two lines of progress without a terminal


@takes
def finetune(
    *,
    model: Model,
    remote: Remote,
    text: Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the adapter (PEFT).")] = Path("adapter"),
    options: FineTuning,
) -> None:
    """Fine-tune a LoRA adapter on private data; the frozen layers run at the providers.

    Ctrl-C, SIGTERM, a lost provider or a full disk ends training; completed steps are saved. --resume continues.
    """
    folder = resolve(model)
    check_output(output, resume=options.resume, model=folder, checkpoint=remote.checkpoint)
    corpus.check(text, model=folder)
    remote.check()
    with loading():
        from tenant.model import ledger as ledgers
        from tenant.training import finetune as finetuning

    with _notes_shown(), _training_progress() as on_progress:
        result = finetuning.finetune(
            model, text, output, remote=remote.config(), options=options, on_progress=on_progress
        )
    where = "held-out data" if result.held_out else "training data"
    table = table_of("fine-tuned", "")
    table.add_row("adapter", str(result.adapter))
    table.add_row(f"loss on {where}", f"{result.loss_before:.4f} -> {result.loss_after:.4f}")
    table.add_row("perplexity", f"{math.exp(result.loss_before):.3f} -> {math.exp(result.loss_after):.3f}")
    if result.shortened:
        table.add_row(f"cut to {options.sequence_length} tokens", f"{result.shortened:,}")
    table.add_row("steps", f"{len(result.losses):,}")
    table.add_row("tokens", f"{result.tokens:,}")
    table.add_row("tokens per second", f"{result.tokens / result.seconds:,.1f}")
    if result.ledger is not None:
        for row in ledgers.table_rows(result.ledger, tokens=result.tokens):
            table.add_row(*row)
    terminal.console().print(table)


@contextmanager
def _notes_shown() -> Iterator[None]:
    """Context manager: print the notes of an exception, which say what is saved, before the exception itself is
    printed."""
    try:
        yield
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise


@contextmanager
def _training_progress() -> Iterator[OnProgress]:
    """Context manager: show steps and loss on stderr, and what happens before and after them."""
    with ExitStack() as stage, _shown_steps() as show:
        stage.enter_context(terminal.working("loading and evaluating the model"))

        def update(done: int, total: int, loss: float) -> None:
            stage.close()
            show(done, total, loss)
            if done == total:
                stage.enter_context(terminal.working("evaluating the adapter"))

        yield update


@contextmanager
def _shown_steps() -> Iterator[OnProgress]:
    """Context manager: a bar on a terminal, else lines."""
    console = terminal.console(stderr=True)
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
    """Prints the first step, the last step, and at most one step every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + _SECONDS_PER_LINE
            typer.echo(f"step {done} of {total}, loss {loss:.4f}", err=True)
