"""`make gpu`, or `python -m tests.gpu`: all measurements and tests that need a GPU, in eight minutes at most.

Each section (`sections`) is a process with a time limit. If a section fails, hangs or breaks its CUDA context, its
error is shown and the next section runs. The report holds the rows of every section, including sections that ended
early. This module needs the standard library only. Neither a .venv nor an installation is needed: the packages of this
repository run from here, and wheels in `.gpu` are used where the machine lacks their packages. Where a package is still
missing, `machine` says how to fill `.gpu`, and no other section runs.
"""

import argparse
import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BUDGETS_S: Final = {
    "machine": 40,
    "kernels": 80,
    "products": 70,
    "transfers": 20,
    "provider": 50,
    "nccl": 30,
    "tests": 50,
    "llama-1b": 80,
    "llama-8b": 60,
}
"""Seconds of each section: eight minutes in total. A section may also use time that earlier sections have left. What
nothing else can show comes first."""
_ERROR_LINES = 60


@dataclass
class Outcome:
    """The result of a section.

    Args:
        status: "ok", "failed" or "out of time".
        error: the end of its stderr, unless it is ok.
        rows: named figures, as in `tenant.bench.report`.
    """

    section: str
    status: str
    seconds: float
    error: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def run(section: str, command: list[str], *, budget_s: float, environment: dict[str, str]) -> Outcome:
    """Run the command of one section in a separate process group, which is killed at the end."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as log:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "start_new_session": True}
        environment = {**environment, "PYTHONFAULTHANDLER": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
            try:
                printed, _ = process.communicate(timeout=budget_s)
                status = "failed" if process.returncode else "ok"
            except subprocess.TimeoutExpired as late:
                printed, status = late.output or b"", "out of time"
                os.killpg(process.pid, signal.SIGABRT)  # its processes print where they are
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                _kill_group(process)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    rows = [json.loads(line) for line in printed.splitlines(keepends=True) if line.endswith(b"\n")]
    error = "" if status == "ok" else "\n".join(lines[-_ERROR_LINES:])
    return Outcome(section, status, round(time.monotonic() - begun, 1), error, rows)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a section and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(folder: Path, *, cpu: bool) -> dict[str, str]:
    """The environment of a section: this repository first, and its commands as entry points, as after an installation;
    then the wheels of `.gpu`, before what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "symbiosis_priv-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: symbiosis-priv\nVersion: 0\n", encoding="utf-8")
    entries = "".join(
        f"{name} = {target}\n" for name, target in project["entry-points"]["symbiosis_priv.commands"].items()
    )
    (info / "entry_points.txt").write_text(f"[symbiosis_priv.commands]\n{entries}", encoding="utf-8")
    for wheel in (ROOT / ".gpu").glob("*.whl"):
        with zipfile.ZipFile(wheel) as packages:
            packages.extractall(folder)
    path = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    plain = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **plain, "TRITON_INTERPRET": str(int(cpu))}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections. Returns status 1 if one of them is not ok."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--cpu", action="store_true", help="small shapes without a GPU, to try this command")
    parser.add_argument("--only", default=",".join(BUDGETS_S), help="sections, separated by commas")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the report")
    chosen = parser.parse_args(arguments)
    sections = chosen.only.split(",")
    if unknown := set(sections) - set(BUDGETS_S):
        parser.error(f"--only: there is no section {', '.join(sorted(unknown))}; choose from {', '.join(BUDGETS_S)}")
    options = ["--cpu"] if chosen.cpu else []
    outcomes: list[Outcome] = []
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # `SIGABRT` would write page-locked memory to the disk
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        environment = _environment(Path(folder), cpu=chosen.cpu)
        if not list((ROOT / "symbiosis_priv/native").glob("*.so")):
            subprocess.run([sys.executable, str(ROOT / "hatch_build.py")], check=False, timeout=60)
        until = time.monotonic() + sum(BUDGETS_S.values())
        for index, section in enumerate(sections):
            budget_s = until - time.monotonic() - sum(BUDGETS_S[later] for later in sections[index + 1 :])
            command = [sys.executable, "-m", "tests.gpu.sections", section, *options]
            outcome = run(section, command, budget_s=budget_s, environment=environment)
            outcomes.append(outcome)
            print(f"== {section}: {outcome.status}, {outcome.seconds} s", *outcome.rows, sep="\n   ", flush=True)
            if outcome.error:
                print("   " + outcome.error.replace("\n", "\n   "), flush=True)
            report = {
                "schema": 1,
                "benchmark": "gpu",
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": shlex.join(
                    ["python", "-m", "tests.gpu", *(sys.argv[1:] if arguments is None else arguments)]
                ),
                "sections": [asdict(outcome) for outcome in outcomes],
            }
            # the report exists even if this process is killed later
            chosen.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            if any(row.get("here") is False for row in outcome.rows):
                break
        else:
            print("== by data sheet, and measured", flush=True)
            table = [sys.executable, "-m", "tests.gpu.chips", str(chosen.json.absolute())]
            subprocess.run(table, cwd=ROOT, env=environment, check=False, timeout=60)
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
