"""`bench abuse` with a real provider and real abusers: counters and comparisons, not speed."""

from pathlib import Path

import pytest

from tenant.bench.report import read
from threat_model.availability.abuse import abuse


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="memory and time are read from /proc")
def test_every_abuse_is_measured_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threat_model.availability.abuse.VISITS", 10)
    monkeypatch.setattr("threat_model.availability.abuse._DECODING_MS", (0.5,))
    abuse(hidden=64, seconds=0.1, threads=1, json=tmp_path / "abuse.json")
    rows = read(tmp_path / "abuse.json").rows
    found = {str(row["abuse"]): row for row in rows}
    assert all(row["wrong"] == 0 for row in rows)
    for row in rows:
        alone, beside = float(row["alone_p50_ms"] or 0), float(row["beside_p50_ms"] or 0)
        assert row["beside_over_alone"] == pytest.approx(beside / alone)
        assert 0 < alone <= float(row["alone_p99_ms"] or 0)
        assert 0 < beside <= float(row["beside_p99_ms"] or 0) <= float(row["longest_ms"] or 0)
        assert int(row["left_files"] or 0) <= 0, row  # a request for the counts may have used one before
    named = {
        "control: a process that only computes": ["nothing"],
        "a row every 0.5 ms, beside fine-tuning": ["connections 1", "requests "],
        "a flood of large requests": ["connections 4", "requests "],
        "answers that nobody reads": ["connections 16", "requests 16"],
        "payloads that never come": ["connections 16"],
        "requests whose tenant leaves": ["connections "],
        "10 connections": ["connections 10"],
        "400 silent connections a second": ["pending handshakes "],
        "a tenant revoked in mid-request": ["connections 4", "requests "],
    }
    assert set(found) == set(named)
    for name, words in named.items():
        assert all(word in str(found[name]["counted"]) for word in words), (name, found[name]["counted"])
