"""Sleep and waking of a vLLM engine, without one: what its workers are told, and in which order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.core.errors import EngineDied, UnsupportedByEngine
from controlplane.core.layout import Expected
from engine_agent.vllm.calls import Core
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.engine_log import EngineLog
from engine_agent.vllm.install import Installer
from engine_agent.vllm.power import Power, can_sleep
from engine_agent.vllm.settings import VllmSettings

CLEARED = ["reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]


class Workers:
    """Writes down what they are told, and what the scheduler is."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails = ""
        self.cleared = True

    def llm(self) -> Any:
        def call(name: str, answer: object = None) -> Callable[..., Any]:
            async def called(**how: object) -> object:
                self.told.append(name)
                return answer() if callable(answer) else answer

            return called

        return SimpleNamespace(
            errored=False,
            engine_core=SimpleNamespace(call_utility_all_async=self._utility),
            reset_prefix_cache=call("reset_prefix_cache", lambda: self.cleared),
            reset_mm_cache=call("reset_mm_cache"),
            reset_encoder_cache=call("reset_encoder_cache"),
        )

    async def _utility(self, kind: str, method: str, timeout: None, words: tuple[()], how: dict[str, Any]) -> list[Any]:
        assert (kind, timeout, words) == ("collective_rpc", None, ()), "never with vLLM's own time limit"
        self.told.append(" ".join([method, *(f"{k}={v}" for k, v in how.items())]))
        if method == self.fails:
            raise Exception("a worker failed")
        return [[None], [None]]

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


@pytest.fixture
async def rig() -> AsyncIterator[tuple[Power, Workers, Installer]]:
    workers = Workers()
    core = Core(workers.llm(), "e0", EngineLog("INFO"), lambda _: None)
    installer = Installer(core, ("GPU-0",), Expected({}, {}), 1.0)
    yield Power(core, installer, 1.0), workers, installer
    core.close()


async def test_caches_are_cleared_before_the_memory_goes_and_again_with_zeros_when_it_is_back(rig: Any) -> None:
    power, workers, _ = rig
    await power.sleep(1)
    assert workers.take() == [*CLEARED, "sleep level=1"]
    await power.wake(kv_cache=True)
    assert workers.take() == ["wake_up tags=['kv_cache', 'weights']", *CLEARED, "weightplane_scrub_kv"]


async def test_weights_alone_come_first_and_what_is_installed_then_touches_no_kv_cache(rig: Any) -> None:
    power, workers, installer = rig
    installer.kv_suspect = True
    await power.sleep(2)
    assert workers.take() == [*CLEARED, "weightplane_scrub_kv", "sleep level=2"]
    await power.wake(kv_cache=False)
    assert workers.take() == ["wake_up tags=['weights']"]
    installer.kv_suspect = True
    assert await installer.clear_caches()  # as each install does
    assert workers.take() == CLEARED, "its memory is somebody else's"
    await power.wake(kv_cache=True)
    assert workers.take() == ["wake_up tags=['kv_cache']", *CLEARED, "weightplane_scrub_kv"]


async def test_nothing_is_told_twice(rig: Any) -> None:
    power, workers, _ = rig
    await power.wake(kv_cache=True)
    assert workers.take() == []
    await power.sleep(1)
    workers.take()
    for level in (1, 2):
        await power.sleep(level)
    assert workers.take() == []
    for kv_cache in (True, True, False):
        await power.wake(kv_cache=kv_cache)
    assert len(workers.take()) == 1 + len(CLEARED) + 1


async def test_an_engine_whose_weights_alone_are_awake_can_be_put_to_sleep_again(rig: Any) -> None:
    power, workers, _ = rig
    await power.sleep(1)
    await power.wake(kv_cache=False)
    workers.take()
    await power.sleep(2)
    assert workers.take() == ["sleep level=2"]


async def test_an_engine_that_keeps_its_cache_is_not_put_to_sleep(rig: Any) -> None:
    power, workers, _ = rig
    workers.cleared = False
    with pytest.raises(EngineDied, match="did not clear its prefix cache"):
        await power.sleep(1)
    assert "sleep level=1" not in workers.take()


async def test_a_worker_that_fails_to_sleep_or_wake_is_told_to_whoever_asked(rig: Any) -> None:
    power, workers, _ = rig
    workers.fails = "sleep"
    with pytest.raises(Exception, match="a worker failed"):
        await power.sleep(1)


@pytest.mark.parametrize(
    ("asked", "platform", "able"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_an_engine_can_sleep_where_the_platform_has_it_and_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: bool, platform: bool, able: bool
) -> None:
    from vllm import platforms

    monkeypatch.setattr(platforms.current_platform, "is_sleep_mode_available", lambda: platform, raising=False)
    model = SimpleNamespace(enable_sleep_mode=asked)
    assert can_sleep(SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))) is able


async def test_without_the_capability_both_are_refused_by_name() -> None:
    engine = VllmEngine(VllmSettings(Path("/models/m")), "e0")
    with pytest.raises(UnsupportedByEngine, match="sleep"):
        await engine.sleep(1)
    with pytest.raises(UnsupportedByEngine, match="sleep"):
        await engine.wake(kv_cache=True)
