"""Wait for what another thread or process makes true."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true. The limit only ends a test that would hang."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s:g} s"
        time.sleep(0.01)
