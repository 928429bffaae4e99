"""What every test of sessions needs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _hear_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a session has heard from every executor that is there before it asks the first one."""
    monkeypatch.setattr("tenant.routing.probing._GRACE_S", 2.0)
