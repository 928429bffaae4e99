"""`tenant generate`: a prompt is continued."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import decode_text, read_text
from tenant.cli.options import Model, Remote, loading, takes
from tenant.training.options import Decoding


@takes(remote=Remote, decoding=Decoding)
def generate(
    *,
    model: Model,
    remote: Remote,
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
    decoding: Decoding,
) -> None:
    """Continue a prompt, word by word; greedy, unless sampling or beams are asked for."""
    words = _prompt(prompt, prompt_file)
    resolve(model)
    if adapter is not None:
        vet_adapter(adapter)
    remote.check()
    with loading():
        from tenant.model import ledger as ledgers
        from tenant.model.hf import backend_of
        from tenant.training import generate as generation

    loaded, tokenizer = generation.open_model(model, remote=remote.config(), adapter=adapter)
    try:
        generation.generate(loaded, tokenizer, words, decoding=decoding, stream=True)
        ledger = ledgers.ledger_of(loaded)
    finally:
        backend_of(loaded).close()
    if ledger is not None:
        terminal.console(stderr=True).print(ledgers.one_line(ledger), style="dim", soft_wrap=True)


def _prompt(given: str | None, file: Path | None) -> str:
    if (given is None) == (file is None):
        raise ConfigError("say what to continue: --prompt-file FILE (- for stdin), or --prompt, which others can read")
    if given is not None:
        return decode_text(given.encode(errors="surrogateescape"), name="--prompt")
    if file != Path("-"):
        return read_text(Path(str(file))).removesuffix("\n")
    if sys.stdin is None:  # as after <&-
        raise ConfigError("--prompt-file -: stdin is closed; pipe the prompt into it, or name a file")
    return decode_text(sys.stdin.buffer.read(), name="stdin").removesuffix("\n")
