"""`tenant generate` and `tenant chat`: a text after a prompt, and a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve, resolve_adapter
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError, SymbiosisError, one_line
from symbiosis_priv.system.files import decode_text, read_text
from symbiosis_priv.system.interrupts import Interrupts
from tenant.cli.options import Adapter, Model, Remote, loading, takes
from tenant.training.corpus import check_template
from tenant.training.options import Decoding

if TYPE_CHECKING:  # importing transformers would delay --help
    from transformers import PreTrainedTokenizerBase


@takes
def generate(
    *,
    model: Model,
    remote: Remote,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The prompt. Every user of this machine can read it in the process list."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with the prompt, or - for stdin. Other users cannot read it.", allow_dash=True),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of a chat: use the adapter's or model's template.")
    ] = False,
    adapter: Adapter = None,
    decoding: Decoding,
) -> None:
    """Generate text after a prompt and print it word by word. Greedy by default; see the options of decoding."""
    words = _prompt(prompt, prompt_file)
    with opened(model, remote, adapter, without_template="leave out --chat" if chat else None) as (loaded, tokenizer):
        from tenant.training import generate as generation

        if chat:
            text = generation.Conversation(loaded, tokenizer, decoding=decoding).answer(words, stream=True)
        else:
            text = generation.generate(loaded, tokenizer, words, decoding=decoding, stream=True)
        if not text:
            typer.echo("the model ended its text at once", err=True)


@contextmanager
def opened(
    model: str, remote: Remote, adapter: str | None, *, without_template: str | None
) -> Iterator[tuple[Any, PreTrainedTokenizerBase]]:
    """Context manager: yields a split model and its tokenizer, and at the end prints the session's ledger.
    `without_template`: what to do if the model has no chat template; None if it needs none."""
    folder = resolve(model)
    if without_template is not None:
        check_template(folder, instead=without_template)
    found = None if adapter is None else resolve_adapter(adapter)
    remote.check()
    with loading():
        from tenant.model import ledger as ledgers
        from tenant.model.hf import backend_of
        from tenant.training import generate as generation

    with terminal.working("loading the model"):
        loaded, tokenizer = generation.open_model(model, remote=remote.config(), adapter=found)
    with backend_of(loaded):
        yield loaded, tokenizer
        ledger = ledgers.ledger_of(loaded)
    if ledger is not None:
        terminal.console(stderr=True).print(ledgers.summary(ledger), style="dim", soft_wrap=True)


def _prompt(given: str | None, file: Path | None) -> str:
    if given is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: leave one of them out")
    if given is None and file is None:
        raise ConfigError("pass a prompt: --prompt-file FILE (- for stdin), or --prompt, which other users can read")
    if given is not None:
        return decode_text(given.encode(errors="surrogateescape"), name="--prompt")
    if file != Path("-"):
        return read_text(Path(str(file))).removesuffix("\n")
    if sys.stdin is None:  # the shell's <&- closes it
        raise ConfigError("--prompt-file -: stdin is closed; pipe the prompt into it, or name a file")
    return decode_text(sys.stdin.buffer.read(), name="stdin").removesuffix("\n")


_CONVERSATION = Decoding(max_new_tokens=512)


@takes
def chat(*, model: Model, remote: Remote, adapter: Adapter = None, decoding: Decoding = _CONVERSATION) -> None:
    """Chat with a model, in the base model's chat template. Without a terminal, a line is a message.

    Ctrl-C stops an answer; Ctrl-C twice, or Ctrl-D, ends the chat.
    """
    if sys.stdin is None:  # the shell's <&- closes it
        raise ConfigError("stdin is closed; run this command in a terminal, or pipe messages into it")
    terminal = sys.stdin.isatty()
    with contextlib.suppress(ImportError):  # not on every system; gives input() editing and a history
        import readline  # noqa: F401
    instead = "continue a text with `symbiosis-priv tenant generate`"
    with Interrupts() as interrupts, opened(model, remote, adapter, without_template=instead) as (loaded, tokenizer):
        from tenant.training.generate import Conversation

        conversation, stopped = Conversation(loaded, tokenizer, decoding=decoding), False
        while True:
            try:
                message = _message(terminal)
            except EOFError:
                return
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                typer.echo("\nCtrl-C again, or Ctrl-D, ends the chat", err=True)
                continue
            stopped = False
            try:
                with interrupts.whole():  # the first Ctrl-C waits for the next token; a second one does not
                    answer = conversation.answer(message, stream=True, stop=interrupts.pending)
                    stopped = interrupts.pending()
                if not answer:
                    typer.echo("the model ended its answer at once", err=True)
            except KeyboardInterrupt:
                if not stopped:
                    raise
            except SymbiosisError as error:
                if not terminal:
                    raise
                typer.secho(f"error: {one_line(str(error))}", fg=typer.colors.RED, err=True)


def _message(terminal: bool) -> str:
    """Read a message; raises EOFError at the end."""
    while True:
        if terminal:
            message = input("> ")
        elif line := sys.stdin.buffer.readline():
            message = decode_text(line, name="stdin")
        else:
            raise EOFError
        if message.strip():
            return message.strip()
