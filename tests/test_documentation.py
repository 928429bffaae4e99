"""The pages name tests and files that exist. (`examples/test_documents.py` follows their links.)"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tenant
from tests.gpu import scale
from tests.gpu.chips import SHEETS

ROOT = Path(__file__).parents[1]
PACKAGES = ("symbiosis_priv", "provider", "tenant", "threat_model")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DEFINITION = re.compile(r"^def (test_\w+)", re.MULTILINE)
TESTS = {
    path.relative_to(ROOT).as_posix(): set(DEFINITION.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "tests").rglob("test_*.py")
}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_named_tests_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    everywhere = set().union(*TESTS.values())
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert path in TESTS or (ROOT / path).is_file(), path
        assert not name or name in TESTS[path], f"{path}::{name}"
    assert set(re.findall(r"`(test_\w+)`", text)) <= everywhere
    for path in re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", text):
        assert any(known.endswith(f"/{path}") or known == path for known in TESTS), path
    for path in re.findall(r"`((?:threat_model|symbiosis_priv|tenant|provider|tests|examples|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


def test_no_word_is_used_in_place_of_the_tables() -> None:
    """CONTRIBUTING's table of words names those that are not used for the same thing; identifiers are made of words."""
    rules = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]*)\|$", rules.partition("## Words")[2].partition("\n## ")[0], re.MULTILINE
    )
    words = [word for cell in table[1:] for word in cell.strip().split(", ") if word]
    assert len(table) > 20 < len(words) + 10
    joined = "|".join(re.sub(r"[ -]", "[ _-]?", word) for word in words)
    pattern = re.compile(rf"(?<![a-z])(?:{joined})s?(?![a-z])", re.IGNORECASE)
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*code, *PAGES]
        if path.name not in ("CONTRIBUTING.md", "CHANGELOG.md")
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_tables_of_scale_are_those_of_the_command() -> None:
    sheet, text = SHEETS["H100 SXM"], (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert "\n".join(scale.alone(sheet)) in text
    assert "\n".join(scale.table(sheet)) in text


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every page, and the API reference from docstrings; nothing is fetched."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "api/index.html").read_text(encoding="utf-8")
    assert all(f'id="tenant.{name}"' in reference for name in tenant.__all__)
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:css|js)', page.read_text(encoding="utf-8")), page
