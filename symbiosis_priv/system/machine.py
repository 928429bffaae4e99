"""What of a tenant's process other programs, users, disks and devices of its machine may see.

`look` reads files of the kernel and starts nothing. Each finding says if something is open, and what to do about it.
"""

import os
import pwd
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMORY = ("tmpfs", "ramfs")
_CONFIDENTIAL = {"TDX": ("dev/tdx_guest", "tdx_guest"), "SEV-SNP": ("dev/sev-guest", "sev_snp")}


class Finding(NamedTuple):
    """One thing that was looked at. `advice` is empty if nothing is open."""

    name: str
    state: str
    advice: str = ""


def look(cache: Path, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at this process and its machine. `cache`: the cache folder; `root`: where the kernel's files are."""
    yield _swap(root)
    yield from _cache(cache, root)
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope") or "absent"
    yield Finding(
        "other programs of the same user",
        f"ptrace scope {scope}; a tenant with a session forbids tracing of itself",
        "" if scope in ("1", "2", "3") else "set kernel.yama.ptrace_scope = 1, and run nothing else as this user",
    )
    pattern, limit = _read(root / "proc/sys/kernel/core_pattern"), resource.getrlimit(resource.RLIMIT_CORE)[0]
    yield Finding(
        "core files",
        f"pattern {pattern or 'unknown'!r}, limit {limit if limit >= 0 else 'none'}; none in a tenant's session",
        "" if limit == 0 else "set the limit to 0 (LimitCORE=0, ulimit -c 0), also for the time before a session",
    )
    tracer = _field(root / "proc/self/status", "TracerPid") or "0"
    yield Finding(
        "debugger", "none" if tracer == "0" else f"process {tracer}", "" if tracer == "0" else "end it before a session"
    )
    huge = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    merging = _read(root / "sys/kernel/mm/ksm/run") == "1"
    yield Finding(
        "pages",
        f"transparent huge pages {huge or 'unknown'}; merging of equal pages (KSM) {'on' if merging else 'off'}",
        "write 0 to /sys/kernel/mm/ksm/run: the time of a write tells what others keep in memory" if merging else "",
    )
    synchronized = (root / "run/systemd/timesync/synchronized").exists()
    yield Finding(
        "clock",
        "set by NTP" if synchronized else "no sign of NTP by systemd-timesyncd",
        "" if synchronized else "keep the clock right: the validity of certificates depends on it",
    )
    others = _other_users(root)
    yield Finding(
        "other users",
        ", ".join(others[:4]) or "none with processes",
        "root and users with its rights read everything; give the tenant a machine of its own" if others else "",
    )
    yield _isolation(root)


def _swap(root: Path) -> Finding:
    areas = [line.split()[0] for line in _read(root / "proc/swaps").splitlines()[1:]]
    open_areas = [area for area in areas if not _is_safe(Path(area), root)]
    state = ", ".join(areas) or "none"
    return Finding("swap", state, "turn it off (swapoff -a), or encrypt it" if open_areas else "")


def _is_safe(area: Path, root: Path) -> bool:
    """True for compressed memory and for an encrypted device."""
    name = Path(os.path.realpath(root / str(area).lstrip("/"))).name
    return name.startswith("zram") or _read(root / f"sys/block/{name}/dm/uuid").startswith("CRYPT-")


def _cache(cache: Path, root: Path) -> Iterator[Finding]:
    where = cache / "tenant"  # keys and hints
    while not where.exists():
        where = where.parent
    mounts = [line.split()[:3] for line in _read(root / "proc/mounts").splitlines()]
    inside = [m for m in mounts if where.resolve().is_relative_to(m[1])]
    device, _, kind = max(inside, key=lambda m: len(m[1]), default=("unknown", "", "unknown"))
    safe = kind in _MEMORY or _is_safe(Path(device), root)
    advice = "use memory (tmpfs) or an encrypted disk: verification keys and hints of lwe are secret"
    yield Finding("cache", f"{cache} on {kind} ({device})", "" if safe else advice)
    status = where.stat()
    exposed = status.st_uid not in (0, os.geteuid()) or bool(stat.S_IMODE(status.st_mode) & 0o077)
    rights = f"mode {stat.S_IMODE(status.st_mode):03o}, user {status.st_uid}"
    yield Finding("rights of the cache", rights, f"chmod 700 {where}, owned by the tenant" if exposed else "")


def _other_users(root: Path) -> list[str]:
    """Names of users with processes, but root, services and this user."""
    found = set()
    for folder in (root / "proc").glob("[0-9]*"):
        user = (_field(folder / "status", "Uid") or "0").split()[0]
        if user.isdigit() and 1000 <= int(user) < 65534 and int(user) != os.geteuid():
            found.add(int(user))
    return sorted(_name(user) for user in found)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _isolation(root: Path) -> Finding:
    flags = _field(root / "proc/cpuinfo", "flags") or ""
    found = [
        name for name, (device, flag) in _CONFIDENTIAL.items() if (root / device).exists() or flag in flags.split()
    ]
    container = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    # read-only containers of podman, and those of systemd and LXC, show it here only
    container |= any(one.startswith("container=") for one in _read(root / "proc/1/environ").split("\0"))
    state = f"{' and '.join(found) or 'no confidential VM'}{', in a container' if container else ''}"
    if sys.platform != "linux":
        state = "unknown on this system"
    advice = "who runs this machine reads its memory"
    return Finding("isolation", state, "" if found else advice)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> str | None:
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
