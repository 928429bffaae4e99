"""`look` on machines made of files: a closed one, and the same one with each fault made on purpose."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from symbiosis_priv.system.machine import look
from tests.cases import table

CLOSED, FAULTS = (table(__file__, name) for name in ("closed", "faults"))


@pytest.fixture
def open_on(tmp_path: Path) -> Callable[..., set[str]]:
    """`open_on(files)`: the names of what is open on the closed machine with these files; False: without the file."""

    def open_on(files: dict[str, str | bool]) -> set[str]:
        cache = tmp_path / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        for name, text in {**CLOSED, **files}.items():
            if isinstance(text, str):
                path = tmp_path / "root" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.format(cache=cache) if "{" in text else text)
        return {finding.name for finding in look(cache, root=tmp_path / "root") if finding.advice}

    return open_on


@pytest.fixture(autouse=True)
def no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def test_nothing_is_open_on_a_closed_machine(open_on: Callable[..., set[str]]) -> None:
    assert open_on({}) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_no_other(open_on: Callable[..., set[str]], name: str) -> None:
    assert open_on(FAULTS[name]) == {name}


def test_a_cache_that_others_can_read_is_found(open_on: Callable[..., set[str]], tmp_path: Path) -> None:
    assert open_on({}) == set()
    (tmp_path / "cache").chmod(0o750)
    assert open_on({}) == {"rights of the cache"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("none", ""), (".dockerenv", ""), ("run/.containerenv", ""), ("proc/1/environ", "A=b\0container=podman\0")],
)
def test_a_container_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    *_, isolation = look(tmp_path, root=tmp_path)
    assert isolation.state.endswith(", in a container") == (name != "none")


def test_core_files_are_found(open_on: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open_on({}) == {"core files"}


def test_this_machine_can_be_looked_at() -> None:
    assert len(list(look(Path.home() / ".cache"))) == 10
