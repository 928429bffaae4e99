"""Figures in a file, and tables of them in a document."""

import os
import sys
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError, ProtocolError
from tenant.bench import report
from tenant.bench.options import Progress, benchmark
from tenant.bench.report import Goal, Table, render, this_run

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


def test_values_that_all_rows_share_are_above_the_table() -> None:
    table = Table.of(ROWS)
    assert table.shared == {"width": "768"}
    assert table.headings == ["variant", "wall, s", "helper cpu, s", "tenant peak, MiB"]
    assert table.rows == [["whole, fp32", "1.25", "–", "1,650"], ["split, pad", "0.5", "3.6", "12.3"]]
    shown = render([this_run("step", ROWS, [Goal("it", None, at_most=1), Goal("that", 0.5, at_least=0.4)])])
    assert "In every row: width 768." in shown
    assert "| split, pad | 0.5 | 3.6 | 12.3 |" in shown
    assert "Goal missed: it, at most 1: –.\n\nGoal reached: that, at least 0.4: 0.5.\n" in shown


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
