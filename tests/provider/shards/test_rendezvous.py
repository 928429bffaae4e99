"""Ranks on one machine meet in a folder: counters are small files that only this user can read."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from provider.shards.rendezvous import FileCounters


@given(steps=st.lists(st.tuples(st.sampled_from(["beats/0", "beats/1"]), st.integers(0, 5)), max_size=20))
def test_counters_count_and_do_not_grow(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = FileCounters(Path(folder)), FileCounters(Path(folder))
        totals = {"beats/0": 0, "beats/1": 0}
        for key, amount in steps:
            totals[key] += amount
            assert writer.add(key, amount) == totals[key]
            assert {name: reader.add(name, 0) for name in totals} == totals
        for file in Path(folder).iterdir():
            assert file.stat().st_size <= 8
            assert not file.stat().st_mode & 0o077
