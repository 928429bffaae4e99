"""A network namespace that lasts as long as this process, and an interface of ours in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Sequence

from symbiosis_priv.errors import ConfigError

_COMMAND_S = 20.0
_BENCHMARKS = 198 << 24 | 18 << 16  # 198.18.0.0/15 is set aside for benchmarks (RFC 2544)


class Namespace:
    """A namespace without a name, held by a child that reads from our pipe: it ends with this process, however that
    ends, and the kernel removes the namespace with all that is in it.

    Args:
        purpose: for the names of interfaces.

    Raises:
        ConfigError: this machine, or this user, makes none.
    """

    def __init__(self, purpose: str) -> None:
        if os.geteuid() != 0:
            raise ConfigError("network namespaces need root")
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ConfigError(f"network namespaces need util-linux: {error}") from error
        number = secrets.randbits(15)  # of four addresses, two of them for hosts
        self.outer_device, self.inner_device = f"{purpose}{number}o", f"{purpose}{number}i"
        self.outer, self.inner = _address(number, 1), _address(number, 2)
        try:
            self._say(b"\n")
            self.inside("ip", "link", "set", "dev", "lo", "up")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the holder."""
        return self._holder.pid

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, to be run inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def inside(self, *command: str) -> None:
        """Run a command in it."""
        outside(*self.command(command))

    def connect(self) -> None:
        """Give the two devices their addresses and put the inner one into the namespace."""
        outside("ip", "link", "set", "dev", self.inner_device, "netns", str(self.pid))
        outside("ip", "address", "add", f"{self.outer}/30", "dev", self.outer_device)
        outside("ip", "link", "set", "dev", self.outer_device, "up")
        self.inside("ip", "address", "add", f"{self.inner}/30", "dev", self.inner_device)
        self.inside("ip", "link", "set", "dev", self.inner_device, "up")

    def close(self) -> None:
        """End it."""
        self._holder.kill()
        self._holder.wait(_COMMAND_S)
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()

    def _say(self, word: bytes) -> None:
        """Returns once the holder is inside: it repeats what it is told."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.write(word)
        if self._holder.stdout.read(len(word)) != word:
            reason = self._holder.stderr.read().decode(errors="replace").strip()
            raise ConfigError(f"there is no network namespace to be had: {reason}")


def outside(*command: str) -> None:
    """Run a command.

    Raises:
        ConfigError: it fails, and why.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]} does not run here: {error}") from error
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def _address(number: int, host: int) -> str:
    packed = _BENCHMARKS + 4 * number + host
    return ".".join(str(packed >> shift & 255) for shift in (24, 16, 8, 0))
