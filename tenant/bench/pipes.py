"""Reading what a child process says, a line at a time and not for ever."""

from __future__ import annotations

import os
import selectors
import time
from typing import IO

from symbiosis_priv.errors import DeadlineExceededError

_MOST = 1 << 16  # bytes of one read


def read_line(pipe: IO[bytes], *, timeout_s: float, whose: str) -> bytes | None:
    """The next line of an unbuffered pipe, from a process that says nothing before it is asked again; None at the end.

    Args:
        timeout_s: for the whole line.
        whose: it is, for the message.

    Raises:
        DeadlineExceededError: there is none in time.
    """
    until, line = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, until - time.monotonic())):
                raise DeadlineExceededError(f"no answer from {whose} within {timeout_s:g} s")
            part = os.read(pipe.fileno(), _MOST)
            if not part:
                return None
            line += part
    return line
