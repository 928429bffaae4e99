"""Another process of the tenant's user, on Linux.

Run as a program, this module is the adversary. It starts the tenant as its own child, because some systems (Yama) let
a process trace its children only, and tries what the kernel refuses for a process that has called `protect_process`.
The tenant holds what a session holds: a secret in a locked page, a row in ordinary memory, an environment, a socket. If
the program is started as root, both become an ordinary user first: root with all capabilities reads everything.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path

from symbiosis_priv.system.locked import LockedSecret, protect_process

TRIES = ("ptrace", "/proc/PID/mem", "/proc/PID/environ", "sockets", "core file")
FAULT = "the process stays dumpable"

_NOBODY, _BYTES, _DESCRIPTORS, _PATIENCE_S = 65534, 32, 64, 60.0
_PR_SET_DUMPABLE, _PTRACE_ATTACH, _PTRACE_DETACH, _PIDFD_GETFD = 4, 16, 17, 438


def attack_process(folder: Path, *, fault: bool) -> tuple[str, ...]:
    """Attack a tenant, or one that stays dumpable. Returns what was found. `folder`: an empty one, for core files."""
    command = [sys.executable, "-m", "threat_model.active.same_user", *([FAULT] if fault else [])]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, timeout=_PATIENCE_S, check=True)
    return tuple(json.loads(done.stdout))


def _main() -> None:
    libc, (reader, writer) = ctypes.CDLL(None), os.pipe()
    if not os.getuid():
        os.chown(".", _NOBODY, -1)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as an ordinary process; a new user has changed it
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    if not (tenant := os.fork()):
        _hold_secrets(writer, protected=FAULT not in sys.argv)
    os.close(writer)
    told = os.read(reader, 2 * _BYTES)
    assert len(told) == 2 * _BYTES  # else the tenant has ended, and its refusals would prove nothing
    # the tenant tells the digests of its secrets, so that the adversary knows one when it sees one
    digests = {told[:_BYTES]: "session secret", told[_BYTES:]: "row"}

    def among(memory: Iterable[bytes]) -> set[str]:
        starts = (part[at : at + _BYTES] for part in memory for at in range(0, len(part), PAGESIZE))
        return {digests[digest] for start in starts if (digest := sha256(start).digest()) in digests}

    attacks: tuple[Callable[[], set[str]], ...] = (
        lambda: _traced(libc, tenant),
        lambda: among(_memory(tenant)),
        lambda: {"variables"} if Path(f"/proc/{tenant}/environ").read_bytes() else set(),
        lambda: _sockets(libc, tenant),
        lambda: among(_core(tenant)),  # the last one, since it ends the tenant
    )
    found = []
    for name, attack in zip(TRIES, attacks, strict=True):
        try:
            found += [f"{name}: {what}" for what in sorted(attack())]
        except OSError:  # the kernel refuses
            continue
    print(json.dumps(found))


def _hold_secrets(writer: int, *, protected: bool) -> None:
    """The tenant. Waits until a signal ends it, or its parent has ended."""
    row, sockets, parent = mmap(-1, PAGESIZE, flags=MAP_PRIVATE | MAP_ANONYMOUS), socket.socketpair(), os.getppid()
    if protected:
        protect_process()
    held, row[:_BYTES] = LockedSecret(os.urandom(_BYTES)), os.urandom(_BYTES)
    os.write(writer, b"".join(sha256(secret).digest() for secret in (bytes(held), row[:_BYTES])))
    while os.getppid() == parent:
        signal.sigtimedwait([], 1.0)
    os._exit(len(sockets))


def _traced(libc: ctypes.CDLL, tenant: int) -> set[str]:
    if libc.ptrace(_PTRACE_ATTACH, tenant, None, None):
        return set()
    os.waitpid(tenant, 0)
    libc.ptrace(_PTRACE_DETACH, tenant, None, None)
    return {"attached"}


def _memory(tenant: int) -> Iterator[bytes]:
    maps = Path(f"/proc/{tenant}/maps").read_text(encoding="utf-8")
    with Path(f"/proc/{tenant}/mem").open("rb", buffering=0) as mem:
        for begin, end in re.findall(r"^(\w+)-(\w+) rw", maps, flags=re.MULTILINE):
            mem.seek(int(begin, 16))
            yield mem.read(int(end, 16) - int(begin, 16))


def _sockets(libc: ctypes.CDLL, tenant: int) -> set[str]:
    process = os.pidfd_open(tenant)
    copies = [libc.syscall(_PIDFD_GETFD, process, number, 0) for number in range(_DESCRIPTORS)]
    return {"taken"} if any(copy >= 0 and stat.S_ISSOCK(os.fstat(copy).st_mode) for copy in copies) else set()


def _core(tenant: int) -> list[bytes]:
    os.kill(tenant, signal.SIGABRT)
    os.waitpid(tenant, 0)
    return [path.read_bytes() for path in Path().glob("*core*")]


if __name__ == "__main__":
    _main()
