"""The `symbiosis-priv` command, composed from entry points.

Each package adds its commands to the entry-point group `symbiosis_priv.commands` (see pyproject.toml), and any other
distribution can do the same. The entry point `NAME` adds a command, and `GROUP.NAME` adds a command to the group
`GROUP` of another package. The module of a command is imported when that command runs and not before, so `--help` and
`keys` answer without waiting for torch.
"""

import errno
import functools
import io
import os
import sys
import tomllib
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints, entry_points, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from symbiosis_priv.errors import ConfigError, SymbiosisError, one_line
from symbiosis_priv.system.interrupts import importing
from symbiosis_priv.system.processes import end_quickly

COMMAND_GROUP = "symbiosis_priv.commands"
DISTRIBUTION = "symbiosis-priv"

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # the system's message does not name the file

_TEXTS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
_SHORT_HELP, _EXAMPLES = _TEXTS["short_help"], _TEXTS["examples"]
_PANELS = {"bench": "Benchmarks"}
# words of other programs or releases, and this program's word for the same
_SYNONYMS = {"train": "finetune", "fine-tune": "finetune", "run": "generate", "infer": "generate", "create": "init"}
_SYNONYMS |= {"chat": "serve"}


@functools.cache  # reads a file of every installed package
def _installed() -> EntryPoints:
    return entry_points(group=COMMAND_GROUP)


class _CommandGroup(TyperGroup):
    """The commands that entry points add to one group: all are listed, and only the one about to run is imported."""

    prefix = ""  # prefix of the names of the group's entry points: "" for the root, "bench." for the group `bench`

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        mine = [entry for entry in _installed() if entry.name.startswith(self.prefix)]
        added = {entry.name: entry for entry in mine if "." not in entry.name.removeprefix(self.prefix)}
        known = [name for name in _SHORT_HELP if name in added]
        self._added: dict[str, EntryPoint] = {}
        for full_name in known + sorted(added.keys() - _SHORT_HELP.keys()):
            name, entry = full_name.removeprefix(self.prefix), added[full_name]
            if name not in self.commands:  # an entry point cannot replace a group's own command
                self._added[name] = entry
                help_text = _SHORT_HELP.get(full_name) or f"Added by {_owner(entry)}."
                self.commands[name] = TyperCommand(name, help=help_text, rich_help_panel=_PANELS.get(full_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # The base class finds the listed placeholder (or suggests a similar name); it is replaced by the real command.
        if args[0] not in self.commands and (meant := _SYNONYMS.get(args[0])) in self.commands:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        name, listed, rest = super().resolve_command(ctx, args)
        found = _load(self._added[name], name) if name in self._added else listed
        return name, _explained(found, f"{self.prefix.replace('.', ' ')}{name}"), rest


def _load(entry: EntryPoint, name: str) -> Any:
    """Imports one command. A `typer.Typer` is a group, even of a single command; a function is a command. Raises
    `ConfigError`: the module of the command, or something that it needs, is not installed."""
    try:
        with importing():
            target = entry.load()
    except ImportError as error:
        raise ConfigError(
            f"the command {entry.name!r} ({entry.value}) cannot be loaded: {error}; "
            f"reinstall {_owner(entry)} with everything it depends on"
        ) from error
    parent = typer.Typer(add_completion=False)
    if isinstance(target, typer.Typer):
        prefixed = type("_CommandGroup", (_CommandGroup,), {"prefix": f"{entry.name}."})
        parent.add_typer(target, name=name, cls=prefixed)
    else:
        parent.command(name)(target)
    return get_group(parent).commands[name]


def _explained(command: Any, words: str) -> Any:
    """Add an example to the help of a command, and leave out the type of flags, which take no value."""
    if not hasattr(command, "commands"):
        command.epilog = f"Example: symbiosis-priv {words} {_EXAMPLES.get(words, '')}"
    for option in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(option, "is_flag", False):
            option.display_type_rich = lambda ctx: None
    return command


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "another package"


app = typer.Typer(cls=_CommandGroup, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Private, verifiable fine-tuning and inference on a base model that an untrusted provider serves."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit status.

    An error of this project's tree, or a file that the system refuses, is one line on stderr and status 1. With
    SYMBIOSIS_PRIV_TRACEBACK=1 the traceback is shown too. Wrong usage is status 2, Ctrl-C is 130. Any other exception
    is a bug, and its traceback is shown. `args`: the words after the program's name; `sys.argv` by default.
    """
    # torch reads it later, when it is loaded. Threads that spin while they wait take cores from other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    end_quickly()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run of hours
    try:
        # Not `app()`: that installs typer's exception hook, which can print local variables: a tenant's data.
        _explained(get_command(app), "").main(args=args, prog_name=DISTRIBUTION)
    except SymbiosisError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is not None:
            _fail(f"cannot use {error.filename}: {error.strerror}; check the path, its permissions and the space there")
        if error.errno in _STORAGE:
            _fail(f"cannot write: {error.strerror}; make room, or write to another place")
        raise


def _fail(message: str) -> NoReturn:
    if os.environ.get("SYMBIOSIS_PRIV_TRACEBACK") == "1":
        traceback.print_exc()
    typer.secho(f"error: {one_line(message)}", fg=typer.colors.RED, err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
