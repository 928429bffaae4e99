"""A secret stays in memory that is not swapped, and a protected process makes no core file and is not traced."""

import copy
import ctypes
import os
import resource
import sys
from pathlib import Path

import pytest

from symbiosis_priv.system.locked import LockedSecret, protect_process
from tenant.core.pads import SessionSecret

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def flags_of(secret: LockedSecret) -> set[str]:
    """The kernel's flags of the secret's memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(secret._page))
    found: set[str] = set()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            found = set(line.split()[1:])
    return found


@linux
def test_the_session_secret_is_locked_in_no_core_file_and_gone_in_a_child() -> None:
    held = SessionSecret()._secret
    assert flags_of(held) >= {"lo", "dd", "wf"}
    assert len(bytes(held)) == 32
    assert bytes(held) != bytes(32)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, bytes(held))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 32) == bytes(32)
    os.close(reader)
    os.close(writer)


def test_a_locked_secret_is_not_shown_or_copied() -> None:
    secret = LockedSecret(b"x" * 32)
    assert bytes(secret) == b"x" * 32
    assert "x" not in repr(secret)
    with pytest.raises(TypeError):
        copy.deepcopy(secret)


@linux
def test_a_protected_process_makes_no_core_file_and_is_not_dumpable() -> None:
    child = os.fork()
    if not child:
        protect_process()
        dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE
        os._exit(0 if (dumpable, resource.getrlimit(resource.RLIMIT_CORE)) == (0, (0, 0)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
