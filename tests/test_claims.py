"""docs/claims.csv is complete: every claim of the README and of the threat model has a row, and what it names exists.

A claim of the threat model is a phrase in bold. A claim of the README is a sentence with one of `PROMISES`.
"""

import csv
import re
import tomllib
from typing import Final

import pytest

from tests.test_documentation import ROOT, TESTS
from threat_model.attacks import ATTACKS
from threat_model.attacks.tokens import EvenMasks
from threat_model.attacks.topics import TopicsOfChats
from threat_model.conformance.properties import PROPERTIES

PROMISES: Final = re.compile(
    r"\b(never|exact|exactly|same bits|bit for bit|verified|verifies|hidden|hides|refused|cannot|sees only|at most|"
    r"without an?|stay on your|random test data|every answer|unchanged|reads? everything|do not depend|no product)\b",
    re.IGNORECASE,
)
NO_PROMISE: Final = ("[docs/comparison.md]", "The cache holds secret keys")
"""Beginnings of README sentences that have such a word and promise nothing."""


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def claims() -> dict[str, dict[str, str]]:
    """What would refute each claim of each page."""
    found: dict[str, dict[str, str]] = {}
    with (ROOT / "docs/claims.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["page"], {})[row["claim"]] = row["refuted by"]
    return found


CLAIMS: Final = claims()


_PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS: Final = {
    "symbiosis-priv": set(_PROJECT["entry-points"]["symbiosis_priv.commands"]),
    "make": set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)),
}


@pytest.mark.parametrize("page", CLAIMS)
def test_a_claim_has_the_words_of_its_page(page: str) -> None:
    text = plain((ROOT / page).read_text(encoding="utf-8"))
    assert [claim for claim in CLAIMS[page] if claim not in text] == []


@pytest.mark.parametrize(("page", "claim"), [(page, claim) for page, found in CLAIMS.items() for claim in found])
def test_what_would_refute_a_claim_exists(page: str, claim: str) -> None:
    attacks = {attack.name.removesuffix(", forward").removesuffix(", backward") for attack in ATTACKS}
    named = {
        "attack": attacks | {EvenMasks.name, TopicsOfChats.name},
        "property": {each.name for each in PROPERTIES},
    }
    refuted_by = CLAIMS[page][claim]
    left = refuted_by
    for kind, name in re.findall(r"(attack|property) \*(.+?)\*", refuted_by):
        assert name in named[kind], name
        left = left.replace(f"{kind} *{name}*", "")
    for command in re.findall(r"`(.+?)`", refuted_by):
        left = left.replace(f"`{command}`", "")
        if command.startswith("tests/"):
            file, _, test = command.partition("::")
            assert file in TESTS, file
            assert not test or test in TESTS[file], command
        else:
            program, name, *_ = command.split()
            assert name in COMMANDS[program], command
    assert set(left) <= set(", ")
    assert left != refuted_by


def test_every_claim_of_the_threat_model_has_a_row() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    bold = {plain(phrase) for phrase in re.findall(r"\*\*(.+?)\*\*", text, re.DOTALL)}
    assert bold - CLAIMS["docs/threat-model.md"].keys() == set()


def test_every_claim_of_the_readme_has_a_row() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|^\|.*?$|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL | re.MULTILINE)
    sentences = [
        plain(sentence)
        for paragraph in re.split(r"\n\s*\n|\n(?=\* |\d+\. )", text)
        for sentence in re.split(r"(?<=[.:!?])\s+(?=[A-Z`\[*])", paragraph)
        if PROMISES.search(sentence) and not sentence.startswith(NO_PROMISE)
    ]
    known = CLAIMS["README.md"]
    missing = [s for s in sentences if not any(claim in s or s.rstrip(".") in claim for claim in known)]
    assert missing == []
