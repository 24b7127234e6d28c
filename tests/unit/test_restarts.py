"""Engines that die are started again with patience, but not for ever."""

from __future__ import annotations

from engine_agent.daemon.restarts import Restarts

WAITS = (1.0, 30.0)


def test_the_wait_doubles_up_to_a_limit_and_ends() -> None:
    restarts = Restarts(limit=7, waits=WAITS)
    assert [restarts.died(0.0) for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_a_healthy_stretch_begins_the_count_and_the_wait_anew() -> None:
    restarts = Restarts(limit=2, waits=WAITS, healthy_seconds=60.0)
    assert [restarts.died(lived) for lived in (0.0, 59.9, 60.0, 0.0, 0.0)] == [1.0, 2.0, 1.0, 2.0, None]


def test_an_agent_that_may_not_restart_its_engine_does_not() -> None:
    assert Restarts(limit=0, waits=WAITS).died(3600.0) is None
