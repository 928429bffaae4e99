"""The tables beside docs/compatibility.md, and its summaries of them."""

import csv
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
Rows = list[list[str]]


def committed(name: str) -> tuple[Rows, str]:
    """The rows of a table, with the header, and the document's summary of it."""
    with _path(name).open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file)), _parts(name)[1]


def write(name: str, rows: Rows, text: str) -> None:
    with _path(name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    before, _, after = _parts(name)
    DOCUMENT.write_text(before + text + after, encoding="utf-8")


def _path(name: str) -> Path:
    return DOCUMENT.with_suffix("") / f"{name}.csv"


def _parts(name: str) -> tuple[str, str, str]:
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"<!-- {name}:begin -->\n")
    text, end, after = rest.partition(f"<!-- {name}:end -->")
    return before + begin, text, end + after
