"""What several of these tests look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.daemon import building
from engine_agent.memory.engine import MemoryEngine
from tests.cases.engines import Hands, lay_hands


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[MemoryEngine]:
    """Every in-memory engine that was started, life after life."""
    started: list[MemoryEngine] = []

    class Noted(MemoryEngine):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            started.append(self)

    monkeypatch.setattr(building, "MemoryEngine", Noted)
    return started


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """A hand on every in-memory engine, by its name."""
    return lay_hands(monkeypatch)


@pytest.fixture
def failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of armed points: write a file of the point's name."""
    directory = tmp_path / "failpoints"
    directory.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    return directory
