"""`tenant check`: measures how the ring's arithmetic changes a model's output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from tenant.cli.options import Model, Text, loading, table_of
from tenant.training import corpus
from tenant.training.options import Length

if TYPE_CHECKING:  # importing torch would delay --help
    from tenant.training.quality import Likeness, Quality


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
    """Measure on this machine, without a provider, how the ring's arithmetic changes a model's output.

    The command compares predictions if the model predicts the next token, else the last hidden states.
    """
    folder = resolve(model)
    corpus.read(text)
    with loading():
        import torch

        from symbiosis_priv.checkpoints.discovery.architecture import architecture, load_config
        from tenant.model.hf import RemoteConfig, backend_of
        from tenant.model.loading import (
            check_reads_text,
            check_runs_on_text,
            is_language_model,
            load_model,
            load_tokenizer,
        )
        from tenant.training import quality

    kind = architecture(load_config(folder))
    causal = is_language_model(kind)
    check_reads_text(kind)
    load = partial(load_model, model, kind=kind)
    tokenizer = load_tokenizer(model)
    split = load(remote=RemoteConfig(masking="simulate", weight_bits=weight_bits), dtype=torch.float32)
    reference = load(dtype=torch.float32)
    limit = getattr(reference.config.get_text_config(), "max_position_embeddings", sequence_length)
    examples, _ = corpus.load_examples(text, tokenizer, length=min(sequence_length, limit))
    ids = [example.input_ids for example in examples[:blocks]]
    check_runs_on_text(reference, ids[0])
    compare: Callable[..., Any] = quality.compare if causal else quality.compare_embeddings
    table: Callable[..., Table] = _quality_table if causal else _likeness_table
    with terminal.progress_bar(f"ring, {weight_bits} bits") as progress:
        ring = compare(reference, split, ids, progress=progress)
    backend_of(split).close()
    with terminal.progress_bar("bf16") as progress:
        bf16 = compare(reference, load(dtype=torch.bfloat16), ids, progress=progress)
    terminal.console().print(table({f"ring, {weight_bits} bits": ring, "bf16": bf16}))


def _quality_table(models: dict[str, Quality]) -> Table:
    first = next(iter(models.values()))
    table = table_of(f"beside unquantised fp32, {first.tokens:,} tokens", *models)
    table.add_row("same first choice", *(f"{q.top1:.3%}" for q in models.values()))
    table.add_row("perplexity", *(f"{q.perplexity:.4f}" for q in models.values()))
    table.add_row("fp32's perplexity", *(f"{q.reference_perplexity:.4f}" for q in models.values()))
    table.add_row("difference", *(f"{q.perplexity_change:+.3%}" for q in models.values()))
    table.add_row("smallest cosine of logits", *(f"{q.min_cosine:.6f}" for q in models.values()))
    return table


def _likeness_table(models: dict[str, Likeness]) -> Table:
    first = next(iter(models.values()))
    table = table_of(f"beside unquantised fp32, {first.tokens:,} tokens", *models)
    table.add_row("smallest cosine of hidden states", *(f"{q.min_cosine:.6f}" for q in models.values()))
    table.add_row("mean cosine of hidden states", *(f"{q.mean_cosine:.6f}" for q in models.values()))
    return table
