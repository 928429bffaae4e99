"""What several commands have in common: options, checks before torch is loaded, and tables."""

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

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.model.hf import RemoteConfig

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or a name on the Hugging Face hub.")]
Federation = Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")]
Text = Annotated[
    Path,
    typer.Option(
        "--text",
        "--data",
        "-t",
        help="Plain text: documents between blank lines, or one a line. Or FILE.jsonl, whose lines all hold text, "
        "prompt and completion, or messages (a chat).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Where the base model runs, and under which masking."""

    federation: Federation
    masking: Annotated[str, typer.Option(help="pad, local, none, paper-pool, simulate: who can read your rows.")] = (
        "pad"
    )
    deadline_s: Annotated[
        float, typer.Option(help="Seconds that one request may take, a provider's restart included.")
    ] = 120.0
    checkpoint: Annotated[
        Path | None, typer.Option(help="The full checkpoint, if --model holds only your own tensors.")
    ] = None
    status: Annotated[
        Path | None,
        typer.Option(
            callback=output_file, help="Keep how each provider is doing in this file, for `federation top --status`."
        ),
    ] = None

    def check(self) -> None:
        """Look at the files, without torch.

        Raises:
            SymbiosisError: the federation file or the full checkpoint is missing or wrong.
        """
        load_federation(self.federation)
        if self.checkpoint is not None:
            resolve(self.checkpoint)

    def config(self) -> RemoteConfig:
        """The same for the model."""
        from tenant.model.hf import RemoteConfig

        return RemoteConfig(**{one.name: getattr(self, one.name) for one in fields(self)}, surface="command line")


def takes(**kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of dataclasses as options of its own.

    With `@takes(decoding=Decoding)`, every field of `Decoding` that is annotated with a `typer.Option` becomes an
    option. The command gets one `Decoding` as its argument `decoding`.
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
    """Import torch, transformers and what is built on them inside: says so, as it takes seconds.

    Afterwards only the command itself reports progress and warnings.
    """
    with terminal.working("loading torch and transformers"):
        yield
        quiet()


def quiet() -> None:
    """Turn off the progress bars and warnings of the libraries."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # peft 0.21 uses an old name
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def table_of(title: str, *columns: str) -> Table:
    """A table of figures, without rows."""
    table = Table(title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
