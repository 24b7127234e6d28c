"""What every test module may rely on: it finds the environment as the run began, whatever ran before it.

And what a whole run proves at its end: each reason of `controlplane.core.errors` was produced by the product itself, in
some test. A run of a part of the tests proves nothing about that, and says nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.core.errors import WeightplaneError

_PRODUCT = ("controlplane.", "engine_agent.", "trainer_agent.")
_NOT_PRODUCERS = ("controlplane.core.errors", "controlplane.sim.")
"""The first rebuilds what another process raised; the simulator plays engines that fail."""
_LAST = "test_each_reason_is_produced_by_some_test"
produced: dict[str, str] = {}
"""By reason: the module of the product that raised it first."""


def pytest_configure(config: pytest.Config) -> None:
    made = WeightplaneError.__post_init__

    def note(self: WeightplaneError) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name in ("__init__", "__post_init__") and frame.f_back is not None:
            frame = frame.f_back
        maker = str(frame.f_globals.get("__name__", ""))
        if maker.startswith(_PRODUCT) and not maker.startswith(_NOT_PRODUCERS):
            produced.setdefault(self.reason, maker)
        made(self)

    WeightplaneError.__post_init__ = note  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """The proof comes last, and only where every module takes part."""
    last = [item for item in items if item.name == _LAST]
    rest = [item for item in items if item.name != _LAST]
    here = {item.path for item in rest}
    every = set(Path(__file__).parent.rglob("test_*.py"))
    slow = {path for path in every if path not in here and "pytest.mark.slow" in path.read_text()}
    whole = here | slow | {item.path for item in last} >= every and not config.option.keyword
    items[:] = rest + (last if whole else [])


@pytest.fixture(scope="module", autouse=True)
def _environment_of_the_run() -> Iterator[None]:
    """An engine that a module starts in this process sets variables, vLLM's own code too (LOCAL_WORLD_SIZE and others).
    Processes that later modules start must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
