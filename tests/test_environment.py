"""SECURITY.md lists all environment variables that are read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop")
FOLDERS = ("symbiosis_priv", "provider", "tenant", "threat_model")


def named(source: str) -> Iterator[str]:
    """Names of variables that a module reads: in calls and subscripts of `os.environ`, or compared with its keys."""
    if not re.search(r"\b(environ|getenv)\b", source):
        return  # parsing takes longer than searching
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            parts = node.args[:1]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            parts = [] if isinstance(node.ctx, ast.Del) else [node.slice]  # deleting a variable does not read it
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            parts = [node.left]
        for part in parts:
            yield str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part)


def test_every_variable_that_is_read_is_in_security_md() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## The environment")[2].partition("\n## ")[0]
    said = set(re.findall(r"`([A-Z][A-Z_]+)", section))
    read = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in named(path.read_text(encoding="utf-8"))
    }
    assert read, "this test shows nothing"
    assert read <= said
