"""The compiled library is optional: built if there is a compiler, ignored when stale, damaged or switched off."""

import ctypes
import importlib
import logging
import runpy
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from symbiosis_priv import native
from symbiosis_priv.errors import ConfigError
from tests.builds import switched

ROOT = Path(__file__).parents[2]
PACKAGES = ("symbiosis_priv", "provider", "tenant", "threat_model")
needs_library = pytest.mark.skipif(native.library() is None, reason="installed without a C compiler")


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `library()` load again, and forget the loaded library after the test."""
    monkeypatch.delenv("SYMBIOSIS_PRIV_NATIVE", raising=False)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    native.switches.cache_clear()
    native._load.cache_clear()


def test_the_library_of_this_checkout_is_as_new_as_its_sources() -> None:
    """Otherwise tests of compiled code try torch alone."""
    assert not native._LIBRARY.is_file() or native._load() is not None, "run `python hatch_build.py`"


@needs_library
def test_every_instruction_set_up_to_the_forced_one_is_offered() -> None:
    everything = native.isas()
    assert everything[0] is native.Isa.PORTABLE
    for isa in everything:
        with switched(SYMBIOSIS_PRIV_ISA=isa.name.lower()):
            assert native.isas() == tuple(other for other in everything if other <= isa)
    with switched(SYMBIOSIS_PRIV_ISA="sse9"), pytest.raises(ConfigError, match=r"sse9.*avx2"):
        native.isas()


def test_it_can_be_switched_off() -> None:
    with switched(SYMBIOSIS_PRIV_NATIVE="0"):
        assert native.library() is None
        assert native.isas() == ()


@pytest.mark.usefixtures("reload")
@pytest.mark.parametrize("fault", ["absent", "damaged", "stale"])
def test_a_library_that_does_not_fit_is_ignored(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "libring.so"
    if fault == "damaged":
        library.write_bytes(b"\x7fELF")
    if fault == "stale":
        if native.library() is None:
            pytest.skip("installed without a C compiler")
        native._load.cache_clear()
        shutil.copy(native._LIBRARY, library)
        monkeypatch.setattr(native, "_FOLDER", tmp_path)  # with other sources, there is no library
    monkeypatch.setattr(native, "_LIBRARY", library)
    with caplog.at_level(logging.INFO, logger="symbiosis_priv.native"):
        assert native.library() is None
    assert "compiler" in caplog.text if fault == "absent" else "install symbiosis-priv again" in caplog.text


@pytest.mark.usefixtures("reload")
def test_a_library_that_flushes_subnormal_numbers_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if native.library() is None:
        pytest.skip("installed without a C compiler")
    native._load.cache_clear()
    load = ctypes.CDLL

    def flushing(name: str) -> ctypes.CDLL:
        torch.set_flush_denormal(True)
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", flushing)
    assert native.library() is None
    assert native._keeps_subnormals()
    assert "without such flags" in caplog.text


def quick_compiler(folder: Path) -> str:
    """A C compiler that does not optimise."""
    quick = folder / "cc"
    quick.write_text('#!/bin/sh\nexec cc "$@" -O0\n', encoding="utf-8")  # the last -O counts
    quick.chmod(0o700)
    return str(quick)


def build_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, by_pip: bool) -> Path:
    """Build a wheel from a copy of the distributed files, as users do: with pip, or with the build backend that pip
    calls. The build backend comes from this environment."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "libring.so")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    if by_pip:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, source], check=True, capture_output=True, timeout=120)
    else:
        monkeypatch.chdir(source)
        importlib.import_module("hatchling.build").build_wheel(str(folder))
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize("compiler", ["present", "absent", "broken"])
def test_a_wheel_installs_with_and_without_a_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYMBIOSIS_PRIV_NATIVE", raising=False)
    pytest.importorskip("hatchling")  # the build backend, offline; `make` installs it
    if compiler == "present" and shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv(
        "CC", {"present": quick_compiler(tmp_path), "absent": "/nonexistent/cc", "broken": "false"}[compiler]
    )
    compiled = compiler == "present"
    wheel = build_wheel(tmp_path, monkeypatch, by_pip=compiled)
    assert wheel.name.endswith("-py3-none-any.whl") is not compiled
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert ("symbiosis_priv/native/libring.so" in names) is compiled
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules | {"tenant/endpoint/page/static/page.js"} <= names
    loader = tmp_path / "installed" / "symbiosis_priv" / "native" / "__init__.py"
    assert [isa.name for isa in runpy.run_path(str(loader))["isas"]()[:1]] == ["PORTABLE"] * compiled


def test_two_builds_have_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other folders, at other times, by the optimising compiler: who builds a release again gets its checksums."""
    pytest.importorskip("hatchling")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    built = []
    for name, clock in (("one", 1_600_000_000), ("another/folder", 1_650_000_000)):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        built.append(build_wheel(folder, monkeypatch, by_pip=False))
    assert built[0].name == built[1].name
    assert built[0].read_bytes() == built[1].read_bytes()
