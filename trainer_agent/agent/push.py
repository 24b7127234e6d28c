"""One attempt to bring one version to the fleet: begin, feed every engine, wait for the decision, say who may go on.

Promises: the result is the coordinator's decision or the error that prevented one, never the fate of a stream
(INV-8, INV-9); whatever happens it comes within the ranks' limit; after a failure no commit frame is sent. Memory is
called free only if every engine said so, and no checkpoint is written from it (INV-12).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars

from controlplane import tracing
from controlplane.core.errors import (
    LinkFailed,
    PeerLost,
    StaleTerm,
    WeightplaneError,
)
from controlplane.core.layout import Layout
from controlplane.rpc.codec import seconds_to_proto
from controlplane.rpc.metrics import PUSH_SECONDS, PUSHES
from trainer_agent.agent import outcome, spans, stuck
from trainer_agent.agent.announced import Announced, Release
from trainer_agent.agent.avoided import Avoided
from trainer_agent.agent.begin import abandon, abort_update, begin_update
from trainer_agent.agent.checkpoint_files import Whole
from trainer_agent.agent.checkpoints import CheckpointKeeper
from trainer_agent.agent.plans import check_plan, push_plan
from trainer_agent.agent.reasons import update_passes
from trainer_agent.agent.stream import Cargo, StreamEnd
from trainer_agent.agent.streams import EngineStreams
from trainer_agent.agent.stubs import Stubs
from trainer_agent.agent.watch import DECIDED, UpdateWatch
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, pause_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

REFUSAL_SECONDS = 1.0
"""When a required engine refused and nothing moves: how long its own report may take to reach the coordinator."""
POLL_SECONDS = 0.1
DECIDE_SECONDS = 60.0
"""Beyond the push's limit, once commits went: the coordinator decides by its own limits, if it is there."""
MAX_REASON_LENGTH = 4096
BROKEN = frozenset({"LINK_FAILED", "UPDATE_ABORTED", "REMOTE"})
"""How the end of a link looks to engines that had no part in it."""


@dataclass(frozen=True)
class PushContext:
    """What stays the same over the pushes of one set of ranks."""

    stubs: Stubs
    run_id: str
    model: str
    layout: Layout
    parts: tuple[weight_update_pb2.LayoutPart, ...]
    chunk_bytes: int
    world_size: int
    fenced: Callable[[StaleTerm], None]
    """Told when something that goes on beside the pushes meets a later term."""
    avoided: Avoided = field(default_factory=Avoided)
    """Ways that did not work."""
    link_host: str = ""
    """Where engines of other hosts reach the ranks of this one; empty: nothing is broadcast."""
    checkpoints: CheckpointKeeper | None = None
    """Keeps committed versions on disk; None: nobody does."""


@dataclass
class Push:
    """One attempt. The agent hands it what ranks say; `run` gives the result."""

    context: PushContext
    term: int
    step: int
    limit_seconds: float
    """How long the ranks wait."""
    first: bool
    """No attempt of this push failed before."""
    send_plan: Callable[[rank_pb2.PushPlan], None]
    base: weight_update_pb2.Base | None
    """What ranks still have the bytes of: a delta to it may do."""
    keeps_whole: bool
    """Ranks do, for deltas."""
    release: Release
    """Tells a rank that a chunk's memory may be written again."""
    reference: weight_update_pb2.CanaryReference | None = None
    """What the trainer's model says under these weights."""
    pause: pause_pb2.PausePolicy | None = None
    """What becomes of the engines' requests; None: by each engine's own setting."""
    error: WeightplaneError | None = None
    """What ended it, if not the coordinator's decision."""
    look: Callable[[stuck.Waited], Coroutine[Any, Any, str]] | None = None
    """Looks at processes that are waited for."""
    stacks: asyncio.Task[str] | None = None
    """What those who were waited for do, looked at in the moment that the limit came; whoever asks waits for it."""
    _final: bool = False
    _keeps: bool = False
    """A checkpoint of it is due: the ranks keep the whole version until it is answered."""
    _started: float = 0.0
    _planned: float = 0.0
    """When the coordinator's plan came."""
    _begun: fleet_pb2.BeginUpdateResponse = field(default_factory=fleet_pb2.BeginUpdateResponse)
    _watch: UpdateWatch | None = None
    _streams: EngineStreams | None = None
    """None: there is no plan yet."""
    _failed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: WeightplaneError, *, final: bool = False) -> None:
        """Something other than an engine went wrong. The first word counts. `final`: no repeat can help."""
        self._final = self._final or final
        if self.error is None:
            log.info("push_fails", step=self.step, reason=error.reason, cause=str(error))
            self.error = error
            self._failed.set()

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

    def link_failed(self, error: LinkFailed) -> None:
        """A leader's word: a link is broken."""
        if self._streams is None:
            self.fail(error)
        else:
            self._streams.link_failed(error)

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
        self._started = _now()
        with bound_contextvars():
            result = await self._attempt()
        phase = fleet_pb2.UpdatePhase.Name(result.state.phase).removeprefix("UPDATE_PHASE_").lower()
        PUSHES.labels(result.error_reason or phase).inc()
        PUSH_SECONDS.observe(_now() - self._started)
        if self._begun.update_id:
            tracing.soon(spans.trace_push, self._of, self.step, self._started, self._planned, result)
        return result

    @property
    def _of(self) -> spans.Of:
        return spans.Of(self.context.run_id, self._begun.update_id, self._begun.version, self.term)

    async def _attempt(self) -> rank_pb2.PushResult:
        try:
            begun = await self._begin()
            self._planned = _now()
            bind_contextvars(**tracing.log_fields(self.context.run_id, begun.update_id))
            log.info("push_began", step=self.step, version=begun.version.number, engines=len(begun.plan.assignments))
            return await self._carry(begun)
        except WeightplaneError as error:
            self.fail(error)
            assert self.error is not None, "just set"
            return outcome.failed(self.error, None, released=True)

    async def _begin(self) -> fleet_pb2.BeginUpdateResponse:
        """Begin, unless the push fails meanwhile."""
        request = fleet_pb2.BeginUpdateRequest(
            run_id=self.context.run_id,
            model=self.context.model,
            term=self.term,
            request_id=uuid.uuid4().hex,
            step=self.step,
            layout_digest=self.context.layout.digest,
            byte_count=self.context.layout.byte_count,
            ready_limit=seconds_to_proto(self.limit_seconds),
            avoid=self.context.avoided.entries(),
            base=self.base,
        )
        deadline = self._started + self.limit_seconds
        begin = asyncio.create_task(begin_update(self.context.stubs.fleet, request, deadline, first=self.first))
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait({begin, failed}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if self.error is None:
            return begin.result()
        abandon(self.context.stubs.fleet, begin, self._abort_request("", self.error))
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
            self._streams.open(self.context.stubs, self._cargo(begun), watch)
            self.send_plan(plan)
            await self._until_decided(self._streams, watch)
        except WeightplaneError as error:
            self.fail(error)
            await self._give_up(watch, error)
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
            term=self.term,
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
            keep_whole=self._keeps or self.keeps_whole,
            traced=spans.traced(self.context.run_id, begun.update_id),
        )

    def _new_streams(self, begun: fleet_pb2.BeginUpdateResponse, plan: rank_pb2.PushPlan) -> EngineStreams:
        said = Announced(plan, self.release)
        return EngineStreams(begun.update_id, begun.plan.assignments, said, self.context.avoided, self.fail)

    def _cargo(self, begun: fleet_pb2.BeginUpdateResponse) -> Cargo:
        layout = self.context.layout
        manifest = weight_update_pb2.Manifest(
            layout_digest=layout.digest,
            tensor_count=len(layout.tensors),
            byte_count=layout.byte_count,
            step=self.step,
            reference=self.reference,
        )
        head = weight_update_pb2.UpdateOpen(
            run_id=self.context.run_id,
            model=self.context.model,
            update_id=begun.update_id,
            writer_term=self.term,
            version=begun.version,
            plan_revision=begun.plan.revision,
            manifest=manifest,
            pause=self.pause,
        )
        return Cargo(head, self.context.parts)

    async def _until_decided(self, streams: EngineStreams, watch: UpdateWatch) -> None:
        """Wait for the decision. Before GO a failure, a refusal or the limit ends the push; after GO only time does,
        and a streaming engine whose bytes will not come is told so.

        Raises:
            WeightplaneError: it is to be given up.
        """
        decision = asyncio.create_task(watch.decision())
        trouble = asyncio.create_task(self._trouble(streams, watch))
        try:
            await asyncio.wait({decision, trouble}, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if not decision.done() and watch.commits:
                if trouble.done():  # bytes of streaming engines may never come
                    streams.abort_unfed(str(trouble.result()))
                await asyncio.wait({decision}, timeout=self._left() + DECIDE_SECONDS)
            if not decision.done():
                raise trouble.result() if trouble.done() else self._late(streams, watch)
        finally:
            decision.cancel()
            trouble.cancel()

    def _late(self, streams: EngineStreams, watch: UpdateWatch) -> WeightplaneError:
        """The ranks' limit came first."""
        ready = stuck.before_go(streams.progress(), self.context.layout.byte_count)
        waited = stuck.after_go(watch.state, self.assignments) if watch.commits else ready
        if self.look is not None:
            self.stacks = asyncio.create_task(self.look(waited))
        phase = fleet_pb2.UpdatePhase.Name(watch.state.phase).removeprefix("UPDATE_PHASE_").lower()
        return waited.late(f"push ({phase})", _now() - self._started)

    async def _trouble(self, streams: EngineStreams, watch: UpdateWatch) -> WeightplaneError:
        """What makes going on senseless: a failure, a fence, a required engine that refused while all others wait."""
        stuck_since: float | None = None
        while self.error is None:
            streams.drop_lost(watch.state)
            if streams.fence is not None:
                return streams.fence
            refused = None if watch.commits else streams.refused
            stuck_since = None if refused is None else stuck_since or _now()
            if refused is not None and stuck_since is not None and _now() - stuck_since >= REFUSAL_SECONDS:
                return outcome.update_failed(watch.state, f"{refused.engine_id}: {refused.error}", streams.errors)
            await _within(POLL_SECONDS, self._failed.wait())
        return self.error

    async def _give_up(self, watch: UpdateWatch, error: WeightplaneError) -> None:
        """Before GO nothing was installed, and an abort costs nothing. If GO was faster, the decision is waited for."""
        state = await abort_update(self.context.stubs.fleet, self._abort_request(watch.state.update_id, error))
        if state is not None and state.phase in DECIDED:
            await watch.take(state)
        elif state is not None and not isinstance(error, StaleTerm):
            await _within(DECIDE_SECONDS, watch.decision())
        if not watch.decided:
            await watch.fail(str(error))

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
        result = outcome.failed(self._cause(state), state, released=released)
        result.retry = not self._final and update_passes(self._cause(state), self._reasons(state))
        return result

    def _cause(self, state: fleet_pb2.UpdateState) -> WeightplaneError:
        """Why the fleet does not serve it."""
        streams = self._streams
        errors = {} if streams is None else streams.errors
        error = self.error or outcome.update_failed(state, state.cause or "no cause given", errors)
        told = {} if streams is None else streams.required_reasons
        if isinstance(error, LinkFailed) and not {*_reported(state).values(), *told.values()} <= BROKEN:
            return outcome.update_failed(state, str(error), errors)  # an engine says why it left the link
        return error

    def _reasons(self, state: fleet_pb2.UpdateState) -> list[str]:
        """Of the engines that the commit waits for; but what a delta met, the next attempt does not: it is whole."""
        if self._streams is None:
            return list(_reported(state).values())
        reasons = [*_reported(state).items(), *self._streams.required_reasons.items()]
        return [reason for engine_id, reason in reasons if engine_id not in self._streams.deltas]

    def _abort_request(self, update_id: str, error: WeightplaneError) -> fleet_pb2.AbortUpdateRequest:
        return fleet_pb2.AbortUpdateRequest(
            run_id=self.context.run_id, update_id=update_id, term=self.term, reason=str(error)[:MAX_REASON_LENGTH]
        )

    def _left(self) -> float:
        return max(self._started + self.limit_seconds - _now(), 0.0)


def _reported(state: fleet_pb2.UpdateState) -> dict[str, str]:
    """What required engines told the coordinator that it ended with."""
    return {e.engine.engine_id: e.error_reason for e in state.engines if e.required and e.error_reason}


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _within(seconds: float, something: Awaitable[object]) -> None:
    """Wait for it, but no longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await something
