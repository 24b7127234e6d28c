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

from controlplane.core.errors import (
    IpcNotPossible,
    LinkFailed,
    PeerLost,
    StaleTerm,
    WeightplaneError,
)
from controlplane.core.layout import Layout
from controlplane.rpc.codec import seconds_to_proto
from trainer_agent.agent import outcome, stuck
from trainer_agent.agent.announced import Announced, Release
from trainer_agent.agent.answers import ABORT_SECONDS
from trainer_agent.agent.avoided import Avoided
from trainer_agent.agent.begin import abandon, abort_update, begin_update
from trainer_agent.agent.checkpoint_files import Whole
from trainer_agent.agent.checkpoints import CheckpointKeeper
from trainer_agent.agent.plans import check_plan, push_plan
from trainer_agent.agent.reasons import update_passes
from trainer_agent.agent.stream import Cargo, EngineStream, StreamEnd
from trainer_agent.agent.stubs import Stubs
from trainer_agent.agent.watch import DECIDED, UpdateWatch
from trainer_agent.agent.ways import ByLink
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

REFUSAL_SECONDS = 1.0
"""When a required engine refused and nothing moves: how long its own report may take to reach the coordinator."""
POLL_SECONDS = 0.1
STRAGGLER_SECONDS = 10.0
"""After a commit: how long engines that it did not wait for may take before they are left for the next push."""
LOST_RANK_SECONDS = 1.0
"""When a rank is gone the others hear of it at once; engines get so long to confirm the abort."""
DECIDE_SECONDS = 60.0
"""Beyond the push's limit, once commits went: the coordinator decides by its own limits, if it is there."""
MAX_REASON_LENGTH = 4096
LAST_WORDS_SECONDS = 0.2
"""When a link broke: how long the word of who left it may take."""
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
    _announced: Announced | None = None
    _begun: fleet_pb2.BeginUpdateResponse = field(default_factory=fleet_pb2.BeginUpdateResponse)
    _watch: UpdateWatch | None = None
    _streams: list[EngineStream] = field(default_factory=list)
    _tasks: list[asyncio.Task[StreamEnd]] = field(default_factory=list)
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
        for stream in self._streams:
            if stream.engine_id in made.engine_ids and isinstance(stream.way, ByLink):
                stream.way.made(made)

    def link_failed(self, error: LinkFailed) -> None:
        """A leader's, or an engine's own word: the end of all bytes of a link of shared fate, else of that engine's."""
        self._note(error)
        streams = [s for s in self._streams if s.engine_id in error.engine_id.split(", ")]
        if streams and all(s.isolated for s in streams):
            for stream in streams:
                stream.give_up(error)
        else:
            # Whoever left the link first says why on its stream, at the same moment.
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.fail, error)

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
        return b"" if self._announced is None else self._announced.digest

    def _take(self, act: Callable[[Announced], None]) -> None:
        """What comes without a plan belongs to no push."""
        try:
            if self._announced is not None:
                act(self._announced)
        except WeightplaneError as error:
            self.fail(error)

    async def run(self) -> rank_pb2.PushResult:
        """The whole attempt. What went wrong is in the result, not raised."""
        self._started = _now()
        try:
            begun = await self._begin()
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
            self._announced = Announced(plan, self.release)
            self._open_streams(begun, watch, self._announced)
            self.send_plan(plan)
            await self._until_decided(watch)
        except WeightplaneError as error:
            self.fail(error)
            await self._give_up(watch, error)
        finally:
            ends = await self._end_streams(watch)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        result = self._result(watch.state, ends)
        if not result.error_reason and self._reads_on(watch.state):
            result.memory_released = False
        return result

    def _reads_on(self, state: fleet_pb2.UpdateState) -> bool:
        """After a commit: whether a checkpoint is being written from the segments from now on."""
        keeper, said = self.context.checkpoints, self._announced
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
            begun, self.context.chunk_bytes, self.context.link_host, keep_whole=self._keeps or self.keeps_whole
        )

    def _open_streams(self, begun: fleet_pb2.BeginUpdateResponse, watch: UpdateWatch, said: Announced) -> None:
        cargo = self._cargo(begun)
        for assignment in begun.plan.assignments:
            stub = self.context.stubs.engine(assignment.endpoint)
            chunks = said.logs[assignment.engine.engine_id]
            self._streams.append(EngineStream(stub, cargo, assignment, chunks, watch))
        self._tasks += [asyncio.create_task(self._run(s)) for s in self._streams]

    async def _run(self, stream: EngineStream) -> StreamEnd:
        """Run a stream; where its failure is everybody's, say so at once instead of waiting for who will not come."""
        end = await stream.run()
        if isinstance(end.error, (LinkFailed, IpcNotPossible)):
            self._note(end.error)
        elif end.error is not None and stream.fails_others:
            lost = LinkFailed(stream.engine_id, "broadcast", "join", f"its stream ended with {end.error}")
            self._note(lost)
            self.fail(end.error if isinstance(end.error, StaleTerm) else lost)
        if isinstance(end.error, LinkFailed) and stream.fails_others:
            self.fail(end.error)
        return end

    def _note(self, error: LinkFailed | IpcNotPossible) -> None:
        self.context.avoided.note(error, self._begun.update_id, self._begun.plan.assignments)

    def _cargo(self, begun: fleet_pb2.BeginUpdateResponse) -> Cargo:
        layout = self.context.layout
        manifest = weight_update_pb2.Manifest(
            layout_digest=layout.digest,
            tensor_count=len(layout.tensors),
            byte_count=layout.byte_count,
            step=self.step,
        )
        head = weight_update_pb2.UpdateOpen(
            run_id=self.context.run_id,
            model=self.context.model,
            update_id=begun.update_id,
            writer_term=self.term,
            version=begun.version,
            plan_revision=begun.plan.revision,
            manifest=manifest,
        )
        return Cargo(head, self.context.parts)

    async def _until_decided(self, watch: UpdateWatch) -> None:
        """Wait for the decision. Before GO a failure, a refusal or the limit ends the push; after GO only time does.

        Raises:
            WeightplaneError: it is to be given up.
        """
        decision = asyncio.create_task(watch.decision())
        trouble = asyncio.create_task(self._trouble(watch))
        try:
            await asyncio.wait({decision, trouble}, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if not decision.done() and watch.commits:
                await asyncio.wait({decision}, timeout=self._left() + DECIDE_SECONDS)
            if not decision.done():
                raise trouble.result() if trouble.done() else self._late(watch)
        finally:
            decision.cancel()
            trouble.cancel()

    def _late(self, watch: UpdateWatch) -> WeightplaneError:
        """The ranks' limit came first."""
        assert self._announced is not None, "streams are open"
        logs = [self._announced.logs[s.engine_id] for s in self._streams]
        streams = [
            stuck.Stream(a, log.byte_count, log.end is not None, s.sent_bytes, s.ready)
            for a, log, s in zip(self.assignments, logs, self._streams, strict=True)
        ]
        ready = stuck.before_go(streams, self.context.layout.byte_count)
        waited = stuck.after_go(watch.state, self.assignments) if watch.commits else ready
        if self.look is not None:
            self.stacks = asyncio.create_task(self.look(waited))
        phase = fleet_pb2.UpdatePhase.Name(watch.state.phase).removeprefix("UPDATE_PHASE_").lower()
        return waited.late(f"push ({phase})", _now() - self._started)

    async def _trouble(self, watch: UpdateWatch) -> WeightplaneError:
        """What makes going on senseless: a failure, a fence, a required engine that refused while all others wait."""
        stuck_since: float | None = None
        while self.error is None:
            self._drop_lost(watch)
            fence = next((s.error for s in self._streams if isinstance(s.error, StaleTerm)), None)
            if fence is not None:
                return fence
            refused = None if watch.commits else self._refused()
            stuck_since = None if refused is None else stuck_since or _now()
            if refused is not None and stuck_since is not None and _now() - stuck_since >= REFUSAL_SECONDS:
                return outcome.update_failed(watch.state, f"{refused.engine_id}: {refused.error}", self._errors())
            await _within(POLL_SECONDS, self._failed.wait())
        return self.error

    def _drop_lost(self, watch: UpdateWatch) -> None:
        """Of a leader that keeps two chunks all engines wait for the slowest; not for one that will not answer."""
        lost = outcome.lost_engines(watch.state)
        for stream in self._streams:
            if stream.engine_id in lost and stream.holds_others_up:
                stream.abort("the coordinator lost it")

    def _refused(self) -> EngineStream | None:
        """A required engine that ended its stream, where no other stream moves: ready, or ended too."""
        pairs = list(zip(self._streams, self._tasks, strict=True))
        if not all(t.done() or s.ready for s, t in pairs):
            return None
        return next((s for s, t in pairs if t.done() and s.required and s.error is not None), None)

    async def _give_up(self, watch: UpdateWatch, error: WeightplaneError) -> None:
        """Before GO nothing was installed, and an abort costs nothing. If GO was faster, the decision is waited for."""
        state = await abort_update(self.context.stubs.fleet, self._abort_request(watch.state.update_id, error))
        if state is not None and state.phase in DECIDED:
            await watch.take(state)
        elif state is not None and not isinstance(error, StaleTerm):
            await _within(DECIDE_SECONDS, watch.decision())
        if not watch.decided:
            await watch.fail(str(error))

    async def _end_streams(self, watch: UpdateWatch) -> list[StreamEnd | None]:
        """How each stream ended; None for those that had to be left."""
        if not self._tasks:
            return []
        committed = outcome.decided(watch.state, released=False) is not None
        lost = outcome.lost_engines(watch.state)
        for stream in self._streams:
            if not committed or stream.engine_id in lost:
                stream.abort(watch.state.cause or str(self.error or "the trainer agent ends"))
        limit = STRAGGLER_SECONDS if committed else 2 * ABORT_SECONDS
        await asyncio.wait(self._tasks, timeout=LOST_RANK_SECONDS if isinstance(self.error, PeerLost) else limit)
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        return [e if isinstance(e, StreamEnd) else None for e in ends]

    def _result(self, state: fleet_pb2.UpdateState, ends: Sequence[StreamEnd | None]) -> rank_pb2.PushResult:
        released = all(e is not None and e.memory_free for e in ends)
        result = outcome.decided(state, released=released)
        if result is not None:
            self.context.avoided.worked(self._begun.plan.assignments)
            return result
        error = self.error or outcome.update_failed(state, state.cause or "no cause given", self._errors())
        reported = {e.engine.engine_id: e.error_reason for e in state.engines if e.required and e.error_reason}
        told = {s.engine_id: s.error.reason for s in self._streams if s.required and s.error is not None}
        if isinstance(error, LinkFailed) and not {*reported.values(), *told.values()} <= BROKEN:
            # An engine says why it left the link.
            error = outcome.update_failed(state, str(error), self._errors())
        result = outcome.failed(error, state, released=released)
        deltas = {s.engine_id for s in self._streams if s.delta}  # whatever they met, the next attempt is whole
        reasons = [reason for engine_id, reason in [*reported.items(), *told.items()] if engine_id not in deltas]
        result.retry = not self._final and update_passes(error, reasons)
        return result

    def _errors(self) -> dict[str, WeightplaneError]:
        return {s.engine_id: s.error for s in self._streams if s.error is not None}

    def _abort_request(self, update_id: str, error: WeightplaneError) -> fleet_pb2.AbortUpdateRequest:
        return fleet_pb2.AbortUpdateRequest(
            run_id=self.context.run_id, update_id=update_id, term=self.term, reason=str(error)[:MAX_REASON_LENGTH]
        )

    def _left(self) -> float:
        return max(self._started + self.limit_seconds - _now(), 0.0)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _within(seconds: float, something: Awaitable[object]) -> None:
    """Wait for it, but no longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await something
