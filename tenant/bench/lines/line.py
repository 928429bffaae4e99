"""A line that a benchmark or a test can make worse; see the package's text."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, get_args

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically
from tenant.bench.lines.carrier import Carrier
from tenant.bench.lines.condition import Condition
from tenant.bench.lines.namespace import Namespace, outside

Kind = Literal["netem", "packets", "proxy"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_LIMIT = "1000000"  # packets that netem may hold: what it holds includes those on their way


class Line(ABC):
    """Between a tenant and its providers.

    Args:
        kind: how it is made.
        why: why not in a better way; empty for the best.
        host: where providers must listen to be at its other end.
    """

    def __init__(self, kind: Kind, *, host: str) -> None:
        self.kind = kind
        self.host = host
        self.why = ""

    @abstractmethod
    def impose(self, condition: Condition) -> None:
        """Be like that from now on; `Condition()` for a line without limits."""

    @property
    def carriers(self) -> Sequence[int]:
        """Processes whose time goes into carrying."""
        return ()

    def command(self, command: Sequence[str]) -> list[str]:
        """How to start the tenant at its end."""
        return list(command)

    def ports(self, ports: Sequence[int]) -> list[int]:
        """Where the tenant reaches servers that listen at these ports of `host`."""
        return list(ports)

    def federation(self, path: Path) -> Path:
        """The `federation.toml` that the tenant reads, for one whose providers listen at `host`."""
        text, ports = path.read_text(encoding="utf-8"), [peer.port for peer in load_federation(path).peers]
        for port, reached in zip(ports, self.ports(ports), strict=True):
            text = text.replace(f'"{self.host}:{port}"', f'"{self.host}:{reached}"')
        through = path.with_name(f"{path.stem}-over-the-line{path.suffix}")
        write_atomically(through, text.encode())
        return through


@contextmanager
def open_line(kind: Kind | None = None) -> Iterator[Line]:
    """A line without limits so far, gone when the block ends or the process does.

    Args:
        kind: of the line; the best that this machine makes if None.

    Raises:
        ConfigError: this machine cannot make it, and why.
    """
    reasons = []
    with ExitStack() as held:
        for name in KINDS if kind is None else (kind,):
            try:
                with ExitStack() as opening:
                    line = opening.enter_context(_OPENERS[name]())
                    line.impose(Condition())
                    held.push(opening.pop_all())
            except ConfigError as error:
                reasons.append(f"{name}: {error}")
            else:
                line.why = "; ".join(reasons)
                break
        else:
            raise ConfigError("; ".join(reasons))
        yield line


class _NetemLine(Line):
    """A pair of virtual interfaces with `tc netem` on both ends."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__("netem", host=namespace.outer)
        self._namespace = namespace

    def impose(self, condition: Condition) -> None:
        shape = ["delay", f"{condition.round_trip_ms / 2:g}ms", "limit", _LIMIT]
        if condition.mbit_per_s is not None:
            shape += ["rate", f"{condition.mbit_per_s:g}mbit"]
        if condition.loss:
            shape += ["loss", f"{100 * condition.loss:g}%"]
        for run, device in (
            (outside, self._namespace.outer_device),
            (self._namespace.inside, self._namespace.inner_device),
        ):
            run("tc", "qdisc", "replace", "dev", device, "root", "netem", *shape)

    def command(self, command: Sequence[str]) -> list[str]:
        return self._namespace.command(command)


class _PacketLine(Line):
    """A pair of TUN interfaces with `packets` between them."""

    def __init__(self, namespace: Namespace, carrier: Carrier) -> None:
        super().__init__("packets", host=namespace.outer)
        self._namespace, self._carrier = namespace, carrier

    def impose(self, condition: Condition) -> None:
        self._carrier.impose(condition)

    @property
    def carriers(self) -> Sequence[int]:
        return (self._carrier.pid,)

    def command(self, command: Sequence[str]) -> list[str]:
        return self._namespace.command(command)


class _ProxyLine(Line):
    """A proxy per federation."""

    def __init__(self) -> None:
        super().__init__("proxy", host="127.0.0.1")
        self._carriers: list[Carrier] = []
        self._condition = Condition()

    def impose(self, condition: Condition) -> None:
        self._condition = condition
        for carrier in self._carriers:
            carrier.impose(condition)

    @property
    def carriers(self) -> Sequence[int]:
        return [carrier.pid for carrier in self._carriers]

    def ports(self, ports: Sequence[int]) -> list[int]:
        carrier = Carrier("tenant.bench.lines.proxy", *map(str, ports))
        self._carriers.append(carrier)
        own: list[int] = carrier.ask()
        carrier.impose(self._condition)
        return own

    def close(self) -> None:
        """End the proxies."""
        for carrier in self._carriers:
            carrier.close()


@contextmanager
def _netem() -> Iterator[Line]:
    with contextlib.closing(Namespace("spn")) as namespace:
        ends = (namespace.outer_device, namespace.inner_device)
        outside("ip", "link", "add", "dev", ends[0], "type", "veth", "peer", "name", ends[1])
        try:
            namespace.connect()
            yield _NetemLine(namespace)
        finally:
            outside("ip", "link", "delete", "dev", ends[0])


@contextmanager
def _packets() -> Iterator[Line]:
    with contextlib.closing(Namespace("spp")) as namespace:
        ends = (namespace.outer_device, namespace.inner_device)
        with contextlib.closing(Carrier("tenant.bench.lines.packets", *ends)) as carrier:
            carrier.ask()
            namespace.connect()
            yield _PacketLine(namespace, carrier)


@contextmanager
def _proxy() -> Iterator[Line]:
    with contextlib.closing(_ProxyLine()) as line:
        yield line


_OPENERS: dict[Kind, Callable[[], contextlib.AbstractContextManager[Line]]] = {
    "netem": _netem,
    "packets": _packets,
    "proxy": _proxy,
}
