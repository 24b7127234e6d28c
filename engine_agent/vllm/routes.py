"""What Weightplane adds to vLLM's API server (`vllm.endpoint_plugins`, let in by VLLM_PLUGINS): which tokens are out.

Promises counts that miss no token that the engine core had sent when the question came, so that a paused server's are
final: the border of each span (INV-11). It changes nothing in the server.
"""

from __future__ import annotations

import asyncio
from typing import Any

PREFIX = "generate-tokens-"
"""What the server puts before the id of a request to /inference/v1/generate."""
POLL_SECONDS = 0.0005


class WeightplaneRoutes:
    """See vLLM's EndpointPlugin."""

    name = "weightplane"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_api_route("/weightplane/live", self._live, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._llm = engine_client

    async def _live(self) -> dict[str, Any]:
        await handed_on(self._llm)
        return {"tokens": live_tokens(self._llm.output_processor.request_states.values())}


async def handed_on(llm: Any) -> None:
    """Wait until the output handler took everything that had come from the core: it takes one batch when it has handed
    on the one before, so a mark that it took stands for all that stood before the mark."""
    from vllm.v1.engine import EngineCoreOutputs

    if llm.output_handler is None:
        return  # vLLM starts it with the first request
    queue = llm.engine_core.outputs_queue
    queue.put_nowait(EngineCoreOutputs())
    while not queue.empty() and not llm.errored:  # noqa: ASYNC110 - vLLM's queue has no event for it
        await asyncio.sleep(POLL_SECONDS)


def live_tokens(states: Any) -> dict[str, int]:
    """By the id that the caller gave."""
    return {
        s.external_req_id.removeprefix(PREFIX): 0 if s.detokenizer is None else s.detokenizer.num_output_tokens()
        for s in states
    }
