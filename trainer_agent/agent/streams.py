"""All streams of one push, one to each engine of its plan: opened together, looked at together, ended together.

Promises: a stream's failure that is everybody's, such as the end of a link of shared fate, ends the push at once, and
one that is not ends nobody else's; who holds others up and is lost, by the coordinator's word, is left. What an engine
holds is never judged from here (INV-8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from controlplane.core.errors import IpcNotPossible, LinkFailed, StaleTerm, WeightplaneError
from trainer_agent.agent import outcome, stuck
from trainer_agent.agent.announced import Announced
from trainer_agent.agent.answers import ABORT_SECONDS
from trainer_agent.agent.avoided import Avoided
from trainer_agent.agent.stream import Cargo, EngineStream, StreamEnd
from trainer_agent.agent.stubs import Stubs
from trainer_agent.agent.watch import UpdateWatch
from trainer_agent.agent.ways import ByDevice, ByLink
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2

STRAGGLER_SECONDS = 10.0
"""After a commit: how long engines that it did not wait for may take before they are left for the next push."""
AWAITED_SECONDS = 60.0
"""The same, where the coordinator awaits one whose bytes come only after go: left each time in the middle of them, it
would be poisoned by each push, and never serve."""
LOST_RANK_SECONDS = 1.0
"""When a rank is gone the others hear of it at once; engines get so long to confirm the abort."""
LAST_WORDS_SECONDS = 0.2
"""When a link broke: how long the word of who left it may take."""


@dataclass
class EngineStreams:
    """Empty until `open`."""

    update_id: str
    assignments: Sequence[fleet_pb2.Assignment]
    announced: Announced
    avoided: Avoided
    fail: Callable[[WeightplaneError], None]
    """The push is over, for this reason."""
    _streams: list[EngineStream] = field(default_factory=list)
    _tasks: list[asyncio.Task[StreamEnd]] = field(default_factory=list)

    def open(self, stubs: Stubs, cargo: Cargo, watch: UpdateWatch) -> None:
        """Begin, each at its own pace."""
        for assignment in self.assignments:
            chunks = self.announced.logs[assignment.engine.engine_id]
            self._streams.append(EngineStream(stubs.engine(assignment.endpoint), cargo, assignment, chunks, watch))
        self._tasks += [asyncio.create_task(self._run(s)) for s in self._streams]

    # ---- links ----

    def link_made(self, made: rank_pb2.LinkMade) -> None:
        """Their leader listens."""
        for stream in self._streams:
            if stream.engine_id in made.engine_ids and isinstance(stream.way, ByLink):
                stream.way.made(made)

    def exports_made(self, made: rank_pb2.ExportsMade) -> None:
        """A slot's ranks have device memory for the chunks."""
        for stream in self._streams:
            if stream.engine_id in made.engine_ids and isinstance(stream.way, ByDevice):
                stream.way.made(made)

    def ipc_failed(self, error: IpcNotPossible) -> None:
        """A rank's word: it can export no device memory, or write none. The next plan takes another way."""
        self._note(error)
        self.fail(error)

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
        self.avoided.note(error, self.update_id, self.assignments)

    # ---- looking ----

    @property
    def fence(self) -> StaleTerm | None:
        """Some engine knows a later term."""
        return next((s.error for s in self._streams if isinstance(s.error, StaleTerm)), None)

    @property
    def refused(self) -> EngineStream | None:
        """A required engine that ended its stream, where no other stream moves: ready, or ended too."""
        pairs = list(zip(self._streams, self._tasks, strict=True))
        if not all(t.done() or s.ready for s, t in pairs):
            return None
        return next((s for s, t in pairs if t.done() and s.required and s.error is not None), None)

    @property
    def told(self) -> outcome.Told:
        """What each engine told its stream last."""
        errors = {s.engine_id: s.error for s in self._streams if s.error is not None}
        required = {s.engine_id for s in self._streams if s.required}
        return outcome.Told(
            errors=errors,
            required_reasons={name: error.reason for name, error in errors.items() if name in required},
            deltas=frozenset(s.engine_id for s in self._streams if s.delta),
        )

    def progress(self) -> list[stuck.Stream]:
        """How far each is."""
        logs = [self.announced.logs[s.engine_id] for s in self._streams]
        return [
            stuck.Stream(a, log.byte_count, log.end is not None, s.sent_bytes, s.ready)
            for a, log, s in zip(self.assignments, logs, self._streams, strict=True)
        ]

    # ---- ending ----

    def abort_unfed(self, cause: str) -> None:
        """After go, of a push that cannot go on: streaming engines stand still until their bytes come."""
        for stream in self._streams:
            if stream.streaming and not stream.fed:
                stream.abort(cause)

    def drop_lost(self, state: fleet_pb2.UpdateState) -> None:
        """Of a leader that keeps two chunks all engines wait for the slowest; not for one that will not answer."""
        lost = outcome.lost_engines(state)
        for stream in self._streams:
            if stream.engine_id in lost and stream.holds_others_up:
                stream.abort("the coordinator lost it")

    async def end(self, state: fleet_pb2.UpdateState, cause: str, *, rank_lost: bool) -> list[StreamEnd | None]:
        """How each ended; None for those that had to be left. After a commit they are let come to their end."""
        if not self._tasks:
            return []
        committed = outcome.decided(state, released=False) is not None
        lost = outcome.lost_engines(state)
        for stream in self._streams:
            if not committed or stream.engine_id in lost:
                stream.abort(cause)
        limit = patience(self.assignments, state) if committed else 2 * ABORT_SECONDS
        await asyncio.wait(self._tasks, timeout=LOST_RANK_SECONDS if rank_lost else limit)
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        return [e if isinstance(e, StreamEnd) else None for e in ends]


def patience(assignments: Sequence[fleet_pb2.Assignment], state: fleet_pb2.UpdateState) -> float:
    """After a commit: seconds for engines that it did not wait for."""
    streaming = {a.engine.engine_id for a in assignments if a.apply == weight_update_pb2.APPLY_STREAMING}
    return AWAITED_SECONDS if streaming & outcome.awaited_engines(state) else STRAGGLER_SECONDS
