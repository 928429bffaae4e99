"""`tenant generate`: a text after a prompt."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve, resolve_adapter
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import decode_text, read_text
from tenant.cli.options import Adapter, Model, Remote, loading, takes
from tenant.training.corpus import check_template
from tenant.training.options import Decoding


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
    words, folder = _prompt(prompt, prompt_file), resolve(model)
    if chat:
        check_template(folder, instead="leave out --chat")
    found = None if adapter is None else resolve_adapter(adapter)
    remote.check()
    with loading():
        from tenant.model import ledger as ledgers
        from tenant.model.hf import backend_of
        from tenant.training import generate as generation

    with terminal.working("loading the model"):
        loaded, tokenizer = generation.open_model(model, remote=remote.config(), adapter=found)
    with backend_of(loaded):
        if not generation.generate(loaded, tokenizer, words, chat=chat, decoding=decoding, stream=True):
            typer.echo("the model ended its text at once", err=True)
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
