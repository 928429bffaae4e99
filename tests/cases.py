"""Cases of tests that are data: a TOML file beside a test has a table or a list for each test, and an entry for
each case."""

import tomllib
from pathlib import Path
from typing import Any

import pytest


def table(test: str, name: str) -> dict[str, Any]:
    """A table of the data file of a test (`__file__`); the entries of a list are named by their numbers."""
    found: Any = tomllib.loads(Path(test).with_suffix(".toml").read_text(encoding="utf-8"))[name]
    return dict(found) if isinstance(found, dict) else {str(number): entry for number, entry in enumerate(found)}


def cases(test: str, name: str) -> pytest.MarkDecorator:
    """Run a test with each entry of a table: the entry's fields are arguments, and its name is the case's id."""
    found = table(test, name)
    fields = list(dict.fromkeys(field for entry in found.values() for field in entry))
    return pytest.mark.parametrize(fields, [[entry.get(f) for f in fields] for entry in found.values()], ids=found)
