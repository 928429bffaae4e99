"""Bandwidth, round trip and loss of an emulated link."""

import math
import re
from dataclasses import dataclass
from typing import Self

from symbiosis_priv.errors import ConfigError

_FORM = re.compile(r"(?P<rate>[\d.]+)(?P<unit>mbit|gbit)/(?P<delay>[\d.]+)ms(?:/(?P<loss>[\d.]+)%)?")
_MBIT = 1e6 / 8  # bytes of a packet
_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The state of a link between a tenant and its providers, the same in both directions.

    Args:
        mbit_per_s: bandwidth in each direction; None for no limit.
        round_trip_ms: delay that the link adds to a round trip, half of it in each direction.
        loss: share of packets that are lost in each direction.
    """

    mbit_per_s: float | None = None
    round_trip_ms: float = 0.0
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `100mbit/100ms`, `1gbit/5ms`, or with a loss in each direction `100mbit/100ms/0.1%`.

        Raises:
            ConfigError: the text has another form.
        """
        try:
            found = _FORM.fullmatch(text.strip())
            if found is None:
                raise ValueError
            rate, delay, loss = (float(found[name] or 0) for name in ("rate", "delay", "loss"))
        except ValueError:
            rate, delay, loss, found = 0.0, 0.0, 0.0, None
        if found is None or rate <= 0 or loss >= 100:
            raise ConfigError(f"condition {text!r}: write rate and round trip like 100mbit/100ms, or 1gbit/5ms/0.1%")
        return cls(mbit_per_s=rate * (1000 if found["unit"] == "gbit" else 1), round_trip_ms=delay, loss=loss / 100)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of each direction; infinite without a limit."""
        return math.inf if self.mbit_per_s is None else self.mbit_per_s * _MBIT

    @property
    def delay_s(self) -> float:
        """Delay of one direction, in seconds."""
        return self.round_trip_ms / 2e3

    @property
    def bytes_under_way(self) -> float:
        """Bytes of a connection that one direction may hold: a buffer of 1 MiB, and the bytes of a round trip."""
        return _BUFFER + (0.0 if self.mbit_per_s is None else min(2 * self.delay_s, 1.0) * self.bytes_per_s)

    def __str__(self) -> str:
        rate = "no limit" if self.mbit_per_s is None else _rate(self.mbit_per_s)
        return f"{rate}, {self.round_trip_ms:g} ms" + (f", {self.loss:.2g} lost" if self.loss else "")


def _rate(mbit_per_s: float) -> str:
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"
