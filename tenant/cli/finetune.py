"""`tenant finetune`: fine-tunes a LoRA adapter on private data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import FinishedError
from tenant.cli.options import Model, Remote, Text, loading, table_of, takes
from tenant.training import corpus
from tenant.training.options import FineTuning, check_installed
from tenant.training.output import check_output

if TYPE_CHECKING:  # importing torch would delay --help
    from tenant.training.trainer import Progress as Figures


_SECONDS_PER_LINE = 10.0  # between two lines of progress without a terminal
_BEFORE, _AFTER = "loading and evaluating the model", "evaluating the adapter"


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
    corpus.read(text, model=folder)
    remote.check()
    check_installed()
    with loading():
        from tenant.model import ledger as ledgers
        from tenant.training import finetune as finetuning

    try:
        with _training_progress() as on_progress:
            result = finetuning.finetune(
                model, text, output, remote=remote.config(), options=options, on_progress=on_progress
            )
    except FinishedError as finished:
        terminal.say(str(finished))
        return
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):  # they say what is saved
            typer.echo(note, err=True)
        raise
    where = "held-out data" if result.held_out else "training data"
    table = table_of("fine-tuned", "")
    table.add_row("adapter", str(result.adapter))
    table.add_row(f"loss on {where}", f"{result.loss_before:.4f} -> {result.loss_after:.4f}")
    if not result.preferences:
        table.add_row("perplexity", f"{math.exp(result.loss_before):.3f} -> {math.exp(result.loss_after):.3f}")
    if result.cut:
        table.add_row(f"examples cut to {options.sequence_length} tokens", f"{result.cut:,}")
    if result.left_out:
        table.add_row(f"left out: nothing to learn in {options.sequence_length} tokens", f"{result.left_out:,}")
    made = result.progress
    table.add_row("steps", f"{len(made.losses):,}")
    table.add_row("tokens", f"{made.tokens:,}")
    table.add_row("tokens per second", f"{made.tokens / made.seconds:,.1f}")
    if made.ledger is not None:
        for row in ledgers.table_rows(made.ledger, tokens=made.tokens):
            table.add_row(*row)
    terminal.console().print(table)


@contextmanager
def _training_progress() -> Iterator[Callable[[Figures], None]]:
    """Context manager: one line on stderr that shows steps, loss, speed, time left and traffic. Without a terminal, it
    is printed for the first and the last step, and at most every ten seconds in between."""
    console, due = terminal.console(stderr=True), 0.0
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with ExitStack() as stage, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(_BEFORE, total=None)
        if not console.is_terminal:
            stage.enter_context(terminal.working(_BEFORE))

        def tell(step: Figures) -> None:
            nonlocal due
            stage.close()
            last, line = step.done == step.total, _line(step)
            bar.update(task, completed=step.done, total=step.total, description=f"{line}; {_AFTER}" if last else line)
            if not console.is_terminal and (time.monotonic() >= due or last):
                due = time.monotonic() + _SECONDS_PER_LINE
                typer.echo(f"step {step.done} of {step.total}, {line}", err=True)
                if last:
                    stage.enter_context(terminal.working(_AFTER))

        yield tell


def _line(step: Figures) -> str:
    from tenant.model.ledger import size
    from tenant.session.tally import Ledger

    left = timedelta(seconds=round(step.seconds / len(step.losses) * (step.total - step.done)))
    used = step.ledger or Ledger()
    moved = used.bytes_to_executors + used.bytes_to_helpers + used.bytes_from_executors + used.bytes_from_helpers
    traffic = f", {size(moved)} sent and received" if moved else ""
    return f"loss {step.losses[-1]:.4f}, {step.tokens / step.seconds:,.0f} tokens/s, {left} left{traffic}"
