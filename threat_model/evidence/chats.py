"""Chats in four topics and four languages with SmolLM2's numbers of tokens, and what an executor sees of a chat."""

import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire

FILE = Path(__file__).with_name("chats.toml")
_WAIT_S = 120.0


class Chat(NamedTuple):
    """One question and its answer, in tokens."""

    language: str
    topic: str
    prompt: int
    answer: int


def chats() -> list[Chat]:
    """Return all chats, as SmolLM2-135M-Instruct has read and written them with its chat template."""
    lengths = tomllib.loads(FILE.read_text(encoding="utf-8"))["lengths"]
    return [Chat(*kind.split("-"), *pair) for kind, pairs in lengths.items() for pair in pairs]


@dataclass
class Step:
    """One pass as an executor sees it: its rows, and the times of its first request and of its last answer."""

    rows: int
    begin: float
    end: float


class StepRecorder:
    """A `tenant.connections.channel.Wiretap` that records the steps of an executor."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._changed = threading.Condition()

    def add(self, rows: int, at: float) -> None:
        """Record the beginning of a step."""
        with self._changed:
            self.steps.append(Step(rows, at, at))
            self._changed.notify_all()

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        if isinstance(message, wire.Execute) and message.group == 0:
            self.add(message.rows, time.monotonic())

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        if peer.role == "executor" and self.steps:
            self.steps[-1].end = time.monotonic()

    def wait_for(self, steps: int) -> None:
        """Wait until there are so many steps. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.steps) >= steps, timeout=_WAIT_S):
                raise TimeoutError
