"""`tenant check`: what a split model keeps, what it sends, and how the ring's arithmetic changes its output."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layers import RoundTrips, Scope
from symbiosis_priv.checkpoints.vetting import form_of, read_json
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.limits import (
    DEFAULT_HINT_BITS,
    DEFAULT_RING_BITS,
    DEFAULT_WEIGHT_BITS,
    MAX_WEIGHT_BITS,
    MIN_WEIGHT_BITS,
    HintBits,
    RingBits,
)
from symbiosis_priv.system.files import default_cache
from symbiosis_priv.system.machine import look
from tenant.cli.options import Masking, loading, table_of
from tenant.training import corpus
from tenant.training.options import Length, check_installed


def check(
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Checkpoint folder, or a hub name: owner/name@revision.")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Show what of a tenant other programs and users of this machine may see.")
    ] = False,
    text: Annotated[Path | None, typer.Option("--text", "--data", "-t", help="Text to measure the quality on.")] = None,
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS,
    tied_head: Annotated[
        bool, typer.Option("--tied-head", help="Offload the product of an LM head that is tied to the embeddings.")
    ] = False,
    round_trips: Annotated[
        RoundTrips, typer.Option(help="2 also shows two round trips per block (round_trips = 2), and their quality.")
    ] = 4,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", "-f", help="federation.toml, for the traffic of its ring and round trips."),
    ] = None,
    masking: Annotated[
        Masking | None, typer.Option(help="Also show what this masking costs here: lwe (experimental).")
    ] = None,
    hint_bits: Annotated[
        HintBits, typer.Option(help="With --masking lwe: bits of an entry of a hint.")
    ] = DEFAULT_HINT_BITS,
    sequence_length: Length = 256,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of text to compare.")] = 8,
    show: Annotated[
        int | None,
        typer.Option(min=1, help="Print this many examples of --data, with what is learned; measure nothing."),
    ] = None,
) -> None:
    """Show on this machine, without a provider, what a split model keeps and sends, and how good its output is.

    With --text, the command measures how the ring's arithmetic changes the output: predictions if the model predicts
    the next token, else the last hidden states. Without it, it reads no weights.
    """
    if machine:
        _show_machine()
        if model is None:
            return
    if model is None:
        raise ConfigError("name the checkpoint to check with --model, or use --machine to check this machine")
    folder = resolve(model)
    pinned = None if federation is None else load_federation(federation)
    if show is not None and text is None:
        raise ConfigError("--show needs --data: name the file whose examples to show")
    data = None if text is None else corpus.read(text, model=folder)
    if data is not None and data.form != "text":
        check_installed()
    with loading():
        import torch

        from symbiosis_priv.checkpoints.discovery.skeleton import architecture, load_config
        from tenant.masking.registry import session_scheme
        from tenant.model.hf import RemoteConfig, backend_of
        from tenant.model.loading import (
            check_reads_text,
            check_runs_on_text,
            is_language_model,
            load_model,
            load_tokenizer,
        )
        from tenant.options import MOST_ROWS
        from tenant.training import quantisation_error
        from tenant.training.examples import make_examples, rows_of

    if data is not None and show is not None:
        _show_examples(data, load_tokenizer(model), length=sequence_length, count=show)
        return
    if pinned is not None and pinned.scope.round_trips == 2:
        round_trips = 2
    terminal.console().print(_division_table(folder, tied_head=tied_head, round_trips=round_trips, federation=pinned))
    if masking is not None and session_scheme(masking).keeps_hints:
        bits = weight_bits if pinned is None else pinned.weight_bits
        scope = Scope(tied_head=tied_head, round_trips=round_trips)
        _show_hints(folder, scope, bits=hint_bits, weight_bits=bits)
    if data is None:
        return
    kind = architecture(load_config(folder))
    check_reads_text(kind)
    load = partial(load_model, model, kind=kind, dtype=torch.float32)
    simulate = partial(RemoteConfig, masking="simulate", weight_bits=weight_bits, tied_head=tied_head)
    tokenizer = load_tokenizer(model)
    predicts = is_language_model(kind)
    compare: Callable[..., Any] = quantisation_error.compare if predicts else quantisation_error.compare_hidden_states
    rings: list[tuple[str, RingBits]] = [(f"ring, {weight_bits} bits", DEFAULT_RING_BITS), ("ring_bits = 24", 24)]
    remotes = {label: simulate(ring_bits=ring_bits) for label, ring_bits in rings}
    if round_trips == 2 and predicts:
        remotes[_TWO] = simulate(round_trips=2)
    splits = {label: load(remote=remote) for label, remote in remotes.items()}
    reference = load()
    limit = corpus.context_of(reference.config) or sequence_length
    examples = make_examples(data, tokenizer, length=min(sequence_length, limit))
    measured = [row.input_ids for row in rows_of(examples.found)[:blocks]]
    check_runs_on_text(reference, measured[0])
    models: dict[str, Any] = {}
    for label, split in splits.items():
        with backend_of(split), terminal.progress_bar(label) as progress:
            passes = {"most": MOST_ROWS} if label == _TWO else {}
            models[label] = compare(reference, split, measured, progress=progress, **passes)
    with terminal.progress_bar("bf16") as progress:
        models["bf16"] = compare(reference, load(dtype=torch.bfloat16), measured, progress=progress)
    first = models["bf16"]
    compared = f"{first.tokens:,} tokens" if predicts else f"{first.vectors:,} vectors"
    table = table_of(f"compared with unquantised fp32, {compared}", *models)
    for label, (name, form) in (_OF_PREDICTIONS if predicts else _OF_HIDDEN_STATES).items():
        table.add_row(label, *(format(getattr(one, name), form) for one in models.values()))
    terminal.console().print(table)
    _show_rounding(folder, Scope(tied_head=tied_head), weight_bits=weight_bits)


def _show_machine() -> None:
    """Show what is open on this machine, and what to do about it."""
    found = list(look(default_cache()))
    table = table_of("this machine", "found", "open: what to do")
    for finding in found:
        table.add_row(*map(Text, finding))
    terminal.console().print(table)
    terminal.say(f"{sum(bool(finding.advice) for finding in found)} of {len(found)} are open")


def _show_examples(data: corpus.Corpus, tokenizer: Any, *, length: int, count: int) -> None:
    """Print examples as the model reads them. What it learns stands between [[ and ]], and is bold in a terminal."""
    from tenant.training.examples import learned_parts, make_examples, rows_of

    examples = make_examples(data, tokenizer, length=length)
    names = (" chosen", " rejected") if data.form == "preferences" else ("",)
    for at, row in enumerate(rows_of(examples.found[:count])):
        terminal.say(f"--- example {at // len(names) + 1}{names[at % len(names)]}, learned between [[ and ]]")
        parts = ((f"[[{text}]]", "bold") if learned else text for text, learned in learned_parts(row, tokenizer))
        terminal.console().print(Text.assemble(*parts), soft_wrap=True)
    terminal.say(f"{len(examples.found)} examples; {examples.cut} cut to {length} tokens, {examples.left_out} left out")


def _show_rounding(folder: Path, scope: Scope, *, weight_bits: int) -> None:
    """Say what rounding to the ring's weights adds, if the checkpoint is stored in a quantised form."""
    from symbiosis_priv.checkpoints.weights import WeightStore
    from tenant.training.quantisation_error import rounding

    if (form := form_of(folder / "config.json", read_json(folder / "config.json"))) is not None:
        store = WeightStore(folder, weight_bits=weight_bits, scope=scope)
        change, unchanged = rounding(store)
        terminal.say(
            f"Stored as {form.method}, and read without rounding. Rounding to {weight_bits} bits changes the "
            f"offloaded weights by {change:.3%} (norm of the difference over norm of the weights), and {unchanged} of "
            f"{len(store.manifest().groups)} layer groups not at all."
        )


_TWO = "round_trips = 2"
_PLACES = (("1 Gbit/s, a GPU", 1e9, 1e12), ("1 Gbit/s, a CPU", 1e9, 2e10), ("100 Mbit/s, a CPU", 1e8, 2e10))
"""Bits per second of a network, and multiply-adds per second of an executor with one row: those of its memory."""


def _division_table(folder: Path, *, tied_head: bool, round_trips: RoundTrips, federation: Federation | None) -> Table:
    from symbiosis_priv.checkpoints.discovery.skeleton import build, discover, load_config
    from symbiosis_priv.checkpoints.layers import GroupSpec
    from symbiosis_priv.checkpoints.manifest import GroupEntry, price_of_composing
    from tenant.model.division import division
    from tenant.session.traffic import DIRECT, PredictedTraffic, Transport, of_token

    transport = DIRECT if federation is None else Transport(ring_bits=federation.ring_bits)
    table = table_of("if all layers are offloaded", "parameters", "share")

    def add_traffic(what: str, groups: Iterable[GroupSpec], transport: Transport = transport) -> PredictedTraffic:
        found = of_token([GroupEntry(digest="", **vars(group)) for group in groups], transport)
        if what == "a token":
            table.add_row("round trips of a token", f"{found.turns:,}", "")
        table.add_row(f"sent and received for {what}", f"{(found.up + found.down) / 1e6:,.3f} MB", "")
        table.add_row("effects from each helper (pad)", f"{found.effects / 1e6:,.3f} MB", "")
        return found

    groups = discover(folder, Scope(tied_head=tied_head)).groups
    divided = division(build(load_config(folder)), {member for group in groups for member in group.members})
    table.add_row("at providers", f"{divided.offloaded:,}", f"{divided.share:.1%}")
    for kind, count in divided.kept.items():
        table.add_row(f"here: {kind}", f"{count:,}", f"{count / divided.parameters:.1%}")
    table.add_row("memory here, in float32", f"{sum(divided.kept.values()) * 4 / 2**20:,.1f} MiB", "")
    token = add_traffic("a token", groups)
    if round_trips == 2:
        composed = discover(folder, Scope(tied_head=tied_head, round_trips=2)).groups
        memory, work = price_of_composing([GroupEntry(digest="", **vars(group)) for group in composed])
        table.add_section()
        table.add_row("with two round trips per block", "", "")
        two = add_traffic("a token", composed, replace(transport, round_trips=2))
        table.add_row("weights that a provider holds", f"x{memory:.2f}", "")
        table.add_row("multiply-adds of a token", f"x{work:.2f}", "")
        extra = two.up + two.down + two.effects - token.up - token.down - token.effects
        added = (work - 1) * sum(group.inputs * sum(group.outputs) for group in groups)
        for name, bits, rate in _PLACES:
            pays_ms = 1e3 * (8 * extra / bits + added / rate) / (token.turns - two.turns)
            table.add_row(f"pays from a round trip of ({name})", f"{pays_ms:.2g} ms", "")
    with_head = discover(folder, Scope(tied_head=True))
    for head in (group for group in with_head.groups if f"{group.members[0]}.weight" in with_head.tied):
        table.add_section()
        table.add_row("the tied LM head, at providers" if tied_head else "the LM head, with --tied-head", "", "")
        add_traffic("a row of logits", [head])
        table.add_row("multiply-adds for a row of logits", f"{head.inputs * sum(head.outputs):,}", "")
    return table


def _show_hints(folder: Path, scope: Scope, *, bits: HintBits, weight_bits: int) -> None:
    """Show what hints cost, before any is made, and say if they do not pay."""
    from symbiosis_priv.checkpoints.discovery.skeleton import discover
    from tenant.preparation.hints import forecast, seconds_to_make

    groups = discover(folder, scope).groups
    inference, training = (forecast(groups, bits=bits, weight_bits=weight_bits, training=t) for t in (False, True))
    minutes = seconds_to_make(inference) / 60
    ordinary = [group for group in groups if group.composed is None and group.experts == 1]
    weights = sum(group.inputs * sum(group.outputs) for group in ordinary) / 2
    table = table_of(f"masking = lwe (experimental), hints of {bits} bits", "inference", "training")
    table.add_row(
        "hints, on disk and in memory",
        f"{inference.forward / 1e9:,.2f} GB",
        f"{(training.forward + training.backward) / 1e9:,.2f} GB",
    )
    table.add_row("matrix P, in memory", f"{inference.uniform / 1e9:,.2f} GB", f"{training.uniform / 1e9:,.2f} GB")
    table.add_row("time to make hints, about", f"{minutes:,.1f} min", f"{2 * minutes:,.1f} min")
    table.add_row("additions here for a token", f"{inference.additions:,}", f"{2 * inference.additions:,}")
    share = f"{inference.additions / inference.products:.2%}"
    table.add_row("over the layers' multiplications", share, share)
    table.add_row("expected error of a product (bfloat16: 2.9e-03)", f"{inference.error:.1e}", f"{training.error:.1e}")
    table.add_row("the layers' weights in 4 bits", f"{weights / 1e9:,.2f} GB", f"{weights / 1e9:,.2f} GB")
    terminal.console().print(table)
    terminal.say(
        (
            "lwe can pay here: the layers' weights take more memory than the hints."
            if inference.forward + inference.uniform < weights
            else "lwe does not pay here: this machine could hold the layers themselves in 4 bits and run them, in less "
            "memory than the hints take."
        )
        + " With a helper of another operator, --masking pad is exact, and takes no hints."
    )


_OF_PREDICTIONS = {
    "same first choice": ("top1", ".3%"),
    "perplexity": ("perplexity", ".4f"),
    "fp32's perplexity": ("reference_perplexity", ".4f"),
    "difference": ("perplexity_change", "+.3%"),
    "divergence (KL) from fp32": ("kl", ".2e"),
    "smallest cosine of logits": ("min_cosine", ".6f"),
}
_OF_HIDDEN_STATES = {
    "smallest cosine of hidden states": ("min_cosine", ".6f"),
    "mean cosine of hidden states": ("mean_cosine", ".6f"),
}
"""Labels of figures of `Quality` and `Similarity`, with attribute and format."""
