"""Figures on their way into a file, and from there into a document."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.bench import processes, report
from tenant.bench.commands.showing import measuring
from tenant.bench.markdown import Table, render, update
from tenant.bench.scale import picture, slope
from tenant.session import spans

ROWS: list[report.Row] = [
    {"width": 768, "variant": "whole, fp32", "wall_s": 1.25, "helper_cpu_s": None, "tenant_peak_mib": 1650.0},
    {"width": 768, "variant": "split, pad", "wall_s": 0.5, "helper_cpu_s": 3.6, "tenant_peak_mib": 12.34},
]


def test_a_report_says_where_when_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/symbiosis-priv", "bench", "step", "--json", "a file.json"])
    report.write(tmp_path / "r.json", report.report("step", ROWS))
    again = report.read(tmp_path / "r.json")
    assert again.rows == ROWS
    assert again.benchmark == "step"
    assert again.machine == report.this_machine()
    assert again.machine.cores == os.cpu_count()
    assert again.versions.keys() >= {"symbiosis-priv", "python", "torch"}
    assert again.command == "symbiosis-priv bench step --json 'a file.json'"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"rows": []}', b'{"schema": "\xff"}', b"[" * 100_000])
def test_what_is_no_report_is_called_that(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ConfigError, match="no report of"):
        report.read(tmp_path / "r.json")


def test_reports_of_other_releases_are_refused(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(report.report("step", ROWS), schema=report.SCHEMA + 1)
    report.write(tmp_path / "r.json", newer)
    with pytest.raises(ConfigError, match="measure again"):
        report.read(tmp_path / "r.json")


def test_what_all_rows_share_stands_above_them() -> None:
    table = Table.of(ROWS)
    assert table.shared == {"width": "768"}
    assert table.headings == ["variant", "wall, s", "helper cpu, s", "tenant peak, MiB"]
    assert table.rows == [["whole, fp32", "1.25", "–", "1,650"], ["split, pad", "0.5", "3.6", "12.3"]]
    shown = render(report.report("step", ROWS))
    assert "In every row: width 768." in shown
    assert "| split, pad | 0.5 | 3.6 | 12.3 |" in shown


def test_a_document_changes_between_its_markers_alone(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    text = (
        "# Benchmarks\n\n<!-- bench:step:begin -->\nold\n<!-- bench:step:end -->\n\n<!-- bench:scale:begin -->\nkept\n"
    )
    page.write_text(text + "<!-- bench:scale:end -->\nthe end\n")
    found = report.report("step", ROWS)
    update(page, [found, found])
    changed = page.read_text()
    assert changed.startswith("# Benchmarks\n\n<!-- bench:step:begin -->\n`symbiosis-priv")
    assert changed.endswith("<!-- bench:scale:begin -->\nkept\n<!-- bench:scale:end -->\nthe end\n")
    assert "old" not in changed
    assert changed.count("| split, pad |") == 2
    update(page, [found])
    assert page.read_text().count("| split, pad |") == 1
    with pytest.raises(ConfigError, match="bench:token:begin"):
        update(page, [report.report("token", ROWS)])


@given(
    exponent=st.floats(-3, 3),
    factor=st.floats(0.1, 100),
    places=st.lists(st.integers(1, 10_000), min_size=2, max_size=6, unique=True),
)
def test_the_slope_of_a_power_is_its_exponent(exponent: float, factor: float, places: list[int]) -> None:
    line = [(float(x), 1e6 * factor * x**exponent / min(1.0, *(p**exponent for p in places))) for x in places]
    found = slope(line)
    assert found is not None
    assert math.isclose(found, exponent, abs_tol=1e-6)


def test_one_place_has_no_slope() -> None:
    assert slope([(3.0, 1.0)]) is None
    assert slope([(3.0, 1.0), (3.0, 2.0)]) is None


def test_a_picture_has_a_line_per_variant() -> None:
    rows: list[report.Row] = [
        {"axis": "rows", "at": at, "variant": variant, "tenant_cpu_s": 0.1 * at}
        for variant in ("whole, fp32", "split, pad")
        for at in (64, 128)
    ]
    drawn = picture(rows, "rows")
    assert drawn.count("<polyline") == 2
    assert "split, pad: slope 1.00" in drawn


CHILD = """
import time
memory = bytearray(128 << 20)
while time.process_time() < 0.25:  # the system counts in hundredths, rounded down, of several kinds
    pass
print("done", flush=True)
input()
"""


def test_costs_are_those_of_a_process_and_its_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert 0.2 <= processes.cpu_seconds([process.pid]) < 60
        assert processes.peak_mib([process.pid]) > 128
        process.communicate(b"\n")
    assert processes.cpu_seconds([process.pid]) == 0
    assert processes.peak_mib([process.pid]) == 0


def test_parts_are_recorded_only_while_somebody_records() -> None:
    spans.took("mask", since=spans.clock())
    with spans.recorded() as outer:
        began = spans.clock()
        for _ in range(2):
            spans.took("mask", since=began - 0.001)
        with spans.recorded() as inner:
            spans.took("quantise", since=began)
    assert outer.keys() == {"mask"}
    seconds = outer["mask"]
    assert 0.002 <= seconds <= 0.002 + 2 * (spans.clock() - began)
    assert inner.keys() == {"quantise"}
    spans.took("mask", since=began)
    assert outer["mask"] == seconds


def test_no_librarys_warnings_stand_between_the_figures() -> None:
    """As in the tenant's commands: transformers tells of names that peft still uses."""
    with measuring():
        warnings.warn_explicit("old name", FutureWarning, "modeling_utils.py", 1, module="transformers.modeling_utils")
