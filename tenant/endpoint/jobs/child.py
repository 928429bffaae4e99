"""The process of one job: `python -m tenant.endpoint.jobs.child`. With the arguments `check METHOD`, it only
checks the training file that stdin names, which may take long.

The process reads its work from the first line of stdin, so that no name of the tenant is on a command line. It writes
its progress to stdout, one JSON object per line. If the endpoint ends, stdin closes: the process sends itself SIGTERM
and saves the completed steps as `tenant finetune` does. So a process outlives its endpoint by one step at most.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from symbiosis_priv.errors import ConfigError, SymbiosisError, one_line
from symbiosis_priv.system.files import lock
from symbiosis_priv.system.processes import when_stdin_closes
from tenant.training.corpus import check
from tenant.training.options import FineTuning
from tenant.training.output import last_checkpoint

_EARLIER_PROCESS_S = 120.0
_NICE = 10  # lower priority than the endpoint's answers


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a process. `output`: the output folder. Its parent folder has the lock."""

    model: str
    data: str
    output: str
    remote: Mapping[str, Any]
    options: Mapping[str, Any]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of progress: a step, the end of the run (with `tokens`), or an `error`."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens: int | None = None
    error: str | None = None


def main() -> None:
    """Run the work that stdin describes, or check a training file."""
    if sys.argv[1:2] == ["check"]:
        try:
            check(Path(os.fsdecode(sys.stdin.buffer.read())), preferences=sys.argv[2] == "dpo")
        except ConfigError as error:
            _report(Report(error=one_line(str(error))))
        return
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=Work)
    _lower_priority()
    when_stdin_closes(lambda: os.kill(os.getpid(), signal.SIGTERM))
    output = Path(work.output)
    try:
        with (output.parent / "lock").open("wb") as file:
            # a killed endpoint may have left an earlier process of the same job behind
            if not lock(file.fileno(), patience_s=_EARLIER_PROCESS_S):
                raise ConfigError("an earlier process of this job does not end; kill it")
            try:
                last_checkpoint(output)
            except ConfigError:  # none: delete what an earlier run has left
                shutil.rmtree(output, ignore_errors=True)
            from tenant.model.hf import RemoteConfig
            from tenant.training.finetune import finetune

            result = finetune(
                work.model,
                Path(work.data),
                output,
                remote=RemoteConfig(**work.remote),
                options=FineTuning(**work.options, resume=output.exists()),
                on_progress=lambda step: _report(Report(step=step.done, total_steps=step.total, loss=step.loss)),
            )
            _report(Report(tokens=result.tokens))
    except SymbiosisError as error:
        _report(Report(error=one_line(str(error))))
        raise SystemExit(1) from None


def _lower_priority() -> None:
    """Lower this process's priority, and make Linux end it first when memory runs out."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _report(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
