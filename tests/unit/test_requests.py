"""The account of live requests, where their readers are slower than the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from controlplane.core.errors import RequestAborted
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import FROZEN
from engine_agent.engine import GenerationDelta
from engine_agent.life.requests import Requests
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from tests.support.eventually import eventually

SAMPLING = SamplingSettings(max_tokens=3)


class BreakingEngine(MemoryEngine):
    """Its requests break off after their first token."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        async for delta in super().generate(request_id, prompt_token_ids, sampling):
            yield delta
            raise RequestAborted(request_id=request_id)


async def test_inv11_a_border_goes_past_what_the_engine_ended_and_its_reader_has_not_read() -> None:
    wrong: list[str] = []
    engine = MemoryEngine(MemorySettings(), "e0", serve_initial=True)
    requests = Requests(engine, lambda live: None, wrong.append)
    parts = requests.run("r", FROZEN, [1, 2], SAMPLING)
    await eventually(lambda: parts._request.ended)
    requests.draw_border(await engine.quiesce())
    assert wrong == []
    assert sum([len(part.delta.token_ids) async for part in parts]) == 3


async def test_inv11_a_request_that_broke_off_is_no_account_that_disagrees() -> None:
    wrong: list[str] = []
    engine = BreakingEngine(MemorySettings(), "e0", serve_initial=True)
    requests = Requests(engine, lambda live: None, wrong.append)
    parts = requests.run("r", FROZEN, [1, 2], SAMPLING)
    await eventually(lambda: parts._request.ended)
    requests.draw_border(await engine.quiesce())
    assert wrong == []
    with pytest.raises(RequestAborted):
        _ = [part async for part in parts]
