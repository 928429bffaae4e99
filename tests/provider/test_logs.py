"""How much is logged about events that clients cause."""

import logging

import pytest

from provider import logs


def test_events_that_clients_cause_are_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("provider.logs.time.monotonic", lambda: now)
    log = logs.EventLog("provider.test")
    with caplog.at_level(logging.INFO, logger="provider.test"):
        for _ in range(1000):
            log.often("knock")
        log.often("other")
        now = 1.5
        log.often("knock")
    events = [record.getMessage() for record in caplog.records]
    assert events.count("knock") == 6
    assert events.count("other") == 1
    assert getattr(caplog.records[-1], logs._FIELDS)["suppressed"] == 995
