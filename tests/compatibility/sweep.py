"""Try many families of models, split and plain: `python -m tests.compatibility.sweep [FAMILY ...]`.

The result of a class of a family is one line of JSON: the stages that the split model passes as the plain one does
(`trial.py`), or the reason why there are none. Each class runs in a process of its own with a time limit, two at a
time. Lines are written to a file at once, and the next run leaves out what is in it.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from tests.compatibility import families
from tests.warm import run

RESULTS = Path("build/sweep.jsonl")
_TIME_LIMIT_S = 120.0
_AT_ONCE = 2
_SHOWN = 500  # shown characters of an error


class Result(msgspec.Struct, kw_only=True):
    """The result of one class of one family.

    `works`: split and plain model agree. `refused`: an error of this project says that the model is not supported.
    `wrong`: the models disagree, or the split model fails in another way. `not tried`: plain transformers fails on the
    small configuration, or the time limit was reached.
    """

    family: str
    model: str
    status: Literal["works", "refused", "wrong", "not tried"] = "not tried"
    stages: str = ""
    offloaded: float = 0.0
    """Share of the parameters that providers hold."""
    stayed: list[str] = []
    """Matrices that stay with the tenant, the largest first, without the numbers of layers."""
    experts: list[str] = []
    """Modes that the experts of a mixture work in."""
    error: str = ""
    seconds: float = 0.0


def attempt(family: str, model: str) -> Result:
    """Try one class of a family in this process."""
    from symbiosis_priv.errors import SymbiosisError
    from tests.compatibility.trial import Trial

    result = Result(family=family, model=model)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trial = Trial(family, model, Path(folder))
            result.status = "wrong"
            trial.split()
            result.offloaded, result.stayed = round(trial.share(), 3), trial.stayed()
            result.stages, result.experts = trial.stages(), [*trial.modes()]
            result.status, result.error = "works", _shown(trial.note)
        except SymbiosisError as error:
            result.status, result.error = "refused", _shown(f"{type(error).__name__}: {error}")
        except Exception as error:  # of transformers and PEFT
            result.error = _shown(f"{type(error).__name__}: {error}")
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _in_a_process(family: str, model: str) -> Result:
    words = [sys.executable, "-W", "ignore", "-m", "tests.compatibility.sweep", "--here", model, family]
    try:
        with tempfile.TemporaryDirectory() as cache:
            quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "SYMBIOSIS_PRIV_CACHE": cache}
            done = run(words, capture_output=True, text=True, timeout=_TIME_LIMIT_S, env={**os.environ, **quiet})
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Result)
    except subprocess.TimeoutExpired:
        return Result(family=family, model=model, error=f"more than {_TIME_LIMIT_S:g} s")
    except (IndexError, msgspec.DecodeError):
        said = done.stderr.strip().splitlines() or ["no message"]
        return Result(family=family, model=model, status="wrong", error=f"exit status {done.returncode}: {said[-1]}")


def read(path: Path = RESULTS) -> dict[tuple[str, str], Result]:
    """The last result of every class in a file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    return {(result.family, result.model): result for result in results}


def sweep(pairs: list[tuple[str, str]], path: Path) -> None:
    """Try pairs of family and class, and append the results to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool, path.open("ab") as file:
        tries = [pool.submit(_in_a_process, *pair) for pair in pairs]
        for count, done in enumerate(as_completed(tries), 1):
            result = done.result()
            file.write(msgspec.json.encode(result) + b"\n")
            file.flush()
            outcome = result.stages or f"{result.status}: {result.error}"
            print(f"{count}/{len(pairs)} {result.family} {result.model} {result.seconds:g} s {outcome}", flush=True)


# The tables beside docs/compatibility.md, and its summaries

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
_HEADER = ["family", "kind", "stages", "offloaded", "what stays, the largest first"]
_NAMED = 3  # matrices shown in a cell


def table(results: dict[tuple[str, str], Result]) -> list[list[str]]:
    """A row for each family."""
    kinds = families.FAMILIES | dict.fromkeys(families.PUBLISHED, "Checkpoints in 8 or 4 bits")
    rows = {name: results.get((name, families.head(name)), Result(family=name, model="")) for name in kinds}
    return [_HEADER, *([name, kinds[name], *cells(rows[name])] for name in kinds)]


def summary(rows: list[list[str]]) -> str:
    working = sum(name in families.FAMILIES and set("FBH") <= set(stages) for name, _, stages, *_ in rows)
    libraries = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("transformers", "peft", "torch"))
    return f"{working} of {len(families.FAMILIES)} families work ({libraries}).\n"


def cells(result: Result) -> list[str]:
    if result.status != "works":
        return [result.status, "", result.error]
    more = len(result.stayed) - _NAMED
    stayed = ", ".join(result.stayed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    modes = f" ({', '.join(result.experts)})" if result.experts else ""
    return [result.stages + modes, f"{result.offloaded:.0%}", stayed]


def committed(name: str) -> tuple[list[list[str]], str]:
    """The rows of a table, with the header, and the document's summary of it."""
    with _path(name).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    return rows, _parts(name)[1]


def write(name: str, rows: list[list[str]], text: str) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all if none is named")
    parser.add_argument("--every-class", action="store_true", help="all classes of a family instead of one")
    parser.add_argument("--again", action="store_true", help="also classes that the file of results already has")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    parser.add_argument("--here", metavar="CLASS", help="try this class in this process, and print the result")
    parser.add_argument("--write", action="store_true", help="then write docs/compatibility/families.csv")
    options = parser.parse_args()
    names = options.families or [*families.FAMILIES, *families.PUBLISHED]
    if options.here:
        print(msgspec.json.encode(attempt(names[0], options.here)).decode())
        return
    pairs = [(n, m) for n in names for m in (families.heads(n) if options.every_class else [families.head(n)])]
    known = set() if options.again else set(read(options.results))
    sweep([pair for pair in pairs if pair not in known], options.results)
    if options.write:
        rows = table(read(options.results))
        write("families", rows, summary(rows))
        options.results.unlink()  # the next sweep begins anew


if __name__ == "__main__":
    main()
