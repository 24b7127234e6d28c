"""The pushes of one life of a trainer: one at a time, begun when every rank entered, answered to every rank alike.

Promises: a push that failed for a passing reason is begun again by all ranks or by none; a rank that is gone
ends it for all; nobody waits for a rank that will not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from controlplane import tracing
from controlplane.core.errors import IpcNotPossible, LinkFailed, PeerLost, SlotMismatch, StaleTerm, WeightplaneError
from trainer_agent.agent import stuck
from trainer_agent.agent.asked import Asked, PushContext
from trainer_agent.agent.outcome import failed
from trainer_agent.agent.plans import for_rank
from trainer_agent.agent.push import Push
from trainer_agent.agent.ranks import RankConnection
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.serving import Serving
from trainer_agent.agent.spans import trace_rank
from trainer_agent.wire import typed_error
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.25
"""First pause before a push is repeated; it doubles. Engines that were rebuilt need a while."""
MAX_RETRY_SECONDS = 5.0
RETRY_SECONDS_LEFT = 5.0
"""With less time than this left a failed push is not repeated."""
OTHERS_END_SECONDS = 0.5
"""A rank that dies breaks collectives of the others, who may tell of that sooner than the kernel of the death."""


class Pusher:
    """Collects what ranks say of pushes, and answers them."""

    def __init__(
        self,
        ranks: RankSet,
        context: PushContext,
        fenced: Callable[[StaleTerm], None],
        wake_weights: Callable[[float], Awaitable[None]],
    ) -> None:
        """`wake_weights`: of engines that sleep for this trainer, before a push, within a limit."""
        self._ranks = ranks
        self._context = context
        self._fenced = fenced
        self._wake_weights = wake_weights
        self._begun: dict[int, rank_pb2.PushBegin] = {}
        self._push: Push | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        """Attempts of the present push that failed."""
        self._serving = Serving(ranks, context)
        self._reporting: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.Task[None] | None = None
        """Ends the wait for ranks that do not come to the push."""

    def begin(self, rank: RankConnection, begin: rank_pb2.PushBegin) -> None:
        """A rank entered push()."""
        self._begun[rank.rank] = begin
        if self._ranks.lost is not None:
            self._answer(failed(self._ranks.lost, None, released=True))
        elif len(self._begun) == self._ranks.world_size:
            self._stop_waiting()
            self._task = asyncio.create_task(self._run())
        elif self._waiting is None:
            self._waiting = asyncio.create_task(self._wait_for_ranks(begin.timeout_seconds))

    def said(self, rank: RankConnection, request: rank_pb2.RankRequest) -> None:
        """Anything else about a push. What comes after its end is dropped: the answer is on its way."""
        if request.HasField("push_failed"):
            self._rank_failed(rank.rank, request.push_failed)
        elif request.HasField("push_times"):
            tracing.soon(trace_rank, self._context.run_id, rank.rank, request.push_times)
        elif self._push is not None and request.HasField("send_chunk"):
            self._push.take_chunk(rank.rank, request.send_chunk)
        elif self._push is not None and request.HasField("delta_chosen"):
            self._push.take_choice(rank.rank, request.delta_chosen)
        elif self._push is not None and request.HasField("push_end"):
            self._push.take_end(rank.rank, request.push_end)
        elif self._push is not None and request.HasField("link_made"):
            self._push.take_link(rank.rank, request.link_made)
        elif self._push is not None and request.HasField("exports_made"):
            self._push.take_exports(rank.rank, request.exports_made)

    def fail(self, error: WeightplaneError) -> None:
        """The push, or the waiting for one, is over for everybody."""
        if self._push is not None:
            self._push.fail(error)
        elif self._begun and self._task_over:
            self._answer(failed(error, None, released=True))

    async def close(self) -> None:
        """End what runs, and wait for it."""
        self._stop_waiting()
        for task in self._reporting:
            task.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._serving.close()

    async def idle(self) -> None:
        """Wait until no push runs."""
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def update(self) -> fleet_pb2.UpdateState | None:
        """The update that is being carried."""
        return None if self._push is None else self._push.state

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def _wait_for_ranks(self, seconds: float) -> None:
        """A rank that does not come to the push is named to those that did."""
        await asyncio.sleep(seconds)
        waited = stuck.before_begin(self._ranks, self._begun)
        result = failed(waited.late("push (begin)", seconds), None, released=True)
        result.stacks = await self._look(waited)
        self._answer(result)

    async def _look(self, waited: stuck.Waited) -> str:
        """Supervises: ranks wait for the answer that this goes with. The coordinator is told beside it."""
        update, stubs, run_id = self.update, self._context.stubs, self._context.run_id
        try:
            found = await stuck.look(waited, self._ranks, stubs, run_id)
        except Exception as error:
            log.exception("look_broke")
            return f"nobody could look: {error!r}"
        if update is not None and found:
            task = asyncio.create_task(stuck.report(found, update, stubs, run_id))
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)
        return stuck.as_text(found)

    @property
    def _task_over(self) -> bool:
        return self._task is None or self._task.done()

    async def _run(self) -> None:
        limit = min(b.timeout_seconds for b in self._begun.values())
        started = asyncio.get_running_loop().time()
        push = self._push = self._new_push(limit)
        result = await self._attempt(push, limit)
        left = limit - (asyncio.get_running_loop().time() - started)
        result.retry = result.retry and self._ranks.lost is None and left > RETRY_SECONDS_LEFT
        self._failures = self._failures + 1 if result.retry else 0
        if push.stacks is not None:
            result.stacks = await push.stacks
        self._push = None
        if not result.error_reason:  # committed, also if it was fenced since: the ranks hear both, in this order
            begun = dict(self._begun)
            self._answer(result)
            self._serving.follow(push, begun, result.state, left)
        if isinstance(push.error, StaleTerm):
            self._fenced(push.error)
        if result.error_reason:
            self._answer(result)

    async def _attempt(self, push: Push, limit: float) -> rank_pb2.PushResult:
        """Supervises: an error of our own must not leave ranks waiting for an answer."""
        if self._failures:
            pause = min(FIRST_RETRY_SECONDS * 2 ** (self._failures - 1), MAX_RETRY_SECONDS)
            await asyncio.sleep(min(pause, limit))
        try:
            await self._wake_weights(limit)
        except WeightplaneError as error:
            return failed(error, None, released=True)
        try:
            return await push.run()
        except Exception as error:
            log.exception("push_broke", step=push.asked.step)
            return failed(PeerLost(peer="the trainer agent", cause=repr(error)), None, released=False)

    def _new_push(self, limit: float) -> Push:
        begun = sorted(self._begun.items())
        said: dict[str, dict[int, object]] = {
            "the step": {r: b.step for r, b in begun},
            "whether to wait for the push": {r: "push_async" if b.detached else "push" for r, b in begun},
        }
        asked = Asked(
            term=self._ranks.term,
            step=begun[0][1].step,
            limit_seconds=limit,
            first=self._failures == 0,
            base=_base(b for _, b in begun),
            keeps_whole=any(b.keeps_whole for _, b in begun),
            reference=next((b.reference for _, b in begun if b.HasField("reference")), None),
            pause=next((b.pause for _, b in begun if b.HasField("pause")), None),
        )
        push = Push(self._context, asked, send_plan=self._send_plan, release=self._release, look=self._look)
        for what, by_rank in said.items():
            if len(set(by_rank.values())) > 1:
                push.fail(SlotMismatch(engine_id="every engine", what=what, ranks=str(by_rank)))
        if self._ranks.lost is not None:
            push.fail(self._ranks.lost)
        return push

    def _send_plan(self, plan: rank_pb2.PushPlan) -> None:
        for rank, connection in self._ranks.members.items():
            part = for_rank(plan, rank, self._begun[rank].sequence)
            connection.send(rank_pb2.RankResponse(push_plan=part))

    def _release(self, rank: int, chunk: int) -> None:
        if rank in self._ranks.members:
            message = rank_pb2.ChunkReleased(index=chunk, sequence=self._begun[rank].sequence)
            self._ranks.members[rank].send(rank_pb2.RankResponse(chunk_released=message))

    def _answer(self, result: rank_pb2.PushResult) -> None:
        for rank, begin in self._begun.items():
            if rank in self._ranks.members:
                result.sequence = begin.sequence
                self._ranks.members[rank].send(rank_pb2.RankResponse(push_result=result))
        self._begun.clear()
        self._stop_waiting()
        failed = {"reason": result.error_reason, "retry": result.retry, "cause": result.error_message}
        fields = tracing.log_fields(self._context.run_id, result.state.update_id)
        log.info("push_ended", **fields, **(failed if result.error_reason else {}))

    def _rank_failed(self, rank: int, what: rank_pb2.PushFailed) -> None:
        """An error of ours is known to everybody, but a peer's going away is better told by its own end; any other
        exception is the end of that rank, or of one before it."""
        push = self._push
        error = typed_error(what.error_reason, what.error_metadata, what.cause)
        if not what.error_reason:
            error = PeerLost(peer=f"rank {rank}", cause=what.cause)
        if push is None:
            self.fail(error)
        elif isinstance(error, LinkFailed):
            push.link_failed(error)
        elif isinstance(error, IpcNotPossible):
            push.ipc_failed(error)
        elif what.error_reason and not isinstance(error, PeerLost):
            push.fail(error)
        else:  # a death that is told meanwhile is the first word
            final = not what.error_reason
            asyncio.get_running_loop().call_later(OTHERS_END_SECONDS, lambda: push.fail(error, final=final))


def _base(begun: Iterable[rank_pb2.PushBegin]) -> weight_update_pb2.Base | None:
    """What the ranks that export still have the bytes of; None: nothing, or not all the same."""
    found = [b.base for b in begun if b.HasField("base")]
    return found[0] if found and all(base == found[0] for base in found) else None
