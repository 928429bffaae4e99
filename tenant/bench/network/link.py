"""The interface of an emulated link, and its condition."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, get_args

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically

Kind = Literal["netem", "proxy"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

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
        """Parse `100mbit/100ms`, `1gbit/5ms`, or `100mbit/100ms/0.1%` with a loss in each direction.

        Raises:
            ConfigError: the text has another format.
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
        """Bytes that one direction of a connection may hold: a buffer of 1 MiB, and the bytes of a round trip."""
        return _BUFFER + (0.0 if self.mbit_per_s is None else min(2 * self.delay_s, 1.0) * self.bytes_per_s)

    def __str__(self) -> str:
        rate = "no limit" if self.mbit_per_s is None else _rate(self.mbit_per_s)
        return f"{rate}, {self.round_trip_ms:g} ms" + (f", {self.loss:.2g} lost" if self.loss else "")


def _rate(mbit_per_s: float) -> str:
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"


class Link(ABC):
    """An emulated link between a tenant and its providers.

    Attributes:
        kind: how the link is emulated.
        host: the address at which providers must listen.
        network: the network namespace in which the tenant must run; None for the current one.
        emulators: processes whose processor time belongs to the emulation.
        why_not_better: the reason why `netem` is not used; empty if it is used.
    """

    kind: Kind
    host: str
    network: Path | None = None
    emulators: Sequence[int] = ()
    why_not_better = ""

    @abstractmethod
    def apply(self, condition: Condition) -> None:
        """Emulate this condition from now on; `Condition()` has no limits."""

    def ports(self, ports: Sequence[int]) -> list[int]:
        """Return the ports at which the tenant reaches servers that listen at `ports` of `host`."""
        return list(ports)

    def federation(self, path: Path) -> Path:
        """Write the tenant's `federation.toml`, from the file with the providers' addresses at `host`. Returns its
        path."""
        text, ports = path.read_text(encoding="utf-8"), [peer.port for peer in load_federation(path).peers]
        for port, reached in zip(ports, self.ports(ports), strict=True):
            text = text.replace(f'"{self.host}:{port}"', f'"{self.host}:{reached}"')
        emulated = path.with_name(f"{path.stem}-emulated{path.suffix}")
        write_atomically(emulated, text.encode())
        return emulated
