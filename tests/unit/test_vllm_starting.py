"""A start is waited for while it lives; and what it said is kept, in files that stay small."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_agent.vllm.engine_log import KEPT_BYTES, LIMIT_BYTES, EngineLog
from engine_agent.vllm.starting import WORK_BYTES, Signs, signs_of, started

STILL = Signs(0, frozenset({7}), 1.0, 0)


def attempt() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def test_a_start_that_shows_no_sign_of_life_is_given_up_before_its_limit() -> None:
    cause = await asyncio.wait_for(started(attempt(), lambda: STILL, 0.05, 3600.0), 60)
    assert cause is not None
    assert "no sign of life for 0.05 s" in cause


async def test_a_start_that_works_is_waited_for_up_to_its_limit() -> None:
    lines = iter(range(10**6))
    cause = await started(attempt(), lambda: Signs(next(lines), frozenset(), 0.0, 0), 0.02, 0.2)
    assert cause == "no engine core within 0.2 s"


async def test_a_start_that_ends_is_waited_for_no_longer() -> None:
    done = attempt()
    asyncio.get_running_loop().call_soon(done.set_result, None)
    assert await asyncio.wait_for(started(done, lambda: STILL, 3600.0, 3600.0), 60) is None


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (Signs(1, frozenset({7}), 1.0, 0), True),
        (Signs(0, frozenset({7, 8}), 1.0, 0), True),
        (Signs(0, frozenset(), 1.0, 0), True),
        (Signs(0, frozenset({7}), 1.5, 0), True),
        (Signs(0, frozenset({7}), 1.0, WORK_BYTES), True),
        (Signs(0, frozenset({7}), 1.01, 100), False),
    ],
)
def test_signs_of_life_are_lines_processes_and_work(after: Signs, moved: bool) -> None:
    assert after.moved_since(STILL) is moved


def test_a_process_that_ended_meanwhile_is_no_sign_and_no_error() -> None:
    here = signs_of(5, [psutil.Process()])
    assert (here.log_bytes, here.pids) == (5, frozenset({os.getpid()}))
    assert here.processor_seconds > 0


@pytest.fixture
def log() -> Iterator[EngineLog]:
    log = EngineLog("INFO")
    yield log
    log.remove()


def handlers(log: EngineLog) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(log.config.read_text())["handlers"]
    return made


def test_the_last_hundred_lines_of_all_levels_are_kept_and_errors_apart(log: EngineLog) -> None:
    assert log.last_lines() == []
    everything, errors = (Path(handlers(log)[name]["filename"]) for name in ("everything", "errors"))
    everything.write_text("".join(f"line {i}\n" for i in range(250)))
    errors.write_text("Core: it broke\nTraceback (most recent call last):\n  File x\n")
    assert log.last_lines() == [f"line {i}" for i in range(150, 250)]
    assert log.tail() == "Core: it broke"


def test_a_log_that_grew_too_long_is_cut_and_written_on(log: EngineLog) -> None:
    path = Path(handlers(log)["everything"]["filename"])
    path.write_text("x" * 79 + "\n")
    with path.open("a") as writer:
        writer.write(("y" * 79 + "\n") * (LIMIT_BYTES // 80))
        writer.flush()
        log.trim()
        assert log.size <= KEPT_BYTES + 1
        writer.write("the next\n")
    assert log.last_lines(2) == ["y" * 79, "the next"]
