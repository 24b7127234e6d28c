"""After a commit: until the fleet takes requests under the version, and whether engines hold what was pushed.

Promises: both end within their limits; what is compared is what each engine says of itself now, in the life that the
plan knew (INV-8). Neither can change anything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress

import grpc
import structlog

from controlplane.core.errors import CheckFailed, WeightplaneError, some
from controlplane.rpc.codec import version_from_proto
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent.asked import PushContext
from trainer_agent.agent.push import Push
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.reasons import call_passes
from trainer_agent.agent.session import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from trainer_agent.agent.stubs import Stubs
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2, fleet_pb2_grpc, lifecycle_pb2, version_pb2

log = structlog.get_logger(__name__)

SERVING_SECONDS = 10.0
"""After a commit an engine has at least so long to be seen serving, also when the push's own limit is nearly over."""
STATUS_SECONDS = 5.0
"""How long an engine agent may take to say what its engine holds."""


class Serving:
    """What the ranks of one life are told of their latest commit."""

    def __init__(self, ranks: RankSet, context: PushContext) -> None:
        self._ranks = ranks
        self._context = context
        self._task: asyncio.Task[rank_pb2.PushServing] | None = None

    def follow(
        self, push: Push, begun: Mapping[int, rank_pb2.PushBegin], state: fleet_pb2.UpdateState, left: float
    ) -> None:
        """Tell the ranks when the version is served, if one of them may ask. Of the commit before nothing more is found
        out."""
        if self._task is not None:
            self._task.cancel()
        if not any(b.check or b.serving or b.detached for b in begun.values()):
            return
        check = any(b.check for b in begun.values())
        self._task = asyncio.create_task(self._found(push, state, max(left, SERVING_SECONDS), check=check))
        self._task.add_done_callback(lambda task: self._tell(begun, task))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _found(
        self, push: Push, state: fleet_pb2.UpdateState, seconds: float, *, check: bool
    ) -> rank_pb2.PushServing:
        context, serving = self._context, rank_pb2.PushServing()
        request = fleet_pb2.WatchRoutesRequest(run_id=context.run_id, model=context.model)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                serving.engine_ids.extend(await first_routes(context.stubs.fleet, request, state.version))
        wrong = await compare(context.stubs, context.run_id, state, push.digest, push.assignments) if check else None
        if wrong is not None:
            log.error("check_failed", cause=str(wrong))
            serving.error_reason, serving.error_message = wrong.reason, str(wrong)
            serving.error_metadata.update(wrong.metadata())
        return serving

    def _tell(self, begun: Mapping[int, rank_pb2.PushBegin], task: asyncio.Task[rank_pb2.PushServing]) -> None:
        """Supervises: whoever waits is answered, also if this was cut short or broke."""
        serving = rank_pb2.PushServing()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("serving_broke", exc_info=error)
        elif not task.cancelled():
            serving = task.result()
        for rank, begin in begun.items():
            if rank in self._ranks.members:
                serving.sequence = begin.sequence
                self._ranks.members[rank].send(rank_pb2.RankResponse(push_serving=serving))


async def first_routes(
    fleet: fleet_pb2_grpc.FleetAsyncStub, request: fleet_pb2.WatchRoutesRequest, version: version_pb2.WeightVersion
) -> list[str]:
    """The first engines that take requests under `version`. None: a later version took over, or nobody tells."""
    pause = FIRST_BACKOFF_SECONDS
    while True:
        call = fleet.WatchRoutes(request)
        try:
            async for response in call:
                found = [r.engine.engine_id for r in response.routes if r.applied == version]
                if found or any(r.applied.number > version.number for r in response.routes):
                    return found
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken)
            if not call_passes(error):
                log.warning("routes_not_told", reason=error.reason, cause=str(error))
                return []
        finally:
            call.cancel()
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, MAX_BACKOFF_SECONDS)


async def compare(
    stubs: Stubs,
    run_id: str,
    state: fleet_pb2.UpdateState,
    content_digest: bytes,
    assignments: Iterable[fleet_pb2.Assignment],
) -> CheckFailed | None:
    """Ask every engine that reported to have applied the update what it holds. None: just that.

    Those that did not apply it are named by the push's own report.
    """
    applied = {e.engine.engine_id for e in state.engines if e.stage == engine_pb2.UPDATE_STAGE_APPLIED and not e.lost}
    asked = [a for a in assignments if a.engine.engine_id in applied]
    found = await asyncio.gather(*(_difference(stubs, run_id, a, state.version, content_digest) for a in asked))
    outcomes = {a.engine.engine_id: text for a, text in zip(asked, found, strict=True) if text}
    if not outcomes:
        return None
    return CheckFailed(
        version=str(version_from_proto(state.version)),
        found=len(outcomes),
        asked=len(asked),
        differences=some((f"{name} {text}" for name, text in sorted(outcomes.items())), "; "),
    )


async def _difference(
    stubs: Stubs,
    run_id: str,
    assignment: fleet_pb2.Assignment,
    version: version_pb2.WeightVersion,
    content_digest: bytes,
) -> str:
    """Empty: it holds just these weights."""
    request = lifecycle_pb2.GetStatusRequest(run_id=run_id)
    try:
        status = (await stubs.lifecycle(assignment.endpoint).GetStatus(request, timeout=STATUS_SECONDS)).status
    except grpc.aio.AioRpcError as broken:
        error: WeightplaneError = from_rpc_error(broken)
        return f"does not say what it holds ({error})"
    if status.engine != assignment.engine:
        return f"is another life ({status.engine.incarnation}, not {assignment.engine.incarnation})"
    if not status.HasField("applied"):
        return "holds no version"
    if status.applied != version:
        return f"holds {version_from_proto(status.applied)}"
    if status.content_digest != content_digest:
        return f"holds other content ({status.content_digest[:6].hex()}, not {content_digest[:6].hex()})"
    return ""
