"""What a carrier's parent and the carrier say to each other: a line of JSON each way, over its stdin and stdout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from symbiosis_priv.errors import ConfigError
from tenant.bench.lines.condition import Condition
from tenant.bench.pipes import read_line

_ANSWER_S = 20.0


class Carrier:
    """A child process that carries what goes over a line, and ends when this process does.

    Args:
        module: of this package, to be run.
        arguments: of its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is its parent's to handle
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, question: object = None) -> Any:
        """Say something, if there is something to say, and return the answer.

        Raises:
            ConfigError: it has ended; with its last words.
            DeadlineExceededError: there is no answer.
        """
        assert self._process.stdin is not None
        try:
            if question is not None:
                self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            return msgspec.json.decode(self._line())
        except BrokenPipeError:
            raise self._ended() from None

    def impose(self, condition: Condition) -> None:
        """From now on the line is like that."""
        self.ask(condition)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(_ANSWER_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, timeout_s=_ANSWER_S, whose="the line's carrier")
        if line is None:
            raise self._ended()
        return line

    def _ended(self) -> ConfigError:
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait(_ANSWER_S)
        words = self._process.stderr.read().decode(errors="replace").strip()
        return ConfigError(f"the line's carrier has ended: {words[-1000:] or 'without a word'}")


def answer(what: object = None) -> None:
    """As a carrier: to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def conditions(data: bytes) -> Sequence[Condition]:
    """As a carrier: what a parent has said."""
    return [msgspec.json.decode(line, type=Condition) for line in data.splitlines()]
