"""The pieces of the demo that need no engine: events, verification, outcome, files, processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from controlplane.cli.crew import Crew, marked
from controlplane.cli.demo import parts
from controlplane.cli.demo.memory import tree_pss_bytes
from controlplane.cli.demo.outcome import Outcome
from controlplane.cli.demo.places import SHARED_MEMORY, Places, places
from controlplane.cli.demo.progress import Progress, follow
from controlplane.cli.demo.screen import LiveScreen, PlainScreen, Screen
from controlplane.cli.demo.settings import DemoModel, DemoSettings
from controlplane.cli.demo.verify import TOLERANCE, Answer, Comparison, compare, fixed_prompts
from controlplane.cli.ending import CommandFailed
from controlplane.core.versions import Term, WeightVersion
from controlplane.exit_codes import ExitCode
from tests.support.eventually import eventually
from tests.support.golden import assert_golden
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2

EVENTS = [
    {"event": "started", "steps": 2},
    {"event": "pushed", "step": 0, "version": 1, "term": 1, "status": "COMMITTED", "seconds": 0.5},
    {"event": "evaluated", "step": 0, "reward": 0.25, "samples": ["the river"]},
    {"event": "pushed", "step": 1, "version": 2, "term": 1, "status": "COMMITTED", "seconds": 0.3},
    {
        "event": "step_done",
        "step": 1,
        "version": 2,
        "reward": 0.3,
        "loss": 0.5,
        "seconds": {"rollout": 1.0, "train": 2.0, "push": 0.3},
    },
    {"event": "pushed", "step": 2, "version": 3, "term": 1, "status": "COMMITTED", "seconds": 0.1},
    {
        "event": "step_done",
        "step": 2,
        "version": 3,
        "reward": 0.4,
        "loss": 0.4,
        "seconds": {"rollout": 1.0, "train": 2.0, "push": 0.1},
    },
    {"event": "evaluated", "step": 2, "reward": 0.5, "samples": ["the sea"]},
    {"event": "something_new", "step": 2},
    {"event": "exported", "version": 3},
]


def version(number: int) -> WeightVersion:
    return WeightVersion(number=number, term=Term(1))


# ---- events -------------------------------------------------------------------------------------


def test_events_add_up_to_rewards_steps_and_update_times() -> None:
    progress = Progress(2)
    lines = [progress.take(event) for event in EVENTS]

    assert (progress.reward_first, progress.reward_last) == (0.25, 0.5)
    assert [s.number for s in progress.steps] == [1, 2]
    assert progress.update_seconds_median == 0.3
    assert progress.exported
    assert lines[4] == "step 1/2  reward 0.300  loss 0.5000  version 2  rollout 1.0 s  train 2.0 s  push 0.3 s"
    assert lines[8] is None


def test_a_step_done_again_after_a_resume_replaces_the_first_one() -> None:
    progress = Progress(2)
    for event in (EVENTS[4], EVENTS[6], EVENTS[4] | {"reward": 0.9}):
        progress.take(event)
    assert [(s.number, s.reward) for s in progress.steps] == [(1, 0.9)]


async def test_events_are_read_as_they_come_and_only_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    seen: list[str] = []

    async def read() -> None:
        async for event in follow(file):
            seen.append(event["event"])  # noqa: PERF401 - looked at meanwhile

    reading = asyncio.create_task(read())
    file.write_text('{"event": "a"}\n{"eve')
    await eventually(lambda: seen == ["a"])
    with file.open("a") as out:
        out.write('nt": "b"}\n')
    await eventually(lambda: seen == ["a", "b"])
    reading.cancel()


# ---- screens ------------------------------------------------------------------------------------


def fleet(number: int) -> operator_pb2.FleetView:
    def engine(name: str, known: bool) -> operator_pb2.EngineView:
        status = engine_pb2.EngineStatus(
            engine=version_pb2.EngineRef(engine_id=name),
            model="policy",
            word="serving",
            applied=version_pb2.WeightVersion(term=1, number=number),
        )
        return operator_pb2.EngineView(status=status, known=known, endpoint="127.0.0.1:1")

    served = fleet_pb2.ModelState(model="policy", served=[version_pb2.WeightVersion(term=1, number=number)])
    return operator_pb2.FleetView(
        state=fleet_pb2.FleetState(models=[served]), engines=[engine("engine-0", True), engine("engine-1", False)]
    )


def shown(screen: Screen, console: Console) -> str:
    with console.capture() as capture, screen:
        screen.say("starting")
        screen.fleet(fleet(3))
        for event in EVENTS:
            screen.event(event)
    return capture.get()


def test_without_a_terminal_each_piece_of_news_is_a_line_with_the_engines_versions() -> None:
    console = Console(width=40, force_terminal=False)
    lines = shown(PlainScreen(console, Progress(2)), console).splitlines()
    assert lines[0].endswith("s] starting")
    assert lines[-1].endswith("the trainer wrote its weights out  |  engine-0 1.3 serving  engine-1 UNKNOWN UNKNOWN")
    assert any("step 2/2  reward 0.400" in line for line in lines)


def test_on_a_terminal_the_table_has_engines_and_steps() -> None:
    console = Console(width=140, force_terminal=True, no_color=True, color_system=None)
    text = shown(LiveScreen(console, Progress(2)), console)
    assert "engine-0" in text
    assert "UNKNOWN" in text
    assert "ROLLOUT" in text
    assert "2/2" in text


# ---- verification -------------------------------------------------------------------------------

REFERENCE = [Answer((5, 6), (-0.5, -1.0)), Answer((7,), (-0.25,))]


def test_equal_answers_in_every_round_are_verified() -> None:
    assert compare(REFERENCE * 2, REFERENCE) == Comparison(equal_tokens=True, largest_difference=0.0)


@pytest.mark.parametrize(
    "second_round",
    [
        [Answer((5, 7), (-0.5, -1.0)), REFERENCE[1]],
        [Answer((5,), (-0.5,)), REFERENCE[1]],
        [Answer((5, 6), (-0.5, -1.0 - 2 * TOLERANCE)), REFERENCE[1]],
    ],
    ids=["another token", "a token less", "another logprob"],
)
def test_a_difference_in_any_round_is_not_verified(second_round: list[Answer]) -> None:
    assert not compare(REFERENCE + second_round, REFERENCE).verified


def test_no_answer_is_not_verified() -> None:
    assert not compare([], REFERENCE).verified


def test_the_prompts_are_the_same_each_time_and_within_the_vocabulary() -> None:
    assert fixed_prompts(256) == fixed_prompts(256)
    assert all(2 <= token < 256 for prompt in fixed_prompts(256) for token in prompt)


# ---- outcome ------------------------------------------------------------------------------------


GOOD = Comparison(equal_tokens=True, largest_difference=1e-6)


def outcome(**fields: object) -> Outcome:
    whole: dict[str, object] = {
        "steps": 2,
        "reward_first": 0.25,
        "reward_last": 0.5,
        "versions": {"engine-0": version(3), "engine-1": version(3)},
        "fleet_version": version(3),
        "update_seconds_median": 0.3,
        "comparisons": {
            "engine-0": Comparison(equal_tokens=True, largest_difference=2e-6),
            "engine-1": Comparison(equal_tokens=True, largest_difference=3e-6),
        },
        "seconds": 61.5,
        "pss_peak_mib": 5120,
    }
    return Outcome(**(whole | fields))  # type: ignore[arg-type]


def test_the_json_line_has_every_figure() -> None:
    assert json.loads(outcome().to_json()) == {
        "steps": 2,
        "reward_first": 0.25,
        "reward_last": 0.5,
        "versions": {"engine-0": {"term": 1, "number": 3}, "engine-1": {"term": 1, "number": 3}},
        "fleet_version": {"term": 1, "number": 3},
        "update_seconds_median": 0.3,
        "verified": True,
        "seconds": 61.5,
        "pss_peak_mib": 5120,
    }


def test_the_lines_for_people_read_as_reviewed() -> None:
    assert_golden("demo-outcome.txt", "\n".join(outcome().lines()))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, ExitCode.OK),
        ({"comparisons": None}, ExitCode.OK),
        ({"comparisons": {"engine-0": GOOD, "engine-1": Comparison(False, 0.0)}}, ExitCode.FAILED),
        ({"comparisons": {"engine-0": GOOD, "engine-1": Comparison(True, 0.1)}}, ExitCode.FAILED),
        ({"comparisons": {"engine-0": GOOD}}, ExitCode.FAILED),
        ({"comparisons": {}}, ExitCode.FAILED),
        ({"versions": {"engine-0": version(3), "engine-1": version(2)}}, ExitCode.FAILED),
        ({"versions": {"engine-0": version(3), "engine-1": None}}, ExitCode.FAILED),
        ({"fleet_version": version(2)}, ExitCode.FAILED),
        ({"fleet_version": None}, ExitCode.FAILED),
    ],
)
def test_the_code_is_0_only_if_all_is_equal_and_verified(fields: dict[str, object], code: ExitCode) -> None:
    assert outcome(**fields).code == code


# ---- files and settings -------------------------------------------------------------------------


def test_nothing_is_left_of_a_demos_files_and_shared_memory() -> None:
    with places(None, "demo-test-mark") as where:
        segment = SHARED_MEMORY / "weightplane-demo-test-mark-0123-r0-0"
        segment.write_bytes(b"x")
        (where.scratch / "left").touch()
    assert not where.scratch.exists()
    assert not segment.exists()


def test_a_kept_directory_stays_and_its_scratch_goes(tmp_path: Path) -> None:
    with places(tmp_path / "kept", "demo-test-mark") as where:
        (where.logs / "engine-0.log").write_text("words")
    assert (tmp_path / "kept/logs/engine-0.log").read_text() == "words"
    assert not where.scratch.exists()


def test_a_kept_directory_that_is_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(CommandFailed, match="not empty"), places(tmp_path, "demo-test-mark"):
        raise AssertionError("unreachable")


def test_settings_of_a_part_are_written_as_toml() -> None:
    written = parts._toml({"listen": "127.0.0.1:0", "devices": [0], "vllm": {"model": 'a "b"', "n": 2}})
    assert tomllib.loads(written) == {"listen": "127.0.0.1:0", "devices": [0], "vllm": {"model": 'a "b"', "n": 2}}


@pytest.mark.parametrize(
    ("model", "split"), [(DemoModel.SMOLLM2, "--pipeline-parallel 2"), (DemoModel.TINY, "--tensor-parallel 2")]
)
def test_each_model_is_split_over_the_ranks_as_its_heads_allow(model: DemoModel, split: str) -> None:
    where = Places(Path("/w"), Path("/s"))
    settings = DemoSettings(model, 3, True, False, None, 7, "", Path("/c"), 60.0)
    words = " ".join(parts._training_options(where, settings, Path("/m")))
    assert split in words
    assert "--steps 3" in words
    assert "--seed 7" in words
    assert "--export-dir /w/exported" in words


# ---- processes ----------------------------------------------------------------------------------

SLEEPER = "import threading; threading.Event().wait(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEPER}"
RUNAWAY = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)\n"
    "print(child.pid, flush=True)\n" + SLEEPER
)


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[Crew]:
    made = Crew(tmp_path, f"test-{os.getpid()}-{tmp_path.name}", {})
    yield made
    made.hurry = True
    await made.stop_all()


async def test_a_process_that_ends_is_named_with_its_code_and_its_last_words(crew: Crew) -> None:
    await crew.start("engine-0", [sys.executable, "-c", "print('no room'); raise SystemExit(69)"])
    with pytest.raises(CommandFailed, match=r"engine-0 ended with code 69\n  engine-0 \| no room"):
        await crew.within(60, "nothing", asyncio.Event().wait())


async def test_a_wait_that_is_over_says_for_what(crew: Crew) -> None:
    await crew.start("engine-0", [sys.executable, "-c", SLEEPER])
    with pytest.raises(CommandFailed, match="waited 0 s for both engines"):
        await crew.within(0.1, "both engines", asyncio.Event().wait())


async def test_a_process_that_does_not_end_when_asked_is_killed_at_a_second_ctrl_c(crew: Crew) -> None:
    child = await crew.start("engine-0", [sys.executable, "-c", STUBBORN])
    await eventually(lambda: child.log.read_text() == "up\n")
    stopping = asyncio.create_task(crew.stop(child))
    await asyncio.wait({stopping}, timeout=0.3)
    assert not child.ended

    crew.hurry = True
    await asyncio.wait_for(stopping, 60)
    assert child.process.returncode == -signal.SIGKILL


async def test_a_process_that_moved_to_another_session_is_ended_too(crew: Crew) -> None:
    child = await crew.start("engine-0", [sys.executable, "-c", RUNAWAY])
    await eventually(lambda: child.log.read_text().endswith("\n"))
    grandchild = psutil.Process(int(child.log.read_text()))

    await crew.stop_all()

    await eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    assert child.ended


SHARER = (
    "from multiprocessing.shared_memory import SharedMemory\n"
    "shared = SharedMemory(create=True, size=16)\n"
    "print(shared.name, flush=True)\n" + SLEEPER
)


async def test_what_a_killed_process_shared_is_gone_too(crew: Crew) -> None:
    child = await crew.start("engine-0", [sys.executable, "-c", SHARER])
    await eventually(lambda: child.log.read_text().endswith("\n"))
    segment = SHARED_MEMORY / child.log.read_text().strip().lstrip("/")
    assert segment.exists()

    crew.hurry = True
    await crew.stop(child)

    assert child.process.returncode == -signal.SIGKILL
    assert not segment.exists()


async def test_the_mark_finds_only_its_own_processes(crew: Crew) -> None:
    child = await crew.start("engine-0", [sys.executable, "-c", SLEEPER])
    assert marked(crew._mark) == [child.process.pid]
    assert marked("some-other-mark") == []


async def test_memory_is_summed_over_the_tree(crew: Crew) -> None:
    child = await crew.start(
        "engine-0", [sys.executable, "-c", f"x = b'1' * (64 << 20); print('up', flush=True); {SLEEPER}"]
    )
    await eventually(lambda: child.log.read_text() == "up\n")
    assert tree_pss_bytes(os.getpid()) > tree_pss_bytes(child.process.pid) > 64 << 20
