"""Every entry of `mutations.toml` still fits one line, and names tests that exist. `tests.mutations` runs them."""

import ast
import py_compile
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, mutated, mutations, pattern, rewrite, verdict
from tests.test_documentation import TESTS
from tests.warm import run

MUTATIONS = mutations()
CORNERS = ("symbiosis_priv/", "provider/", "tenant/", "threat_model/conformance/")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_an_entry_fits_one_line_and_names_tests_that_exist(mutation: Mutation) -> None:
    path, text = mutated(mutation, ROOT)
    assert text != path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        ast.parse(text)
    assert mutation.file.startswith(CORNERS)
    assert mutation.noticed_by
    for test in mutation.noticed_by:
        file, _, name = test.partition("::")
        assert file in TESTS, test
        assert not name or name.partition("[")[0] in TESTS[file], test


def test_names_are_unique() -> None:
    assert {name for name, count in Counter(m.name for m in MUTATIONS).items() if count > 1} == set()


def test_make_quick_runs_a_test_for_every_promise_of_its_corners() -> None:
    words = (ROOT / "Makefile").read_text(encoding="utf-8").partition("QUICK :=")[2].partition("\n\ntest:")[0].split()
    run = tuple(word for word in words if word.startswith("tests/") and word != words[-1])
    folders = tuple(name.removeprefix("tests/") for name in run if not name.endswith(".py"))
    of_corners = [mutation for mutation in MUTATIONS if mutation.file.startswith(folders)]
    assert len(of_corners) > 70
    assert words[-2] == "--ignore"
    for mutation in of_corners:
        noticing = [test for test in mutation.noticed_by if test.startswith(run) and not test.startswith(words[-1])]
        assert noticing, mutation.name


def test_code_is_found_however_it_is_laid_out() -> None:
    wanted = pattern("call(first, [one, two])")
    assert wanted.search("x = call(\n    first,\n    [one, two],\n)")
    assert not wanted.search("recall(first, [one, two])")
    assert not wanted.search("call(first, [one, twofold])")


def test_a_line_that_is_gone_or_there_twice_is_named(tmp_path: Path) -> None:
    mutation = Mutation("a name", "a promise", "code.py", "x = 1", "x = 2", ("a test",))
    for text, times in (("y = 1", "no line"), ("x = 1\nx  =  1", "2 lines")):
        (tmp_path / "code.py").write_text(text)
        with pytest.raises(LookupError, match=f"mutation 'a name' fits {times} of code.py: x = 1"):
            mutated(mutation, tmp_path)


def test_no_mutation_runs_with_the_bytecode_of_another(tmp_path: Path) -> None:
    """Two of one line had one length, were written in one second, and the second was not noticed."""
    (tmp_path / "code.py").write_text("x = 1")
    stored = py_compile.compile(str(tmp_path / "code.py"))
    assert stored is not None
    rewrite(tmp_path / "code.py", b"x = 2")
    assert not Path(stored).exists()
    assert (tmp_path / "code.py").read_text() == "x = 2"


@pytest.mark.parametrize(
    ("line", "failed"),
    [("raise KeyboardInterrupt", ("test_a.py:1: KeyboardInterrupt",)), ("1 / 0", ("test_a.py::test_a",)), ("", ())],
)
def test_an_interrupt_that_ends_pytest_is_a_failure(line: str, failed: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f"def test_a(): {line or 'pass'}\n")
    words = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "test_a.py"]
    ran = run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    outcome = verdict(ran.returncode, ran.stdout, 0.0)
    assert [one.rpartition("/")[2] for one in outcome.failed] == [*failed]
    assert not outcome.no_verdict
