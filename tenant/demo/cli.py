"""The command `symbiosis-priv demo`."""

import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.system.files import default_cache, write_atomically
from symbiosis_priv.system.interrupts import Interrupts
from tenant.cli.options import Json, loading
from tenant.training import corpus
from tenant.training.options import check_installed

_DEFAULT_STEPS = 40


def demo(
    model: Annotated[str | None, typer.Option(help="A checkpoint of your own instead of the demo's.")] = None,
    text: Annotated[Path | None, typer.Option(help="Private text of your own: UTF-8, one document per line.")] = None,
    json: Json = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = _DEFAULT_STEPS,
) -> None:
    """Fine-tune and generate on untrusted providers on this machine, and check every claim about it.

    Starts two executors and a helper as separate processes, fine-tunes a LoRA adapter with every row masked and every
    answer verified, kills one of the executors meanwhile, and compares the result bit by bit with the same run without
    providers.
    """
    check_installed()
    if model is not None:
        resolve(model)
    if text is not None:
        corpus.read_documents(text)
    with loading():
        from tenant.demo.claims import show, to_json
        from tenant.demo.run import run

    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT sets it for Conv1D itself
    with Interrupts(), tempfile.TemporaryDirectory(prefix="symbiosis-priv-demo-") as folder:
        figures = run(Path(folder), cache=default_cache() / "demo", model=model, text=text, steps=steps)
    passed = show(terminal.console(), figures)
    if json is not None:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(to_json(figures))) + b"\n")
    if not passed:
        raise typer.Exit(1)
