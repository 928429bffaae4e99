"""`tenant generate`: a prompt is continued."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import decode_text, read_text
from tenant.cli.options import Deadline, Federation, Full, Masking, Model, Seed, Status, quiet, remote_config


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
    from tenant.model import ledger as ledgers
    from tenant.model.hf import backend_of
    from tenant.training import generate as generation

    quiet()
    words = _prompt(prompt, prompt_file)
    remote = remote_config(federation, masking, deadline_s=deadline_s, checkpoint=checkpoint, status=status)
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
