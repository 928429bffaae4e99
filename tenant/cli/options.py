"""Options, checks and tables that several commands share. This module does not import torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.table import Table

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import output_file

if TYPE_CHECKING:  # importing torch would delay --help
    from tenant.model.hf import RemoteConfig

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or a name on the Hugging Face hub.")]
Federation = Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")]
Text = Annotated[
    Path,
    typer.Option(
        "--text",
        "--data",
        "-t",
        help="Plain text: documents separated by blank lines, or one per line. Or FILE.jsonl with text, prompt and "
        "completion, or messages (a chat) on every line.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Options that say where the base model runs and how rows are masked."""

    federation: Federation
    masking: Annotated[str, typer.Option(help="pad, local, none, paper-pool, simulate: the masking scheme.")] = "pad"
    deadline_s: Annotated[
        float, typer.Option(help="Seconds that one request may take, including a provider's restart.")
    ] = 120.0
    checkpoint: Annotated[Path | None, typer.Option(help="The full checkpoint, if --model is a slim checkpoint.")] = (
        None
    )
    status: Annotated[
        Path | None,
        typer.Option(
            callback=output_file, help="Write the state of each provider to this file, for `federation top --status`."
        ),
    ] = None

    def check(self) -> None:
        """Check the files before torch is imported.

        Raises:
            SymbiosisError: the federation file or the full checkpoint is missing or invalid.
        """
        load_federation(self.federation)
        if self.checkpoint is not None:
            resolve(self.checkpoint)

    def config(self) -> RemoteConfig:
        """Return these options as a `RemoteConfig`."""
        from tenant.model.hf import RemoteConfig

        return RemoteConfig(**{one.name: getattr(self, one.name) for one in fields(self)}, surface="command line")


def takes(**kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the fields of dataclasses into options of a command.

    With `@takes(decoding=Decoding)`, every field of `Decoding` that is annotated with a `typer.Option` becomes an
    option, and the command receives a `Decoding` as its argument `decoding`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options: dict[str, list[inspect.Parameter]] = {name: _parameters(kind) for name, kind in kinds.items()}

        def run(**given: Any) -> None:
            for name, kind in kinds.items():
                own = {option.name for option in options[name]}
                given[name] = kind(**{key: given.pop(key) for key in own & given.keys()})
            command(**given)

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options.get(parameter.name, [parameter])
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        return run

    return decorate


def _parameters(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        if hasattr(hints[one.name], "__metadata__"):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if default is MISSING:
                default = inspect.Parameter.empty
            found.append(
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[one.name])
            )
    return found


@contextmanager
def loading() -> Iterator[None]:
    """Context manager for imports of torch and transformers, which take seconds: shows that the command is loading.

    On exit, it calls `quiet`.
    """
    with terminal.working("loading torch and transformers"):
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
