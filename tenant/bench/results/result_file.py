"""The file that every benchmark writes with --json: machine, date, command, and rows of named figures.

The name of a figure ends in its unit (`wall_s`, `echo_p50_us`, `tenant_peak_mib`); a figure without a unit is a ratio,
a count or a word.
"""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import UNDECODABLE, write_atomically

SCHEMA = 1
_DISTRIBUTIONS = ("symbiosis-priv", "torch", "transformers", "peft")
# kernels are chosen by CPU features
_INTERESTING = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp")

Value = float | int | str | None
Row = dict[str, Value]


class Machine(msgspec.Struct, frozen=True):
    """The machine on which the figures were measured."""

    cpu: str
    cores: int
    instructions: tuple[str, ...]
    memory_gib: float
    gpu: str | None
    system: str


class ResultFile(msgspec.Struct, frozen=True):
    """A file of figures.

    Args:
        date: UTC, ISO 8601.
        machine, versions: the machine, and the versions of the packages.
        rows: figures by name; all rows of a file have the same names.
    """

    schema: int
    benchmark: str
    date: str
    command: str
    machine: Machine
    versions: dict[str, str]
    rows: list[Row]


def number(value: Value) -> float:
    """Return the value, which must be a number."""
    assert isinstance(value, int | float)
    return value


def percentile(seconds: Sequence[float], q: float, *, unit: float = 1.0) -> float:
    """Return the q-th percentile of some times, in units of `unit` seconds."""
    import numpy as np  # imported here, so that --help does not wait for it

    return float(np.percentile(seconds, q)) / unit


def report(benchmark: str, rows: Sequence[Row]) -> ResultFile:
    """Return the result file of this run."""
    return ResultFile(
        schema=SCHEMA,
        benchmark=benchmark,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["symbiosis-priv", *sys.argv[1:]]),
        machine=this_machine(),
        versions={"python": platform.python_version(), **{name: version(name) for name in _DISTRIBUTIONS}},
        rows=list(rows),
    )


def this_machine() -> Machine:
    """Return a description of this machine."""
    import torch  # torch is imported here, so that --help does not wait for it

    facts = _cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return Machine(
        cpu=facts.get("model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        instructions=tuple(name for name in _INTERESTING if name in flags),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        system=f"{platform.system()} {platform.release()}",
    )


def _cpu_facts() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def write(path: Path, figures: ResultFile) -> None:
    """Write a result file as indented JSON.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def read(path: Path) -> ResultFile:
    """Read a result file.

    Raises:
        ConfigError: the file cannot be read, is not a result file, or was written by another release.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is not a report of `symbiosis-priv bench`: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path} is of schema {found.schema}; this release reads schema {SCHEMA}: measure again")
    return found
