"""Each example as its reader runs it: a fleet of real vLLM engines, real Megatron ranks, and nothing left of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 400
"""Up to 200 were seen on two busy cores, half of which engines take to start."""
MARK_VARIABLE = "WEIGHTPLANE_TEST_MARK"


def output_of(directory: Path, name: str, *options: str) -> str:
    """What an example prints. It must end well and leave no process."""
    mark = uuid.uuid4().hex
    words = ["--listen", f"127.0.0.1:{free_port()}", "--keep", str(directory / name)]
    command = [sys.executable, "-m", "examples.run", name, *words, "--cache", str(directory / "models"), *options]
    environment = os.environ | {MARK_VARIABLE: mark}
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert marked(mark) == []
    return found.stdout


def marked(mark: str) -> list[int]:
    def carries(entry: Path) -> bool:
        try:
            return f"{MARK_VARIABLE}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and carries(entry)]


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(number) for number in found.groups()]


def test_sync_grpo_raises_the_reward_on_prompts_that_are_never_trained_on(tmp_path: Path) -> None:
    said = output_of(tmp_path, "sync_grpo")
    before, after = numbers(r"held-out reward ([\d.]+) before, ([\d.]+) after 8 steps", said)
    assert after > before + 0.1
    assert re.findall(r"version (\S+)", said) == [f"1.{n}" for n in range(2, 10)]


def test_R2_async_grpo_overlaps_and_trains_on_nothing_more_than_one_commit_behind(tmp_path: Path) -> None:
    said = output_of(tmp_path, "async_grpo", "--steps", "10")
    before, after = numbers(r"held-out reward ([\d.]+) before, ([\d.]+) after 10 steps", said)
    assert after > before + 0.05
    overlapped, trained = numbers(r"in flight for ([\d.]+) of ([\d.]+) s of training", said)
    assert 0 < overlapped <= trained
    lags = {int(lag): int(tokens) for lag, tokens in re.findall(r"lag (\d+): .* (\d+) tokens", said)}
    assert lags.keys() == {0, 1}
    assert sum(lags.values()) == 10 * 64 * 16


def test_distill_moves_the_student_toward_a_teacher_that_never_changes(tmp_path: Path) -> None:
    said = output_of(tmp_path, "distill")
    before, after = numbers(r"KL to the teacher ([\d.]+) before, ([\d.]+) after", said)
    assert after < 0.8 * before


def test_engines_learn_to_count_from_a_megatron_loop_that_knows_nothing_of_the_demo(tmp_path: Path) -> None:
    said = output_of(tmp_path, "megatron_loop")
    counted = re.findall(r"step (\d+)  loss \S+  (1\.\d)  *counts: \(7, 8, 9\) (\(.*\))", said)
    assert [(step, version) for step, version, _ in counted] == [("20", "1.2"), ("40", "1.3"), ("60", "1.4")]
    assert counted[-1][2] == "(10, 11, 12, 13, 14)"
