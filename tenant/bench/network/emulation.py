"""Opens an emulated link; the package's docstring describes the two kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, get_args

from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically
from tenant.bench.network.condition import Condition
from tenant.bench.network.netem import Interfaces, connected_namespace
from tenant.bench.network.proxy import serve_proxy
from tenant.bench.processes.children import Child

Kind = Literal["netem", "proxy"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_ANSWER_S = 20.0


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
    def impose(self, condition: Condition) -> None:
        """Emulate this condition from now on; `Condition()` has no limits."""

    def ports(self, ports: Sequence[int]) -> list[int]:
        """The ports at which the tenant reaches servers that listen at these ports of `host`."""
        return list(ports)

    def federation(self, path: Path) -> Path:
        """The tenant's `federation.toml`, made from the file that names the providers at `host`."""
        text, ports = path.read_text(encoding="utf-8"), [peer.port for peer in load_federation(path).peers]
        for port, reached in zip(ports, self.ports(ports), strict=True):
            text = text.replace(f'"{self.host}:{port}"', f'"{self.host}:{reached}"')
        emulated = path.with_name(f"{path.stem}-emulated{path.suffix}")
        write_atomically(emulated, text.encode())
        return emulated


@contextmanager
def open_link(kind: Kind | None = None) -> Iterator[Link]:
    """Open a link without limits. It ends with the block, or with this process.

    Args:
        kind: kind of the link; the best kind that works on this machine if None.

    Raises:
        ConfigError: this machine cannot emulate the link; the message states the reason.
    """
    reasons = []
    for name in KINDS if kind is None else (kind,):
        with ExitStack() as held:
            try:
                link = held.enter_context(_OPENERS[name]())
                link.impose(Condition())
            except SymbiosisError as error:
                reasons.append(f"{name}: {error}")
                continue
            link.why_not_better = "; ".join(reasons)
            yield link
            return
    raise ConfigError("; ".join(reasons))


class _NetemLink(Link):
    kind = "netem"

    def __init__(self, interfaces: Interfaces) -> None:
        self.host, self.network = interfaces.host, interfaces.network
        self._interfaces = interfaces

    def impose(self, condition: Condition) -> None:
        self._interfaces.impose(condition)


class _ProxyLink(Link):
    kind = "proxy"
    host = "127.0.0.1"

    def __init__(self, child: Child[Condition | list[int], list[int]]) -> None:
        self._child = child
        self.emulators = [child.pid]

    def impose(self, condition: Condition) -> None:
        self._child.ask(condition, timeout_s=_ANSWER_S)

    def ports(self, ports: Sequence[int]) -> list[int]:
        return self._child.ask(list(ports), timeout_s=_ANSWER_S)


@contextmanager
def _open_netem() -> Iterator[Link]:
    with connected_namespace() as interfaces:
        yield _NetemLink(interfaces)


@contextmanager
def _open_proxy() -> Iterator[Link]:
    with Child("proxy", serve_proxy) as child:
        yield _ProxyLink(child)


_OPENERS: dict[Kind, Callable[[], AbstractContextManager[Link]]] = {"netem": _open_netem, "proxy": _open_proxy}
