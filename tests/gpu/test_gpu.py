"""`make gpu` without a GPU: every section on the CPU, and sections that fail or hang."""

import contextlib
import os
import sys
import time
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu import sections
from tests.gpu.__main__ import BUDGETS_S, Outcome, main, run
from tests.gpu.chips import ROWS, measured, table
from tests.gpu.sections import SECTIONS, Options, Row

SECONDS = 480


def test_the_time_limits_sum_to_eight_minutes_at_most() -> None:
    assert sum(BUDGETS_S.values()) <= SECONDS
    assert BUDGETS_S.keys() == SECTIONS.keys()


def test_the_device_can_become_the_current_one() -> None:
    assert torch._utils._get_device_index(torch.device(Options(cpu=False).device)) == 0  # as `set_device` does


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("section", ["machine", "kernels", "products", "transfers", "nccl", "llama-1b"])
def test_a_section_on_the_cpu(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`provider` and `llama-8b` use the same code as `llama-1b`; `tests` would run this test."""
    monkeypatch.setattr(os, "environ", {**os.environ, "TRITON_INTERPRET": "0"})
    rows = list(SECTIONS[section](Options(cpu=True)))
    assert rows
    assert not any(row.get("equal") is False or row.get("result", "exact") != "exact" for row in rows)


@pytest.mark.parametrize(
    ("versions", "imported", "missing"),
    [
        ({"numpy": "2", "no-such-package": "", "transformers": "5.17.1"}, "json", "no-such-package transformers .*"),
        ({"transformers": "5.23"}, "json", ""),
        ({"transformers": "5.23.0+a"}, "no_such_module", "no_such_module"),
    ],
)
def test_a_machine_without_a_package_says_what_to_type(
    versions: dict[str, str], imported: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one that is too old, or that lacks another one."""
    monkeypatch.setattr(sections, "_NEEDED", tuple(versions))
    monkeypatch.setattr(sections, "version", versions.__getitem__)
    monkeypatch.setattr(sections, "_IMPORTED", (imported,))
    rows: list[Row] = []
    expected = pytest.raises(SystemExit, match=rf"pip download --dest .gpu .* constraints.txt {missing}$")
    with expected if missing else contextlib.nullcontext():
        rows.extend(SECTIONS["machine"](Options(cpu=True)))


def needed_by(*names: str) -> set[str]:
    """Packages, and what they need themselves."""
    found, left = set[str](), list(names)
    while left:
        if (name := canonicalize_name(left.pop())) not in found:
            found.add(name)
            needs = map(Requirement, requires(name) or ())
            left += (one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""}))
    return found


def test_all_that_a_machine_with_torch_alone_lacks_is_listed() -> None:
    listed = {*sections._NEEDED, *sections._BESIDE_TRANSFORMERS}
    assert needed_by(*sections._NEEDED) - needed_by("torch", "triton") <= listed


def test_a_machine_whose_torch_sees_no_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs no other section."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows: list[Row] = []
    with pytest.raises(SystemExit, match=r"sees no GPU \(driver: "):
        rows.extend(SECTIONS["machine"](Options(cpu=False)))
    assert rows[-1]["here"] is False


def test_the_table_of_chips_has_a_column_for_what_was_measured() -> None:
    times = [{"weight_bits": 10, "rows": count, "ms": 1.0, "over_bfloat16": count / 2} for count in ROWS]
    for gpu, name in (("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA L4", "NVIDIA L4")):
        found = measured({"sections": [{"rows": [{"gpu": gpu}]}, {"rows": times}]})
        assert found == {(name, 10): [0.5, 8, 128, 2048]}
        lines = [line for line in table(found) if line.endswith("| 0.5, 8, 128, 2.05e+03 |")]
        assert [line.split("|")[1:3] for line in lines] == [[f" {name} ", " 10 "]]
    assert measured({"sections": [{"rows": [{"what": "forward"}]}]}) == {}
    assert "Nothing was measured" in table({})[-1]
    assert "measured" not in table()[0]


def test_building_the_library_takes_no_time_of_a_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, budgets = [0.0], list[float]()

    def build(*_: object, **__: object) -> None:
        now[0] += 50

    def noted(section: str, *_: object, budget_s: float, **__: object) -> Outcome:
        budgets.append(budget_s)
        return Outcome(section, "ok", 0, "", [{"here": False}])

    for name, value in {
        "ROOT": tmp_path,
        "_environment": lambda *_, **__: {},
        "time": SimpleNamespace(monotonic=lambda: now[0]),
        "subprocess": SimpleNamespace(run=build),
        "run": noted,
    }.items():
        monkeypatch.setattr(f"tests.gpu.__main__.{name}", value)
    main(["--json", str(tmp_path / "gpu.json")])
    assert now == [50]
    assert budgets == [BUDGETS_S["machine"]]


def outcome(script: str, *, budget_s: float = 20.0) -> tuple[str, list[Row], str]:
    found = run("kernels", [sys.executable, "-c", script], budget_s=budget_s, environment={**os.environ})
    return found.status, found.rows, found.error


def test_a_section_that_fails_shows_its_error_and_the_rows_before_it() -> None:
    assert outcome("print('{}')") == ("ok", [{}], "")
    status, rows, error = outcome("print('{\"rows\": 1}', flush=True); raise ValueError('no kernel image')")
    assert (status, rows) == ("failed", [{"rows": 1}])
    assert "no kernel image" in error


def test_a_section_that_hangs_is_killed_with_its_processes() -> None:
    """And says where it hangs."""
    script = (
        "import subprocess, sys, time; print('{}', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    begun = time.monotonic()
    status, rows, error = outcome(script, budget_s=1.0)
    assert (status, rows) == ("out of time", [{}])
    assert 'File "<string>", line 1' in error
    assert time.monotonic() - begun < 20
