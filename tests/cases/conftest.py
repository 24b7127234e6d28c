"""What holds for every case: ends are sudden, and the next life of an engine does not wait for its turn."""

from __future__ import annotations

import pytest

from controlplane.rpc import server
from engine_agent.daemon import agent
from tests.cases.engines import Hands, lay_hands


@pytest.fixture(autouse=True)
def _sudden_ends_and_quick_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops lets nobody finish: the nearest to a crash within this process. Both waits are for peace on
    real machines; nothing here depends on their lengths."""
    monkeypatch.setattr(server, "STOP_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(agent, "RESTART_WAIT_SECONDS", (0.05, 1.0))


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """A hand on every in-memory engine, by its name."""
    return lay_hands(monkeypatch)
