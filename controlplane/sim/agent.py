"""An engine agent's process: one `EngineCore` after the other, with what carries its events in and its effects out.

As `engine_agent` does: `Remember` is synced before anything after it, a stream that ended in any way is one
`StreamEnded`, an install goes on without its stream. The session is `link`'s, the engine itself `work`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, Hold, HoldKind, Poisoned, Residency
from controlplane.core.versions import EngineId, Incarnation
from controlplane.sim.disks import AgentDisk, Remembered
from controlplane.sim.kernel import Action, Stream
from controlplane.sim.life import AgentProcess, Life
from controlplane.sim.link import Link
from controlplane.sim.requests import Requests
from controlplane.sim.seat import Seat
from controlplane.sim.sessions import Sessions
from controlplane.sim.settings import ModelSpec, digest_of
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.update_stream import UpdateStream
from controlplane.sim.work import EngineWork

START_SECONDS = (0.1, 1.5)


class EngineLife(Life):
    """What one incarnation does; `follow` begins the next one."""

    def __init__(
        self,
        agent: AgentProcess,
        incarnation: Incarnation,
        follow: Action,
        coordinator: Sessions,
        around: Surroundings,
    ) -> None:
        seen, settings = agent.disk.synced, around.settings
        state = EngineState(settings.run_id, agent.spec.name, EngineId(agent.name), incarnation)
        core = settings.engine_core(state, term=seen.term, coordinator_term=seen.coordinator_term, number=seen.number)
        super().__init__(agent, core)
        self._around = around
        self._follow = follow
        self.requests = Requests(self, around)
        self.link = Link(self, coordinator, around)
        self.work = EngineWork(self, self.requests, around)
        self.waits = False
        """It died asleep: its devices are somebody else's, and nobody starts an engine on them."""
        self.streams: dict[int, UpdateStream] = {}
        self.streams_made = 0

    def describe(self) -> str:
        state = self.core.state
        holds = ", ".join(sorted(map(str, state.holds)))
        return f"{state.word(self.core.served)} {state.applied or ''} {holds}".strip()

    def begin(self) -> None:
        self.after(self._around.kernel.rng.uniform(*START_SECONDS), self._started)

    def _started(self) -> None:
        if self._around.faults.engine_fails():
            self.die("it did not start")
            return
        content = self.agent.content
        initial = None if content is None else digest_of(content)
        self.apply(ee.Started(self.agent.spec.expected, self.agent.seat.capabilities, initial))
        self.link.connect()

    def die(self, cause: str) -> None:
        """The engine's processes are gone: nothing of this incarnation is left, and another follows."""
        if self.over:
            return
        self.apply(ee.Died(cause))
        self.requests.end_all()
        self.link.end()
        self.over = True
        for update_stream in list(self.streams.values()):
            update_stream.stream.refuse(e.EngineDied(engine_id=self.agent.name, cause=cause))
        state = self.core.state
        self.waits = state.residency is not Residency.AWAKE and state.held_by(HoldKind.ASLEEP) is not None
        if not self.waits:
            self._replaced()

    def _replaced(self) -> None:
        self.agent.after(self._around.kernel.rng.uniform(0.1, 1.0), self._follow)

    def devices_given(self, owner: str) -> None:
        """The owner of a sleep wakes an engine that died in it, whole: a fresh one may take the devices."""
        if self.waits and owner == self.core.state.held_by(HoldKind.ASLEEP):
            self.waits = False
            self._replaced()

    # ---- events ----

    def apply(self, event: ee.Event) -> list[fx.Effect]:
        """Decide an event and carry out what is not its caller's own. Raises the core's refusals."""
        before = self.core.state
        try:
            effects = self.core.handle(event, self._around.kernel.now)
        except e.WeightplaneError as error:
            self._around.witness.refused(error)
            self._around.coverage.engine_events[type(event).__name__] += 1
            self._around.witness.check(self.core.state == before, "refusals", f"{error.reason} changed {self}")
            raise
        self._around.witness.engine(self, event, before, effects)
        for effect in effects:
            self._carry_out(effect)
        self._around.witness.acted(self, event)
        return effects

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Remember(term, coordinator_term, number):
                self.agent.disk.save(Remembered(term, coordinator_term, number))
            case fx.EndStream(stream, error):
                self._around.witness.refused(error)
                if stream in self.streams:
                    self.after(0.0, partial(self._end_stream, stream, error))
            case fx.DropStaged(stream):
                self.drop(stream)
            case fx.CutStreaming(_, error):
                self.work.streaming.cut(error)
            case fx.InstallDecided(update_id, error):
                self.decided(update_id, error)
            case fx.Report():
                self._changed()
            case _:
                pass  # the stream or call that caused it answers

    def _end_stream(self, stream: int, error: e.WeightplaneError) -> None:
        if stream in self.streams:
            self.streams[stream].fail(error)

    def _changed(self) -> None:
        self.work.scheduler.look_at_gate()
        self.requests.look_again()
        self.link.send_soon()
        state = self.core.state
        if state.frozen and isinstance(state.weights, Poisoned):  # no update will ever heal it
            self.after(0.1, lambda: self.die("poisoned, and it takes no update"))

    # ---- calls ----

    def generate(self, stream: Stream, tokens: int, wanted: int | None) -> None:
        """A rollout client asks for tokens."""
        if not self.over:
            self.requests.generate(stream, tokens, wanted)

    def accept(self, stream: Stream) -> UpdateStream:
        """A writer connected."""
        self.streams_made += 1
        number = self.streams_made
        self.streams[number] = UpdateStream(self, self.work, self._around, stream, number, self._stream_over)
        return self.streams[number]

    def _stream_over(self, number: int) -> None:
        self.streams.pop(number, None)

    def check_meant(self, incarnation: Incarnation) -> None:
        """Raises WrongIncarnation: a call for another life; PeerLost: there is none now."""
        state = self.core.state
        error: e.WeightplaneError | None = None
        if self.over and not self.waits:
            error = e.PeerLost(peer=state.engine_id, cause="its engine is between two lives")
        elif incarnation != state.incarnation:
            error = e.WrongIncarnation(engine_id=state.engine_id, expected=state.incarnation, got=incarnation)
        if error is not None:
            self._around.witness.refused(error)
            raise error

    def hold(self, kind: HoldKind, owner: str, *, present: bool) -> None:
        """PauseGeneration, Drain, or the end of one of them."""
        self.apply(ee.HoldChanged(Hold(kind, owner), present))

    def leave(self) -> None:
        """The agent ends on purpose."""
        self.apply(ee.Stopping())
        self.link.goodbye()
        self.after(0.3, self._left)

    def _left(self) -> None:
        self.apply(ee.Died("the agent ended"))
        self.agent.crash()


Command = Callable[[EngineLife, Action], None]
"""Of a caller of Lifecycle: what to do with the life that it means, and what to do when that is done."""


class Agent(AgentProcess):
    """Its lives, one after the other."""

    present: EngineLife

    def __init__(
        self, around: Surroundings, coordinator: Sessions, spec: ModelSpec, seat: Seat, content: int | None = None
    ) -> None:
        """`content`: of a frozen model, the weights that it loads."""
        disk = AgentDisk(between=lambda: around.faults.point(self, "engine.before_sync"))
        super().__init__(around.kernel, spec, seat, disk, content)
        self._around = around
        self._coordinator = coordinator

    def boot(self) -> None:
        """At once, on lent devices too: that an agent waits until they are given back is attacked in its own tests."""
        self.new_life()

    def new_life(self) -> None:
        """A fresh engine, in a new incarnation."""
        self.lives += 1
        incarnation = Incarnation(f"{self.name}/{self.lives}")
        self.present = EngineLife(self, incarnation, self.new_life, self._coordinator, self._around)
        self.present.begin()

    def crash(self) -> None:
        self.present.over = True
        super().crash()

    def command(self, stream: Stream, incarnation: Incarnation, act: Command, answer: Action) -> None:
        """A Lifecycle call, meant for one incarnation."""
        try:
            self.present.check_meant(incarnation)
            act(self.present, lambda: stream.to_client(answer))
        except e.WeightplaneError as error:
            stream.refuse(error)
