"""`tenant chat`: a conversation in the terminal."""

import contextlib
import sys

import typer

from symbiosis_priv.errors import ConfigError, SymbiosisError, one_line
from symbiosis_priv.system.files import decode_text
from symbiosis_priv.system.interrupts import Interrupts
from tenant.cli.generate import opened
from tenant.cli.options import Adapter, Model, Remote, takes
from tenant.training.options import Decoding

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
    with Interrupts() as interrupts, opened(model, remote, adapter, chat=True) as (loaded, tokenizer):
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
