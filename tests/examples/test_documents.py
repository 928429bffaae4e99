"""The commands, options, `make` targets and files in the documents exist."""

import csv
import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from symbiosis_priv import cli
from tenant.bench.report import ResultFile, Table, read, render

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(r"(?<![\w.-])symbiosis-priv((?: +(?:\\\n *)?[^\s`#;]+)+)")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def typed(text: str) -> list[list[str]]:
    """The words of every `symbiosis-priv ...` in code, inline or in a block; "a|b" stands for its first choice."""
    code = re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    found = [match for part in code for match in COMMAND.findall(part)]
    return [shlex.split(re.sub(r"\\\n|\|\w+", " ", words)) for words in found]


@functools.cache  # making a group takes longer than everything else here
def command_of(*words: str) -> Any:
    """The command of these words. Arguments of the command may follow its name."""
    if not words:
        return get_command(cli.app)
    command = command_of(*words[:-1])
    if not isinstance(command, TyperGroup):
        return command
    assert words[-1] in command.commands, words
    return command.resolve_command(typer.Context(command), [words[-1]])[1]


def options_of(*words: str) -> set[str]:
    shown = [parameter for parameter in command_of(*words).params if not getattr(parameter, "hidden", False)]
    return {option for parameter in shown for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def check(words: list[str]) -> None:
    command = itertools.takewhile(lambda word: not word.startswith("--"), words)
    assert {word for word in words if word.startswith("--")} <= options_of(*command), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_targets_and_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for words in typed(text):
        check(words)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= TARGETS
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    assert not re.search(r"\n\|.*\n\n+\|.*\n(?!\|[ :]*-)", text), "an empty line ends the table above"


def test_the_check_finds_commands_and_files_that_do_not_exist() -> None:
    assert ["provider", "serve", "--config", "provider.toml"] in typed((ROOT / "README.md").read_text(encoding="utf-8"))
    for wrong in (["provider", "sevre"], ["provider", "serve", "--conf"], ["demos"]):
        with pytest.raises(AssertionError):
            check(wrong)


def test_tables_of_benchmarks_are_those_of_their_files() -> None:
    """`symbiosis-priv bench report docs/benchmarks/*.json` makes them. The other files can be read, too."""
    files = sorted((ROOT / "docs/benchmarks").glob("*.json"))
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert text.endswith("\n\n" + render([read(file) for file in files]))
    assert render([read(file) for file in (ROOT / "docs/benchmarks/detail").glob("*.json")])


def shown(report: ResultFile) -> set[str]:
    """The numbers of a report's rows and goals, as its tables show them."""
    table = Table.of(report.rows)
    goals = Table.of([{"": goal.measured} for goal in report.goals] or [{}])
    return {
        cell.removesuffix(".0") for one in (table, goals) for row in (one.shared.values(), *one.rows) for cell in row
    }


def headlines() -> list[dict[str, str]]:
    with (ROOT / "docs/headlines.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("headline", headlines(), ids=lambda headline: headline["row"])
def test_a_headline_has_its_command_and_the_figures_of_its_file(headline: dict[str, str]) -> None:
    program, *words = shlex.split(headline["command"])
    if program == "python":
        assert (ROOT / words[0]).is_file()
    else:
        assert program == "symbiosis-priv"
        check(words)
    assert bool(headline["ours"]) == bool(headline["file"]) == bool(headline["machine"])
    if not headline["ours"]:
        assert "not measured" in headline["what is missed"]
        return
    report = read(ROOT / "docs/benchmarks" / headline["file"])
    assert headline["command"] == report.command
    assert (headline["date"], headline["machine"]) == (report.date[:10], report.machine.cpu)
    numbers = set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", headline["ours"]))
    assert numbers <= shown(report)
