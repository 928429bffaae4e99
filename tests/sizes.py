"""How large the house is: `python -m tests.sizes` prints files and lines of each package, and the numbers of options,
keys and words of documents. With `--way`, it also prints one row's way at the tenant and at the provider (`tests.way`).
"""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import typer
from msgspec import inspect
from typer.main import get_command

from provider.config.schema import ProviderConfig
from symbiosis_priv import cli
from symbiosis_priv.federation.federation import FederationFile

ROOT = Path(__file__).parents[1]
PACKAGES = ("symbiosis_priv", "provider", "tenant", "threat_model")


def options() -> list[tuple[str, str]]:
    """The words and the help of every option of every command. An option that several commands share is listed for each
    of them; its words and help are the same."""
    found: list[tuple[str, str]] = []

    def walk(command: Any) -> None:
        context = typer.Context(command)
        shown = [option for option in command.params if option.param_type_name == "option"]
        found.extend((" ".join(option.opts), str(option.help)) for option in shown)
        for name in getattr(command, "commands", {}):
            walk(command.resolve_command(context, [name])[1])  # imports the command's module

    walk(get_command(cli.app))
    return found


def keys(file: type[msgspec.Struct]) -> set[str]:
    """The keys of a TOML file. Those of a table that may occur several times count once."""
    found: set[str] = set()

    def walk(kind: inspect.Type, name: str) -> None:
        if isinstance(kind, inspect.StructType):
            for field in kind.fields:
                walk(field.type, f"{kind.cls.__name__}.{field.encode_name}")
        elif isinstance(kind, inspect.UnionType):
            for one in kind.types:
                walk(one, name)
        elif isinstance(kind, inspect.DictType):
            walk(kind.value_type, name)
        elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
            walk(kind.item_type, name)
        elif not isinstance(kind, inspect.NoneType):
            found.add(name)

    walk(inspect.type_info(file), "")
    return found


def choices() -> dict[str, int]:
    """How much a reader has to choose from and to read."""
    every = options()
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    documents = [*(ROOT / name for name in names), *(ROOT / "docs").glob("*.md")]
    return {
        "options of all commands": len(every),
        "different options": len(set(every)),
        "keys of provider.toml": len(keys(ProviderConfig)),
        "keys of federation.toml": len(keys(FederationFile)),
        "words, the changelog aside": sum(len(path.read_text(encoding="utf-8").split()) for path in documents),
    }


def main() -> None:
    """Print a table: a line for each package, for the product, and for the tests."""
    print(f"{'':15} {'files':>6} {'lines':>7} {'median':>7}")
    for name, packages in {**{one: (one,) for one in (*PACKAGES, "tests")}, "product": PACKAGES}.items():
        files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
        lines = [path.read_text(encoding="utf-8").count("\n") for path in files]
        print(f"{name:15} {len(files):6} {sum(lines):7,} {median(lines):7.0f}")
    for name, count in choices().items():
        print(f"{name:30} {count:8,}")
    if "--way" in sys.argv:
        from tests.way import ways  # imports torch

        for side, way in zip(("tenant", "provider"), ways(), strict=True):
            print(f"\na row's way at the {side}: {len(way.files)} files, {way.changes} changes of file, ", end="")
            print(f"{way.own} calls of our functions, {way.other} of others", *way.files, sep="\n  ")


if __name__ == "__main__":
    main()
