"""Failpoints: off unless armed, once each, and what a hold waits for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from controlplane import failpoints
from tests.support.eventually import eventually_blocking


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_without_the_variable_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failpoints.DIRECTORY_VARIABLE, raising=False)
    (tmp_path / "a.point").write_text("raise")
    failpoints.hit("a.point")


def test_a_point_fires_once_and_not_before_its_count(points: Path) -> None:
    (points / "a.point").write_text("raise after=2")
    failpoints.hit("a.point", 1)
    with pytest.raises(failpoints.Injected, match=r"a\.point"):
        failpoints.hit("a.point", 2)
    failpoints.hit("a.point", 2)


def test_a_point_whose_file_is_not_written_yet_is_left_to_be_armed(points: Path) -> None:
    (points / "a.point").touch()
    failpoints.hit("a.point")
    (points / "a.point").write_text("raise")
    with pytest.raises(failpoints.Injected):
        failpoints.hit("a.point")


def test_a_hold_says_that_it_was_reached_and_goes_on_when_let_go(points: Path) -> None:
    (points / "a.point").write_text("hold")
    held = threading.Thread(target=failpoints.hit, args=("a.point",))
    held.start()
    eventually_blocking((points / "a.point.reached").exists)
    assert held.is_alive()
    (points / "a.point.go").touch()
    held.join(60)
    assert not held.is_alive()


def test_a_hold_that_is_forgotten_ends_by_itself(points: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "HOLD_SECONDS", 0.05)
    (points / "a.point").write_text("hold")
    failpoints.hit("a.point")
    assert (points / "a.point.reached").exists()
