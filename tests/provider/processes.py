"""Reads the state of processes from /proc."""

import socket
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"  # state LISTEN in /proc/net/tcp


def has_ended(pid: int) -> bool:
    """True if a process has ended, also if its parent has not read its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Addresses at which processes wait for TCP connections."""
    found = set()
    for pid in pids:
        files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in files:
                    words = bytes.fromhex(fields[1].partition(":")[0])
                    address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    found.add(socket.inet_ntop(family, address))
    return found
