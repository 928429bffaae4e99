"""A network namespace with a pair of virtual interfaces, and `tc netem` on both of them."""

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import ConfigError
from tenant.bench.network.condition import Condition
from tenant.bench.processes.children import Child, leave_network

_COMMAND_S = 20.0
_BENCHMARKS = 198 << 24 | 18 << 16  # 198.18.0.0/15 is set aside for benchmarks (RFC 2544)
_LIMIT = "1000000"  # packets that netem may hold, including delayed ones


@dataclass(frozen=True)
class Interfaces:
    """Two connected interfaces: the outer one for the providers, and the inner one in the tenant's namespace.

    Args:
        outer, inner: names of the interfaces.
        network: the namespace, a file of /proc.
    """

    outer: str
    inner: str
    host: str
    network: Path

    def impose(self, condition: Condition) -> None:
        """Shape both directions from now on."""
        shape = ["delay", f"{condition.round_trip_ms / 2:g}ms", "limit", _LIMIT]
        if condition.mbit_per_s is not None:
            shape += ["rate", f"{condition.mbit_per_s:g}mbit"]
        if condition.loss:
            shape += ["loss", f"{100 * condition.loss:g}%"]
        for prefix, device in (((), self.outer), (self.inside, self.inner)):
            _command(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "netem", *shape)

    @property
    def inside(self) -> Sequence[str]:
        """The words that run a command in the namespace."""
        return "nsenter", f"--net={self.network}", "--"


@contextmanager
def connected_namespace() -> Iterator[Interfaces]:
    """A new namespace and its interfaces. A child process holds the namespace, so both end with this process.

    Raises:
        ConfigError: this user or this machine cannot make a namespace.
    """
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root")
    with Child("network namespace", _hold_network) as holder:
        holder.wait_ready()
        number = secrets.randbits(15)  # addresses of a /30 network with two hosts
        host, guest = _address(number, 1), _address(number, 2)
        network = Path(f"/proc/{holder.pid}/ns/net")
        pair = Interfaces(f"spn{number}o", f"spn{number}i", host, network)
        _command("ip", "link", "add", "dev", pair.outer, "type", "veth", "peer", "name", pair.inner)
        try:
            _command("ip", "link", "set", "dev", pair.inner, "netns", str(holder.pid))
            _command("ip", "address", "add", f"{host}/30", "dev", pair.outer)
            _command("ip", "link", "set", "dev", pair.outer, "up")
            _command(*pair.inside, "ip", "link", "set", "dev", "lo", "up")
            _command(*pair.inside, "ip", "address", "add", f"{guest}/30", "dev", pair.inner)
            _command(*pair.inside, "ip", "link", "set", "dev", pair.inner, "up")
            yield pair
        finally:
            _command("ip", "link", "delete", "dev", pair.outer)


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
