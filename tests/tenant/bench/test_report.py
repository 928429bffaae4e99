"""Figures in a file, and tables of them in a document."""

import math
import os
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError, ProtocolError
from tenant.bench import report
from tenant.bench.options import Progress, benchmark
from tenant.bench.report import Goal, Table, render, this_run
from tenant.session import tally

ROWS: list[report.Row] = [
    {"width": 768, "variant": "whole, fp32", "wall_s": 1.25, "helper_cpu_s": None, "tenant_peak_mib": 1650.0},
    {"width": 768, "variant": "split, pad", "wall_s": 0.5, "helper_cpu_s": 3.6, "tenant_peak_mib": 12.34},
]


def test_a_report_has_machine_date_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/symbiosis-priv", "bench", "step", "--json", "a file.json"])
    report.write(tmp_path / "r.json", this_run("step", ROWS))
    again = report.read(tmp_path / "r.json")
    assert again.rows == ROWS
    assert again.benchmark == "step"
    assert again.machine == report.this_machine()
    assert again.machine.cores == os.cpu_count()
    assert again.versions.keys() >= {"symbiosis-priv", "python", "torch"}
    assert again.command == "symbiosis-priv bench step --json 'a file.json'"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"rows": []}', b'{"schema": "\xff"}', b"[" * 100_000])
def test_other_files_are_not_reports(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ConfigError, match="not a report of"):
        report.read(tmp_path / "r.json")


def test_reports_of_other_releases_are_refused(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(this_run("step", ROWS), schema=report.SCHEMA + 1)
    report.write(tmp_path / "r.json", newer)
    with pytest.raises(ConfigError, match="measure again"):
        report.read(tmp_path / "r.json")


def test_values_that_all_rows_share_are_above_the_table() -> None:
    table = Table.of(ROWS)
    assert table.shared == {"width": "768"}
    assert table.headings == ["variant", "wall, s", "helper cpu, s", "tenant peak, MiB"]
    assert table.rows == [["whole, fp32", "1.25", "–", "1,650"], ["split, pad", "0.5", "3.6", "12.3"]]
    shown = render([this_run("step", ROWS, [Goal("it", None, at_most=1), Goal("that", 0.5, at_least=0.4)])])
    assert "In every row: width 768." in shown
    assert "| split, pad | 0.5 | 3.6 | 12.3 |" in shown
    assert "Goal missed: it, at most 1: –.\n\nGoal reached: that, at least 0.4: 0.5.\n" in shown


def test_a_page_has_a_section_per_benchmark() -> None:
    step, token = this_run("step", ROWS), this_run("token", ROWS)
    page = render([step, token, step])
    assert [line for line in page.splitlines() if line.startswith("#")] == ["## step", "## token"]
    assert page.partition("## token")[0].count("| split, pad |") == 2


def test_a_figure_that_is_not_a_number_reaches_no_goal_in_the_file(tmp_path: Path) -> None:
    report.write(tmp_path / "r.json", this_run("step", ROWS, [Goal("it", math.nan, at_least=0)]))
    assert [(goal.measured, goal.verdict) for goal in report.read(tmp_path / "r.json").goals] == [(None, "missed")]


def test_parts_are_recorded_only_inside_a_recording() -> None:
    tally.record("mask", since=tally.clock())
    with tally.recorded() as outer:
        began = tally.clock()
        for _ in range(2):
            tally.record("mask", since=began - 0.001)
        with tally.recorded() as inner:
            tally.record("quantise", since=began)
    assert outer.keys() == {"mask"}
    seconds = outer["mask"]
    assert 0.002 <= seconds <= 0.002 + 2 * (tally.clock() - began)
    assert inner.keys() == {"quantise"}
    tally.record("mask", since=began)
    assert outer["mask"] == seconds


def test_no_warnings_of_libraries_are_between_the_figures() -> None:
    """transformers warns about names that peft still uses; benchmarks hide these warnings, as commands do."""

    @benchmark("warning")
    def warning(folder: Path, progress: Progress) -> list[report.Row]:
        warnings.warn_explicit("old name", FutureWarning, "modeling_utils.py", 1, module="transformers.modeling_utils")
        return ROWS

    warning()


def test_wrong_answers_are_raised_after_the_figures_were_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("faulty")
    def faulty(folder: Path, progress: Progress) -> list[report.Row]:
        return [{**row, "wrong": 1} for row in ROWS]

    with pytest.raises(ProtocolError, match="2 answers differ"):
        faulty(json=tmp_path / "r.json")
    assert "split, pad" in capsys.readouterr().out
    assert len(report.read(tmp_path / "r.json").rows) == 2


@given(measured=st.floats(allow_nan=True), limit=st.floats(0.01, 100))
def test_at_most_and_at_least_are_symmetric(measured: float, limit: float) -> None:
    most = Goal(what="it", measured=measured, at_most=limit)
    least = Goal(what="it", measured=measured, at_least=limit)
    if math.isnan(measured):
        assert not most.reached
        assert not least.reached
    else:
        assert most.reached or least.reached
        assert (most.reached and least.reached) == (measured == limit)
    assert most.wanted.startswith("at most")
    assert least.wanted.startswith("at least")
