"""`symbiosis-priv tenant`: finetune, generate, serve, check, merge and, in this file, prepare."""

from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import DEFAULT_HINT_BITS, HintBits
from tenant.cli.check import check
from tenant.cli.finetune import finetune
from tenant.cli.generate import generate
from tenant.cli.merge import merge
from tenant.cli.options import Federation, Masking, loading
from tenant.cli.serve import serve


def prepare(
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The full checkpoint.")],
    federation: Federation,
    slim: Annotated[
        Path | None, typer.Option(help="Also write a slim checkpoint, with your own tensors only, to this folder.")
    ] = None,
    keep_experts: Annotated[
        bool,
        typer.Option(
            "--keep-experts", help="Also write the experts of a mixture to the slim checkpoint, for --experts local."
        ),
    ] = False,
    masking: Annotated[
        Masking | None, typer.Option(help="Also make what this masking keeps on disk: the hints of lwe (experimental).")
    ] = None,
    hint_bits: Annotated[HintBits, typer.Option(help="Bits of an entry of a hint.")] = DEFAULT_HINT_BITS,
    training: Annotated[bool, typer.Option("--training", help="Also make hints of backward products.")] = False,
) -> None:
    """Compute verification keys from the full checkpoint, once, and store them in the cache.

    Later runs do not need the full checkpoint. With --masking lwe, an interrupted run continues where it was.
    """
    pinned, folder = load_federation(federation), resolve(model)
    with loading():
        from symbiosis_priv.checkpoints.weights import WeightStore
        from tenant.masking.registry import session_scheme
        from tenant.model import ledger as ledgers
        from tenant.preparation.keys import prepare as prepare_model
        from tenant.preparation.own_tensors import write_slim

    store = WeightStore(folder, weight_bits=pinned.weight_bits, scope=pinned.scope)
    with terminal.progress_bar("verification keys") as progress:
        preparation = prepare_model(
            store,
            digest=pinned.model_digest,
            weight_bits=pinned.weight_bits,
            reread=True,
            progress=progress,
        )
    typer.echo(f"prepared {len(preparation.facts)} layer groups of {pinned.model_digest}")
    if masking is not None:
        with terminal.progress_bar("hints") as progress:
            size = session_scheme(masking).prepare(
                preparation, store, bits=hint_bits, training=training, progress=progress
            )
        typer.echo(f"{ledgers.size(size)} of hints in {preparation.folder}")
    if slim is not None:
        kept, left_out = write_slim(store, preparation.manifest, slim, keep_experts=keep_experts)
        typer.echo(f"{slim} holds {ledgers.size(kept)} of tensors; {ledgers.size(left_out)} stay at the providers")


app = typer.Typer(no_args_is_help=True, help="Fine-tune adapters and generate with a base model that providers serve.")
for command in (finetune, generate, serve, prepare, check, merge):
    app.command()(command)
