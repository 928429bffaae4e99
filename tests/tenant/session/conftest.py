"""Fixtures for tests of sessions."""

import pytest


@pytest.fixture(autouse=True)
def _hear_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, every present executor has answered a probe before the first request."""
    monkeypatch.setattr("tenant.routing.probing._GRACE_S", 2.0)
