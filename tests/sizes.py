"""How large the house is: `python -m tests.sizes` prints files, lines and helpers of each package, and the numbers of
options, keys and words of documents.

With `--way`, it also prints one row's way at the tenant and at the provider (`tests.way`).

A helper is a function or method whose name begins with one underscore. It is used once if its name occurs once in its
module, its definition aside. Code lines are lines with a token that is neither a comment nor a docstring.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Size:
    """What one folder holds; `once` is the number of private helpers that are used once."""

    files: int
    lines: int
    code: int
    median: float
    functions: int
    once: int


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method in a tree, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(text: str, tree: ast.AST) -> int:
    """Lines with code: neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def helpers_used_once(text: str, tree: ast.AST) -> list[str]:
    """The private helpers of one module that it names once, the definition aside."""
    uses = Counter(re.findall(r"\w+", text))
    names = [node.name for node in functions(tree)]
    return [name for name in names if re.match(r"_(?!_)", name) and uses[name] == 2]


def measure(folder: Path) -> Size:
    """The size of one folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    once = [name for text, tree in zip(texts, trees, strict=True) for name in helpers_used_once(text, tree)]
    lengths = [text.count("\n") for text in texts]
    code = sum(code_lines(text, tree) for text, tree in zip(texts, trees, strict=True))
    count = sum(1 for tree in trees for _ in functions(tree))
    return Size(len(texts), sum(lengths), code, median(lengths), count, len(once))


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
    total: list[Size] = []
    print(f"{'':15} {'files':>6} {'lines':>7} {'code':>7} {'median':>7} {'functions':>10} {'used once':>10}")
    for package in (*PACKAGES, "tests"):
        size = measure(ROOT / package)
        if package != "tests":
            total.append(size)
        _print(package, size)
    lengths = [p.read_text(encoding="utf-8").count("\n") for name in PACKAGES for p in (ROOT / name).rglob("*.py")]
    files, lines, code, count, once = (
        sum(getattr(size, name) for size in total) for name in ("files", "lines", "code", "functions", "once")
    )
    _print("product", Size(files, lines, code, median(lengths), count, once))
    for name, count in choices().items():
        print(f"{name:30} {count:8,}")
    if "--way" in sys.argv:
        from tests.way import ways  # imports torch

        for side, way in zip(("tenant", "provider"), ways(), strict=True):
            print(f"\na row's way at the {side}: {len(way.files)} files, {way.changes} changes of file, ", end="")
            print(f"{way.own} calls of our functions, {way.other} of others", *way.files, sep="\n  ")


def _print(name: str, size: Size) -> None:
    share = f"{size.once} ({size.once / max(1, size.functions):.0%})"
    print(f"{name:15} {size.files:6} {size.lines:7,} {size.code:7,} {size.median:7.0f} {size.functions:10} {share:>10}")


if __name__ == "__main__":
    main()
