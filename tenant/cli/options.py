"""Options, checks and tables that several commands share. This module does not import torch."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.table import Table

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layers import RoundTrips, Scope
from symbiosis_priv.errors import ConfigError, RoleConflictError, SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_SECONDS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.system import interrupts
from symbiosis_priv.system.files import output_file

if TYPE_CHECKING:  # importing torch would delay --help
    from symbiosis_priv.network.wire import Role
    from tenant.model.hf import RemoteConfig

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or a hub name: owner/name@revision.")]
Adapter = Annotated[str | None, typer.Option("--adapter", "-a", help="A PEFT folder, or owner/name@revision.")]
Federation = Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")]
Text = Annotated[
    Path,
    typer.Option(
        "--text",
        "--data",
        "-t",
        help="Plain text: documents separated by blank lines, or one per line. Or FILE.jsonl with text, messages, "
        "prompt and completion, or prompt, chosen and rejected on every line (docs/training.md).",
    ),
]

Json = Annotated[
    Path | None, typer.Option("--json", callback=output_file, help="Also write every figure to this file.")
]

Masking = Literal["pad", "local", "lwe", "none", "paper-pool", "simulate"]
MASKING_ROLES: dict[Masking, frozenset[Role]] = {  # as the schemes declare them, which need torch to be read
    "pad": frozenset({"executor", "helper"}),
    "local": frozenset({"executor"}),
    "lwe": frozenset({"executor"}),
    "none": frozenset({"executor"}),
    "paper-pool": frozenset({"executor"}),
    "simulate": frozenset(),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The options that say how providers serve a model."""

    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS
    tied_head: Annotated[
        bool, typer.Option("--tied-head", help="The providers serve the product of a tied LM head.")
    ] = False
    no_experts: Annotated[
        bool, typer.Option("--no-experts", help="The providers do not serve the experts of a mixture.")
    ] = False
    round_trips: Annotated[
        RoundTrips, typer.Option(help="2 if the providers serve composed groups (round_trips = 2).")
    ] = 4

    @property
    def scope(self) -> Scope:
        return Scope(tied_head=self.tied_head, experts=not self.no_experts, round_trips=self.round_trips)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The options that choose providers and masking."""

    federation: Annotated[
        Path | None, typer.Option("--federation", "-f", help="federation.toml; needed unless --masking is simulate.")
    ] = None
    masking: Annotated[Masking, typer.Option(help="The masking scheme; lwe is experimental (docs/lwe.md).")] = "pad"
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline", min=0.1, max=MAX_SECONDS, help="Seconds that one request may take, with a provider's restart."
        ),
    ] = 120.0
    checkpoint: Annotated[Path | None, typer.Option(help="The full checkpoint, if --model is a slim checkpoint.")] = (
        None
    )
    experts: Annotated[
        Literal["all", "flat", "local"] | None,
        typer.Option(help="Where the experts of a mixture run (docs/experts.md)."),
    ] = None
    tied_head: Annotated[
        bool, typer.Option("--tied-head", help="Offload the product of an LM head that is tied to the embeddings.")
    ] = False

    round_trips: Annotated[
        RoundTrips | None,
        typer.Option(help="Round trips of a block while tokens are decoded. The federation's if left out."),
    ] = None

    def check(self) -> None:
        """Check what needs no torch. Raises `SymbiosisError` if a file is missing or invalid, or if the masking needs
        providers that the federation file does not list."""
        roles = MASKING_ROLES[self.masking]
        if self.federation is None:
            if roles:
                raise ConfigError(f"--masking {self.masking} needs --federation federation.toml (simulate does not)")
        elif "helper" in roles and not load_federation(self.federation).helpers:
            raise RoleConflictError(
                f"--masking {self.masking} needs a [[provider]] with role = 'helper' in {self.federation}, run by "
                f"another operator than the executor; --masking local needs none, nor does lwe (experimental: "
                f"a lattice assumption, and 6 GB here for 7 billion weights; see `tenant check --masking lwe`)"
            )
        if self.checkpoint is not None:
            resolve(self.checkpoint)

    def config(self) -> RemoteConfig:
        from tenant.model.hf import RemoteConfig

        return RemoteConfig(**{one.name: getattr(self, one.name) for one in fields(self)})


def takes(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameters of a command that are dataclasses into options: one per field with a `typer.Option`. The
    fields of the parameter's default value are the options' defaults."""
    parameters = inspect.signature(command, eval_str=True).parameters
    options = {name: _options(one) for name, one in parameters.items() if is_dataclass(one.annotation)}

    def run(**given: Any) -> None:
        for name, own in options.items():
            kind, default = parameters[name].annotation, parameters[name].default
            chosen = {option.name: given.pop(option.name) for option in own if option.name in given}
            given[name] = kind(**chosen) if default is inspect.Parameter.empty else replace(default, **chosen)
        try:
            command(**given)
        except SymbiosisError as error:  # whose message names arguments of `RemoteConfig`
            for option in itertools.chain(*options.values()):
                if f"RemoteConfig({option.name}=" in str(error):
                    typer.echo(f"RemoteConfig({option.name}=...) is {_flag(option)} here", err=True)
            raise

    shown = [option for name, one in parameters.items() for option in options.get(name, [one])]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in shown}
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # what typer reads
    return run


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    found = []
    hints = get_type_hints(parameter.annotation, include_extras=True)
    for one in fields(parameter.annotation):
        if hasattr(hints[one.name], "__metadata__"):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            default = getattr(parameter.default, one.name, default)
            default = inspect.Parameter.empty if default is MISSING else default
            found.append(
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[one.name])
            )
    return found


def _flag(option: inspect.Parameter) -> str:
    """The flag of an option: the first word of its `typer.Option`, which keeps it as a default, or its name."""
    first = option.annotation.__metadata__[0].default
    return first if isinstance(first, str) else f"--{option.name.replace('_', '-')}"


@contextmanager
def loading() -> Iterator[None]:
    """Context manager for imports of torch and transformers, which take seconds. Calls `quiet` at the end."""
    with interrupts.loading("torch and transformers"):
        yield
        quiet()


def quiet() -> None:
    """Turn off the progress bars and warnings of transformers."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # peft 0.21 uses an old name
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table with right-aligned columns."""
    table = Table(title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
