"""A process of `symbiosis-priv`, started through the command line as an operator starts it.

The process ends when its parent ends, because the parent holds the process's standard input open.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired

from symbiosis_priv.errors import ConfigError, DeadlineExceededError

_POLL_S = 0.02
_STOP_S = 10.0  # time between SIGTERM and SIGKILL
_TAIL = 2000  # characters of a log that an error quotes


class ManagedProcess:
    """A provider or a registry as a child process, called `what` in messages. `folder` has `NAME.log`, which all starts
    append to, and `NAME.ready`, which exists while it is ready."""

    def __init__(self, what: str, folder: Path, name: str) -> None:
        self._what = what
        self._log, self._ready = folder / f"{name}.log", folder / f"{name}.ready"
        self._process: Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None while the service does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def logs(self) -> str:
        """The output of the service since its first start."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def launch(self, words: Sequence[str]) -> None:
        """Start `symbiosis-priv WORDS`."""
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "symbiosis_priv.cli", *words]
        with self._log.open("ab") as log:
            self._process = Popen(
                [*command, "--ready-file", str(self._ready), "--stop-with-stdin"],
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # Ctrl-C must only reach the parent, which stops the providers later
            )

    def wait_ready(self, until: float) -> list[str]:
        """Wait until the service is ready, and return its addresses. `until`: deadline by `time.monotonic`. Raises
        `ConfigError`: the service has ended; `DeadlineExceededError`: it is not ready in time. Both quote its log."""
        assert self._process is not None
        while not self._ready.exists():
            if (status := self._process.poll()) is not None:
                self.kill()
                raise ConfigError(f"{self._what} ended with status {status}: {self.logs()[-_TAIL:]}")
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    f"{self._what} was not ready in time; LocalFederation(deadline_s=...) waits longer: "
                    f"{self.logs()[-_TAIL:]}"
                )
            time.sleep(_POLL_S)
        return self._ready.read_text(encoding="utf-8").split()

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """Wait `_STOP_S` seconds for the end of the service, then kill it."""
        if self._process is not None:
            with contextlib.suppress(TimeoutExpired):
                self._process.wait(_STOP_S)
            self.kill()

    def kill(self) -> None:
        """End the service with SIGKILL, like a crash."""
        if (process := self._process) is not None:
            process.kill()
            process.wait(_STOP_S)
            assert process.stdin is not None
            process.stdin.close()
            self._process = None
