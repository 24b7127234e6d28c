"""What a real engine of a local fleet decodes greedily, and under which versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.local_fleet import RUN, LocalFleet
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

Span = tuple[int, int, int]
"""(number, first token, one past the last)."""


async def greedy(fleet: LocalFleet, engine_id: str, prompt: Sequence[int], count: int) -> tuple[list[int], list[Span]]:
    """`count` tokens, and their spans. Waits for the gate."""
    view = await fleet.engine(engine_id)
    stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(view.endpoint))
    sampling = rollout_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = rollout_pb2.GenerateRequest(run_id=RUN, model="policy", prompt_token_ids=prompt, sampling=sampling)
    request.wait.FromSeconds(60)
    tokens: list[int] = []
    finish = rollout_pb2.Finish()
    async for response in stub.Generate(request, timeout=150):
        tokens += response.token_ids
        finish = response.finish
    return tokens, [(s.version.number, s.start, s.end) for s in finish.spans]
