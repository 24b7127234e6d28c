"""One attempt to bring one version to the fleet: begin, feed every engine, wait for the decision, say who may go on.

Promises: the result is the coordinator's decision or the error that prevented one, never the fate of a stream
(INV-8, INV-9); whatever happens it comes within the ranks' limit; after a failure no commit frame is sent. Memory is
called free only if every engine said so, and no checkpoint is written from it (INV-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars

from controlplane import tracing
from controlplane.core.errors import IpcNotPossible, LinkFailed, PeerLost, WeightplaneError
from controlplane.rpc.metrics import PUSH_SECONDS, PUSHES
from trainer_agent.agent import outcome, spans, stuck
from trainer_agent.agent.announced import Announced, Release
from trainer_agent.agent.asked import Asked, PushContext, abort_request, begin_request, cargo
from trainer_agent.agent.begin import abandon, begin_update
from trainer_agent.agent.checkpoint_files import Whole
from trainer_agent.agent.deciding import Deciding, Failure, Limit, give_up, now
from trainer_agent.agent.plans import check_plan, push_plan
from trainer_agent.agent.stream import StreamEnd
from trainer_agent.agent.streams import EngineStreams
from trainer_agent.agent.watch import UpdateWatch
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

log = structlog.get_logger(__name__)


@dataclass
class Push:
    """One attempt. The agent hands it what ranks say; `run` gives the result."""

    context: PushContext
    asked: Asked
    send_plan: Callable[[rank_pb2.PushPlan], None]
    release: Release
    """Tells a rank that a chunk's memory may be written again."""
    look: Callable[[stuck.Waited], Coroutine[Any, Any, str]]
    """Looks at processes that are waited for."""
    stacks: asyncio.Task[str] | None = None
    """What those who were waited for do, looked at in the moment that the limit came; whoever asks waits for it."""
    _failure: Failure = field(default_factory=Failure)
    _keeps: bool = False
    """A checkpoint of it is due: the ranks keep the whole version until it is answered."""
    _started: float = 0.0
    _planned: float = 0.0
    """When the coordinator's plan came."""
    _begun: fleet_pb2.BeginUpdateResponse = field(default_factory=fleet_pb2.BeginUpdateResponse)
    _watch: UpdateWatch | None = None
    _streams: EngineStreams | None = None
    """None: there is no plan yet."""

    def fail(self, error: WeightplaneError, *, final: bool = False) -> None:
        """Something other than an engine went wrong. The first word counts. `final`: no repeat can help."""
        self._failure.say(error, final=final, step=self.asked.step)

    def take_chunk(self, rank: int, chunk: rank_pb2.SendChunk) -> None:
        """A leader announced a chunk."""
        self._take(lambda said: said.take_chunk(rank, chunk))

    def take_end(self, rank: int, end: rank_pb2.PushEnd) -> None:
        """A leader announced everything."""
        self._take(lambda said: said.take_end(rank, end))

    def take_choice(self, rank: int, choice: rank_pb2.DeltaChosen) -> None:
        """A leader says whether its engines are sent a delta."""
        self._take(lambda said: said.take_choice(rank, choice))

    def take_link(self, rank: int, made: rank_pb2.LinkMade) -> None:
        """A leader listens for a link's engines."""
        self._take(lambda said: said.check_link(rank, made))
        if self._streams is not None:
            self._streams.link_made(made)

    def take_exports(self, rank: int, made: rank_pb2.ExportsMade) -> None:
        """A slot's ranks exported device memory."""
        self._take(lambda said: said.check_exports(rank, made))
        if self._streams is not None:
            self._streams.exports_made(made)

    def ipc_failed(self, error: IpcNotPossible) -> None:
        """A rank's word: it cannot send by device memory."""
        if self._streams is None:
            self.fail(error)
        else:
            self._streams.ipc_failed(error)

    def link_failed(self, error: LinkFailed) -> None:
        """A leader's word: a link is broken."""
        if self._streams is None:
            self.fail(error)
        else:
            self._streams.link_failed(error)

    @property
    def error(self) -> WeightplaneError | None:
        """What ended it, if not the coordinator's decision."""
        return self._failure.error

    @property
    def state(self) -> fleet_pb2.UpdateState | None:
        """The coordinator's last word on it."""
        return None if self._watch is None else self._watch.state

    @property
    def assignments(self) -> Sequence[fleet_pb2.Assignment]:
        """Of the plan."""
        return self._begun.plan.assignments

    @property
    def digest(self) -> bytes:
        """Content digest, once a leader announced everything."""
        return b"" if self._streams is None else self._streams.announced.digest

    def _take(self, act: Callable[[Announced], None]) -> None:
        """What comes without a plan belongs to no push."""
        try:
            if self._streams is not None:
                act(self._streams.announced)
        except WeightplaneError as error:
            self.fail(error)

    async def run(self) -> rank_pb2.PushResult:
        """The whole attempt. What went wrong is in the result, not raised."""
        self._started = now()
        with bound_contextvars():
            result = await self._attempt()
        phase = fleet_pb2.UpdatePhase.Name(result.state.phase).removeprefix("UPDATE_PHASE_").lower()
        PUSHES.labels(result.error_reason or phase).inc()
        PUSH_SECONDS.observe(now() - self._started)
        if self._begun.update_id:
            tracing.soon(spans.trace_push, self._of, self.asked.step, self._started, self._planned, result)
        return result

    @property
    def _of(self) -> spans.Of:
        return spans.Of(self.context.run_id, self._begun.update_id, self._begun.version, self.asked.term)

    async def _attempt(self) -> rank_pb2.PushResult:
        try:
            begun = await self._begin()
            self._planned = now()
            bind_contextvars(**tracing.log_fields(self.context.run_id, begun.update_id))
            engines = len(begun.plan.assignments)
            log.info("push_began", step=self.asked.step, version=begun.version.number, engines=engines)
            return await self._carry(begun)
        except WeightplaneError as error:
            self.fail(error)
            assert self.error is not None, "just set"
            return outcome.failed(self.error, None, released=True)

    async def _begin(self) -> fleet_pb2.BeginUpdateResponse:
        """Begin, unless the push fails meanwhile."""
        fleet, request = self.context.stubs.fleet, begin_request(self.context, self.asked)
        deadline = self._started + self.asked.limit_seconds
        begin = asyncio.create_task(begin_update(fleet, request, deadline, first=self.asked.first))
        failed = asyncio.create_task(self._failure.said.wait())
        await asyncio.wait({begin, failed}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if self.error is None:
            return begin.result()
        abandon(fleet, begin, abort_request(self.context, self.asked, "", self.error))
        raise self.error

    async def _carry(self, begun: fleet_pb2.BeginUpdateResponse) -> rank_pb2.PushResult:
        self._begun = begun
        self.context.avoided.lives(a.engine for a in begun.plan.assignments)
        watch = UpdateWatch(self.context.stubs.fleet, self.context.run_id, begun)
        self._watch = watch
        watching = asyncio.create_task(watch.run())
        try:
            check_plan(begun.plan, self.context.world_size)
            await self.context.stubs.keep({a.endpoint for a in begun.plan.assignments})
            plan = self._push_plan(begun)
            self._streams = self._new_streams(begun, plan)
            self._streams.open(self.context.stubs, cargo(self.context, self.asked, begun), watch)
            self.send_plan(plan)
            await self._deciding(self._streams, watch).wait()
        except WeightplaneError as error:
            self.fail(error)
            abort = abort_request(self.context, self.asked, begun.update_id, error)
            await give_up(self.context.stubs.fleet, watch, abort, error)
        finally:
            ends = await self._end_streams(watch.state)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        result = self._result(watch.state, ends)
        if not result.error_reason and self._reads_on(watch.state):
            result.memory_released = False
        return result

    def _reads_on(self, state: fleet_pb2.UpdateState) -> bool:
        """After a commit: whether a checkpoint is being written from the segments from now on."""
        keeper, said = self.context.checkpoints, None if self._streams is None else self._streams.announced
        if keeper is None:
            return False
        keeper.committed()
        chunks = None if said is None else said.whole
        if not self._keeps or said is None or chunks is None:
            return False
        whole = Whole(
            run_id=self.context.run_id,
            model=self.context.model,
            state=state,
            term=self.asked.term,
            layout=self.context.layout,
            content_digest=said.digest,
            chunks=chunks,
        )
        return keeper.begin(whole, self.context.stubs.fleet, self.context.fenced)

    def _push_plan(self, begun: fleet_pb2.BeginUpdateResponse) -> rank_pb2.PushPlan:
        keeper = self.context.checkpoints
        self._keeps = keeper is not None and keeper.due()
        return push_plan(
            begun,
            self.context.chunk_bytes,
            self.context.link_host,
            keep_whole=self._keeps or self.asked.keeps_whole,
            traced=spans.traced(self.context.run_id, begun.update_id),
        )

    def _new_streams(self, begun: fleet_pb2.BeginUpdateResponse, plan: rank_pb2.PushPlan) -> EngineStreams:
        said = Announced(plan, self.release)
        return EngineStreams(begun.update_id, begun.plan.assignments, said, self.context.avoided, self.fail)

    def _deciding(self, streams: EngineStreams, watch: UpdateWatch) -> Deciding:
        limit = Limit(self._started, self.asked.limit_seconds)
        return Deciding(streams, watch, self._failure, limit, self.context.layout.byte_count, self._look)

    def _look(self, waited: stuck.Waited) -> None:
        self.stacks = asyncio.create_task(self.look(waited))

    async def _end_streams(self, state: fleet_pb2.UpdateState) -> list[StreamEnd | None]:
        if self._streams is None:
            return []
        cause = state.cause or str(self.error or "the trainer agent ends")
        return await self._streams.end(state, cause, rank_lost=isinstance(self.error, PeerLost))

    def _result(self, state: fleet_pb2.UpdateState, ends: Sequence[StreamEnd | None]) -> rank_pb2.PushResult:
        released = all(e is not None and e.memory_free for e in ends)
        result = outcome.decided(state, released=released)
        if result is not None:
            self.context.avoided.worked(self._begun.plan.assignments)
            return result
        told = outcome.Told() if self._streams is None else self._streams.told
        cause = outcome.cause_of(state, self.error, told)
        result = outcome.failed(cause, state, released=released)
        result.retry = not self._failure.final and outcome.passes(state, cause, told)
        return result
