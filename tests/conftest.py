"""What every test module may rely on: it finds the environment as the run began, whatever ran before it.

And what a whole run proves at its end: each reason of `controlplane.core.errors` was produced by the product itself, in
some test; and one without the slow tests started no more real engines than it has time for. A run of a part of the
tests proves nothing about that, and says nothing. A whole run may be of several parts, each with several workers:
`--reasons FILE` hands on what the parts before it came to. The part with the proofs in it is then the last one: it
fails if any module was left out, rather than prove nothing in silence.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from controlplane.core.errors import WeightplaneError
from tests.support.engine_starts import EngineStarts

settings.register_profile("weightplane", deadline=None)
settings.load_profile("weightplane")
"""What one example takes says nothing where other tests run beside it; each test has a limit of its own."""
_PRODUCT = ("controlplane.", "engine_agent.", "trainer_agent.")
_NOT_PRODUCERS = ("controlplane.core.errors", "controlplane.sim.")
"""The first rebuilds what another process raised; the simulator plays engines that fail."""
_LAST = (
    "test_each_reason_is_produced_by_some_test",
    "test_no_more_real_engines_were_started_than_the_run_has_time_for",
)
_TESTS = Path(__file__).parent
_PURE = tuple(_TESTS / name for name in ("unit", "contract", "sim", "cases"))
"""Where tests share nothing with each other, unless they start real engines."""
produced: dict[str, str] = {}
"""By reason: the module of the product that raised it first."""
engine_starts = EngineStarts()
_took_part: set[str] = set()
"""Modules of tests of this run's earlier parts, and of this one."""
_EXCUSED = ("pytest.mark.slow", "pytest.mark.deploy")
"""What a module that `make test` leaves out says of itself."""
left_out: list[str] = []
"""Modules that no part of a run that should be whole took, and that say nothing which excuses them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reasons", type=Path, help="what earlier parts of this run came to, and this one's beside it")


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
    file = config.getoption("reasons")
    if file is not None and file.exists():
        _merge(json.loads(file.read_text()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Told to the main process by a worker of its (pytest-xdist), which tells the next part of the run."""
    engine_starts.end()
    came_to = {"produced": produced, "modules": sorted(_took_part)}
    told, file = getattr(session.config, "workeroutput", None), session.config.getoption("reasons")
    if told is not None:
        told["reasons"] = came_to
    elif file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(came_to))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist ended; one that was killed tells nothing."""
    _merge(getattr(node, "workeroutput", {}).get("reasons", {}))


def _merge(came_to: dict[str, Any]) -> None:
    for reason, maker in came_to.get("produced", {}).items():
        produced.setdefault(reason, maker)
    _took_part.update(came_to.get("modules", ()))


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("real") is None and item.path.is_relative_to(_TESTS) and item.path.parent in _PURE:
        item.add_marker("pure")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """The proofs come last, and only where every module takes part, or should have."""
    last = [item for item in items if item.name in _LAST]
    rest = [item for item in items if item.name not in _LAST]
    if any(item.get_closest_marker("real") for item in rest):
        engine_starts.begin()
    _took_part.update(str(item.path) for item in rest)
    absent = _absent({Path(name) for name in _took_part} | {item.path for item in last})
    meant_whole = config.getoption("reasons") is not None
    if last and meant_whole:
        left_out.extend(absent)
    whole = not absent and not config.option.keyword
    items[:] = rest + (last if whole or meant_whole else [])


def _absent(here: set[Path]) -> list[str]:
    missing = sorted(set(_TESTS.rglob("test_*.py")) - here)
    return [str(path) for path in missing if not any(mark in path.read_text() for mark in _EXCUSED)]


@pytest.fixture(scope="module", autouse=True)
def _environment_of_the_run() -> Iterator[None]:
    """An engine that a module starts in this process sets variables, vLLM's own code too (LOCAL_WORLD_SIZE and others).
    Processes that later modules start must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
