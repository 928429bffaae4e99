"""Opens an emulated link; the package's docstring describes the two kinds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from symbiosis_priv.errors import ConfigError, SymbiosisError
from tenant.bench.network.link import KINDS, Condition, Kind, Link
from tenant.bench.network.netem import open_netem
from tenant.bench.network.proxy import open_proxy

_OPENERS: dict[Kind, Callable[[], AbstractContextManager[Link]]] = {"netem": open_netem, "proxy": open_proxy}


@contextmanager
def open_link(kind: Kind | None = None) -> Iterator[Link]:
    """Context manager: open a link without limits. It ends with the block, or with this process.

    Args:
        kind: kind of the link; if None, the best kind that works on this machine.

    Raises:
        ConfigError: this machine cannot emulate the link; the message states the reason.
    """
    reasons = []
    for name in KINDS if kind is None else (kind,):
        with ExitStack() as held:
            try:
                link = held.enter_context(_OPENERS[name]())
                link.apply(Condition())
            except SymbiosisError as error:
                reasons.append(f"{name}: {error}")
                continue
            link.why_not_better = "; ".join(reasons)
            yield link
            return
    raise ConfigError("; ".join(reasons))
