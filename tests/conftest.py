"""What every test module may rely on: it finds the environment as the run began, whatever ran before it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _environment_of_the_run() -> Iterator[None]:
    """An engine that a module starts in this process sets variables, vLLM's own code too (LOCAL_WORLD_SIZE and others).
    Processes that later modules start must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
