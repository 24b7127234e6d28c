"""A canary is alone in its core: whom vLLM's scheduler takes up while one is in work."""

from __future__ import annotations

from typing import Any

import pytest

from engine_agent.vllm.scheduler import CANARY, let_canaries_be_alone

KEPT = ("r1", "r2", "r3")


class Scheduler:
    """As vLLM's: takes up what waits, in the order of priorities, up to its limit."""

    def __init__(self, *waiting: str, limit: int = 4) -> None:
        self.max_num_active_reqs = limit
        self.requests: dict[str, Any] = dict.fromkeys(waiting)
        self.running: list[str] = []
        self.paused = False

    def schedule(self, *, fail: bool = False) -> list[str]:
        if fail:
            raise RuntimeError("no memory")
        if self.paused:
            return []
        waiting = sorted(set(self.requests) - set(self.running), key=lambda name: not name.startswith(CANARY))
        self.running += waiting[: max(0, self.max_num_active_reqs - len(self.running))]
        return self.running

    def pause(self) -> None:
        self.paused = True

    def finish(self, name: str) -> None:
        del self.requests[name]
        self.running.remove(name)


def test_kept_requests_wait_until_the_core_is_let_run_after_the_canary() -> None:
    canary = f"{CANARY}1-0"
    scheduler = Scheduler(*KEPT, canary)
    let_canaries_be_alone(scheduler, scheduler.pause)
    for _ in range(2):
        assert scheduler.schedule() == [canary]
    scheduler.finish(canary)
    assert scheduler.schedule() == []
    scheduler.paused = False
    assert sorted(scheduler.schedule()) == sorted(KEPT)
    assert not scheduler.paused


def test_the_limit_is_what_it_was_whatever_a_pass_came_to() -> None:
    scheduler = Scheduler(*KEPT, f"{CANARY}1-0")
    let_canaries_be_alone(scheduler, scheduler.pause)
    with pytest.raises(RuntimeError):
        scheduler.schedule(fail=True)
    assert scheduler.max_num_active_reqs == 4


def test_without_a_canary_and_without_such_a_limit_nothing_is_changed() -> None:
    scheduler = Scheduler(*KEPT)
    let_canaries_be_alone(scheduler, scheduler.pause)
    assert sorted(scheduler.schedule()) == sorted(KEPT)
    other = Scheduler(*KEPT, f"{CANARY}1-0")
    del other.max_num_active_reqs
    plain = other.schedule
    let_canaries_be_alone(other, other.pause)
    assert other.schedule == plain
