"""AMX is asked for where the processor has it, and used where it works; oneDNN is kept from it exactly where the
machine announces it without describing its tiles. Processors are simulated."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis_priv import native
from symbiosis_priv.native import Isa
from symbiosis_priv.system import amx
from tests.builds import switched
from tests.cases import cases

VARIABLE = "ONEDNN_MAX_CPU_ISA"
AMX = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"
LEAVES = "cpuid level\t: {}"
IMPORTS = """
import os, pathlib, subprocess, sys
real = pathlib.Path.open
cpuinfo = pathlib.Path(sys.argv[2])
pathlib.Path.open = lambda path, *a, **k: real(cpuinfo if str(path) == "/proc/cpuinfo" else path, *a, **k)
__import__(sys.argv[1])
print("torch" in sys.modules, os.environ.get("ONEDNN_MAX_CPU_ISA"))
subprocess.run([sys.executable, "-c", "import os, tenant; print(os.environ.get('ONEDNN_MAX_CPU_ISA'))"], check=True)
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in (VARIABLE, "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")  # so that the variable has its old value afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(amx, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(amx, "_ask", lambda: None)
    return monkeypatch


def processor(*lines: str) -> None:
    amx._CPUINFO.write_text("\n".join((*lines, "", "processor\t: 1", "")))


@pytest.mark.parametrize("own", [{}, {VARIABLE: "AVX2"}, {"DNNL_MAX_CPU_ISA": "AVX2"}], ids=["", "own", "old name"])
@cases(__file__, "processors")
def test_linux_is_asked_for_amx_and_onednn_is_limited_where_its_leaf_is_missing(
    machine: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lines: list[str] | None,
    asked: bool,
    limit: str | None,
    own: dict[str, str],
) -> None:
    """A limit that the user has set stays."""
    calls = list[None]()
    machine.setattr(amx, "_ask", lambda: calls.append(None))
    for name, value in own.items():
        machine.setenv(name, value)
    if lines is not None:
        processor(*lines)
    with caplog.at_level(logging.WARNING):
        amx.prepare()
        assert bool(calls) is asked
        amx.prepare()
    assert os.environ.get(VARIABLE) == (own.get(VARIABLE) if own else limit)
    assert len(caplog.records) == (limit is not None and not own)  # said once


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words, environment = [sys.executable, "-c", script, *arguments], os.environ | variables
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, env=environment)


class Announcing:
    """In place of the compiled library: a processor that announces everything."""

    def ring_isas(self) -> int:
        return (1 << len(Isa)) - 1


@cases(__file__, "amx_probes")
def test_amx_is_used_if_a_child_shows_that_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, probe: str, works: bool
) -> None:
    monkeypatch.setattr(native, "_AMX_PROBE", probe)
    monkeypatch.setattr(native, "_AMX_PROBE_SECONDS", 1 if "sleep" in probe else 60)
    library = Announcing()
    with switched(), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(native, "library", lambda: library)
        assert native.isas() == tuple(Isa)[: len(Isa) - (not works)]
        monkeypatch.setattr(native, "_AMX_PROBE", "raise SystemExit(not " + str(not works) + ")")
        assert (Isa.AMX in native.isas()) is works  # one child per process
    assert len(caplog.records) == (not works)


@pytest.mark.parametrize("package", ["tenant", "provider"])
def test_importing_a_package_limits_the_process_and_its_children(machine: pytest.MonkeyPatch, package: str) -> None:
    processor(LEAVES.format(28), AMX)
    done = run(IMPORTS, package, str(amx._CPUINFO))
    own, child = done.stdout.splitlines()
    assert own.split()[1] == child == "AVX512_CORE_BF16"
    assert done.stderr.count("illegal instruction") == 1
    assert own.startswith("False")  # before torch
