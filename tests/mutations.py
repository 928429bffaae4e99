"""Which promises would break unnoticed? `python -m tests.mutations` breaks each of them in a copy, and runs its tests.

Each entry of `mutations.toml` changes one line of the product so that one promise no longer holds, and names the tests
that must notice. The command copies the working tree, first runs these tests without a change, and then applies one
change at a time. It prints the test that has failed for each, and ends with an error if no test has.

    python -m tests.mutations                    every entry, in a quarter of an hour
    python -m tests.mutations wire "a pad"       entries whose name, file or tests contain one of these words

A line is found by its code, wherever it is in the file or folder: spaces, line breaks and a last comma make no
difference. `tests/test_mutations.py` fails if an entry fits no line, or more than one.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest

from tests.warm import LIBRARIES

ROOT: Final = Path(__file__).parents[1]
_TOKEN: Final = re.compile(r"\w+|\S")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_INTERRUPTED: Final = re.compile(r"^(.+:\d+: KeyboardInterrupt)$", re.MULTILINE)
_LIMIT_S: Final = 900.0


class Mutation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `mutations.toml`.

    Args:
        promise: what no longer holds after the change.
        file: where the line is: a file, or a folder of the repository.
        line: code of this line, enough to fit one place only.
        becomes: what takes its place.
        noticed_by: the tests that must notice, as pytest takes them; `-k` may be among them.
    """

    name: str
    promise: str
    file: str
    line: str
    becomes: str
    noticed_by: tuple[str, ...]


class Outcome(NamedTuple):
    """What became of a run of tests: the tests that have failed, or why there is no verdict."""

    failed: tuple[str, ...]
    no_verdict: str
    seconds: float


def mutations(path: Path = ROOT / "tests" / "mutations.toml") -> list[Mutation]:
    """All entries."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8"))["mutation"], list[Mutation])


def pattern(code: str) -> re.Pattern[str]:
    """A pattern for code that ignores spaces, line breaks and a comma before a closing bracket."""
    parts = [(r",?\s*" if token in ")]}" else "") + re.escape(token) for token in _TOKEN.findall(code)]
    ends = [r"\b" if re.match(r"\w", code.strip()[end]) else "" for end in (0, -1)]
    return re.compile(ends[0] + r"\s*".join(parts) + ends[1])


def mutated(mutation: Mutation, root: Path) -> tuple[Path, str]:
    """The file that the mutation changes, and its changed text. Raises `LookupError`: its line is not there once."""
    place = root / mutation.file
    files = sorted(place.rglob("*.*")) if place.is_dir() else [place]
    wanted, found = pattern(mutation.line), list[tuple[Path, str]]()
    for path in files:
        if path.suffix in (".py", ".c", ".h") and path.is_file():
            text = path.read_text(encoding="utf-8")
            found += [(path, text[: m.start()] + mutation.becomes + text[m.end() :]) for m in wanted.finditer(text)]
    if len(found) != 1:
        times = "no line" if not found else f"{len(found)} lines"
        raise LookupError(f"mutation {mutation.name!r} fits {times} of {mutation.file}: {mutation.line}")
    return found[0]


def copied(folder: Path) -> Path:
    """Copy the tracked and the new files of the working tree, and the compiled library."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in [*names, "symbiosis_priv/native/libring.so"]:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(root: Path, tests: Sequence[str], *, first: bool = True) -> Outcome:
    """Run tests in a copy, up to the first failure, in a fork of this process, which has imported the libraries."""
    began, limit_s = time.monotonic(), _LIMIT_S if first else 6 * _LIMIT_S
    with tempfile.TemporaryFile("w+") as said:
        run = multiprocessing.get_context("fork").Process(target=_in_fork, args=(root, tests, first, said.fileno()))
        run.start()
        run.join(limit_s)
        if run.exitcode is None:
            run.kill()
            return Outcome((), f"no verdict within {limit_s:g} s", limit_s)
        said.seek(0)
        text = said.read()
    return verdict(run.exitcode, text, time.monotonic() - began)


def verdict(status: int, said: str, seconds: float) -> Outcome:
    """What pytest's exit status and output mean. A `KeyboardInterrupt` that no test catches ends pytest: a failure."""
    found = {pytest.ExitCode.TESTS_FAILED: _FAILED, pytest.ExitCode.INTERRUPTED: _INTERRUPTED}.get(status)  # type: ignore[call-overload]
    failed = tuple(found.findall(said)) if found else ()
    why = "" if failed or not status else f"pytest ended with {status}: {said[-300:].strip()}"
    return Outcome(failed, why, seconds)


def _in_fork(root: Path, tests: Sequence[str], first: bool, said: int) -> None:
    """Run pytest on the modules of the copy: none of this tree has been imported, except those of the tests."""
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os._exit(pytest.main(["-q", "--tb=no", "-rfE", *["-x"] * first, *tests]))


def rewrite(path: Path, content: bytes) -> None:
    """Write a file, and delete its bytecode: Python would take that of another content for this one's, if both have one
    size and were written in one second."""
    path.write_bytes(content)
    Path(cache_from_source(path)).unlink(missing_ok=True)


def tried(mutation: Mutation, root: Path) -> Outcome:
    """Apply a mutation to the copy, run its tests, and undo it."""
    path, text = mutated(mutation, root)
    before, library = path.read_bytes(), root / "symbiosis_priv" / "native" / "libring.so"
    compiled = library.read_bytes() if path.suffix != ".py" and library.exists() else None
    try:
        rewrite(path, text.encode())
        if path.suffix != ".py":
            subprocess.run([sys.executable, "hatch_build.py"], cwd=root, check=True, capture_output=True)
        return run_tests(root, mutation.noticed_by)
    finally:
        rewrite(path, before)
        if compiled is not None:
            library.write_bytes(compiled)


def main() -> None:
    """Try the chosen mutations. Exits with 1 if no test notices one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only entries whose name, file or tests contain one of these")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if not options.words
        or any(w in " ".join([mutation.name, mutation.file, *mutation.noticed_by]) for w in options.words)
    ]
    try:
        for mutation in chosen:
            mutated(mutation, ROOT)  # before minutes have passed
    except LookupError as error:
        sys.exit(str(error))
    os.environ |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # as in conftest
    for library in LIBRARIES:
        if not library.startswith("provider."):
            importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        whole = run_tests(
            root, list(dict.fromkeys(test for mutation in chosen for test in mutation.noticed_by)), first=False
        )
        if whole.failed or whole.no_verdict:
            sys.exit(f"without a mutation: {' '.join(whole.failed) or whole.no_verdict}")
        print(f"without a mutation, no test fails ({whole.seconds:.0f} s)", flush=True)
        missed = 0
        for number, mutation in enumerate(chosen, 1):
            found = tried(mutation, root)
            missed += not found.failed
            verdict = found.failed[0] if found.failed else f"NOT NOTICED {found.no_verdict}"
            print(f"{number:3}/{len(chosen)}  {mutation.name}: {verdict} ({found.seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are noticed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
