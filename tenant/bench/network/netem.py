"""A network namespace with a pair of virtual interfaces, and `tc netem` on both of them."""

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis_priv.errors import ConfigError
from tenant.bench.network.link import Condition, Link
from tenant.bench.processes.children import Child, leave_network

_COMMAND_S = 20.0
_BENCHMARKS = 198 << 24 | 18 << 16  # 198.18.0.0/15 is reserved for benchmarks (RFC 2544)
_LIMIT = "1000000"  # packets that netem may hold, including delayed ones


class _NetemLink(Link):
    """Two connected interfaces: the outer one for the providers, the inner one in the tenant's namespace."""

    kind = "netem"

    def __init__(self, holder: int) -> None:
        number = secrets.randbits(15)  # addresses of a /30 network with two hosts
        self.host, self._guest = _address(number, 1), _address(number, 2)
        self.network = Path(f"/proc/{holder}/ns/net")
        self._holder, self.outer, self.inner = str(holder), f"spn{number}o", f"spn{number}i"
        self._inside = "nsenter", f"--net={self.network}", "--"  # the words that run a command in the namespace

    def connect(self) -> None:
        _command("ip", "link", "set", "dev", self.inner, "netns", self._holder)
        _command("ip", "address", "add", f"{self.host}/30", "dev", self.outer)
        _command("ip", "link", "set", "dev", self.outer, "up")
        _command(*self._inside, "ip", "link", "set", "dev", "lo", "up")
        _command(*self._inside, "ip", "address", "add", f"{self._guest}/30", "dev", self.inner)
        _command(*self._inside, "ip", "link", "set", "dev", self.inner, "up")

    def apply(self, condition: Condition) -> None:
        shape = ["delay", f"{condition.round_trip_ms / 2:g}ms", "limit", _LIMIT]
        if condition.mbit_per_s is not None:
            shape += ["rate", f"{condition.mbit_per_s:g}mbit"]
        if condition.loss:
            shape += ["loss", f"{100 * condition.loss:g}%"]
        for prefix, device in (((), self.outer), (self._inside, self.inner)):
            _command(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "netem", *shape)


@contextmanager
def open_netem() -> Iterator[Link]:
    """Context manager: a link through a new namespace. A child process holds the namespace, so both end with this
    process.

    Raises:
        ConfigError: this user or this machine cannot make a namespace.
    """
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root")
    with Child("network namespace", _hold_network) as holder:
        link = _NetemLink(holder.wait_ready().pid)
        _command("ip", "link", "add", "dev", link.outer, "type", "veth", "peer", "name", link.inner)
        try:
            link.connect()
            yield link
        finally:
            _command("ip", "link", "delete", "dev", link.outer)


@contextmanager
def _hold_network() -> Iterator[Callable[[None], None]]:
    try:
        leave_network()
    except OSError as error:
        raise ConfigError(f"no network namespace can be made here: {error.strerror}") from error
    yield lambda _: None


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]} does not run here: {error}") from error
    if done.returncode:
        raise ConfigError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def _address(number: int, host: int) -> str:
    packed = _BENCHMARKS + 4 * number + host
    return ".".join(str(packed >> shift & 255) for shift in (24, 16, 8, 0))
