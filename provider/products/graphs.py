"""CUDA graphs of products of a few rows.

Starting the copies and programs of such a product one by one takes longer than running them. A graph starts all of them
with one call. No test without a GPU can capture one: `make gpu` shows it (section `transfers`).
"""

from collections.abc import Callable
from typing import Any

import torch

from provider import logs

log = logs.EventLog(__name__)


class Graph:
    """Work that is repeated with the same memory, in one thread at a time. The first call starts it piece by piece,
    which compiles what is missing; the second call captures it.

    Args:
        work: starts copies and programs on the current stream.
        stream: for the capture, during which nothing runs.
        pool: memory that `work` allocates; graphs that run one at a time share it.

    Attributes:
        captured: True if later calls start one graph.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, *, stream: Any, pool: Any) -> None:
        self._work, self._device, self._stream, self._pool = work, device, stream, pool
        self._run: Callable[[], None] | None = None
        self.captured = False

    def __call__(self) -> None:
        if self._run is None:
            self._run = self._capture if self._device.type == "cuda" else self._work
            self._work()
        else:
            self._run()

    def _capture(self) -> None:
        self._graph = graph = torch.cuda.CUDAGraph()  # if a capture fails, torch's allocator goes on to refer to it
        self._run = self._work  # if no graph can be captured
        try:
            with torch.cuda.stream(self._stream):
                # other threads take page-locked memory meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.failure("graph_not_captured", error)
        else:
            self._run, self.captured = graph.replay, True
        self._run()
