"""Somebody who says wrong things: frames for other runs, models, lives and layouts, counts that are not true, hellos
and calls that nobody may make.

Everything it sends must be refused with the right reason and change nothing. It never states a commit that is
right, so nothing of it may ever be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState, Held, Life, Unset
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.versions import (
    FROZEN,
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    RunId,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.sim.agent import Agent
from controlplane.sim.cast import Cast
from controlplane.sim.frames import Writer
from controlplane.sim.kernel import Process, connect
from controlplane.sim.lies import CONTENT, Lie, lies, opened
from controlplane.sim.sessions import Session
from controlplane.sim.settings import REFERENCE, digest_of
from controlplane.sim.shelf import Written
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.team import Team
from controlplane.sim.update_stream import UpdateStream


class Rogue(Process):
    """Acts when the world's faults say so."""

    def __init__(self, around: Surroundings, cast: Cast) -> None:
        super().__init__(around.kernel, "rogue")
        self._around = around
        self._cast = cast
        self._count = 0

    def boot(self) -> None:
        pass

    def act(self) -> None:
        rng = self.kernel.rng
        if rng.random() < 0.4:
            kinds = (self._wrong_hello, self.misfit, self._frozen_hello, self._wrong_calls, self._old_life)
            rng.choice(kinds)()
            return
        agent = self._agent()
        if agent.up and agent.present.running:
            self._count += 1
            version = WeightVersion(10**6 + self._count, agent.present.core.term)
            self.lie(agent, version, rng.choice(list(lies(agent.present, version).values())))

    def _agent(self) -> Agent:
        return self.kernel.rng.choice(list(self._cast.agents.values()))

    # ---- to an engine agent ----

    def lie(self, agent: Agent, version: WeightVersion, lie: Lie) -> None:
        stream = connect(self, agent)
        if stream is None:
            return
        honest = opened(agent.present, UpdateId(f"rogue{self._count}"), version)
        event = replace(honest, **lie.changes)  # type: ignore[arg-type]
        remote: list[UpdateStream] = []
        stream.to_server(lambda: self._deliver(agent, remote, event, accept=lambda: agent.present.accept(stream)))
        for frame in lie.frames:
            stream.to_server(lambda frame=frame: frame(remote[0]) if remote else None)  # type: ignore[misc]
        self.after(self.kernel.rng.choice((1.0, 20.0)), stream.cancel)

    def _deliver(
        self, agent: Agent, remote: list[UpdateStream], event: ee.Opened, accept: Callable[[], UpdateStream]
    ) -> None:
        if not agent.present.over:
            remote.append(accept())
            remote[0].open(lambda number: replace(event, stream=number), Writer(lambda a, b: None, _nothing, _nothing))

    # ---- to the coordinator: hellos ----

    def _hello(self, event: Callable[[int], fe.Event]) -> None:
        stream = connect(self, self._cast.coordinator)
        if stream is None:
            return
        session, coordinator = Session(stream, lambda news, term: None, lambda news: None), self._cast.coordinator
        stream.to_server(lambda: coordinator.hello(session, event))
        self.after(1.0, stream.cancel)

    def _engine(self, state: EngineState, devices: tuple[str, ...]) -> Callable[[int], fe.Event]:
        uuids = tuple(DeviceUuid(d) for d in devices)
        place = EnginePlace(state.engine_id, state.incarnation, "rogue", "host", uuids)
        return lambda session: fe.EngineConnected(session, place, state, True, (), Term(0), Term(0))

    def _wrong_hello(self) -> None:
        """An engine of another run."""
        state = replace(self._agent().present.core.state, run_id=RunId("other"), incarnation=Incarnation("rogue"))
        self._hello(self._engine(state, ("gpu-rogue",)))

    def misfit(self) -> None:
        """An engine of two devices, one of them a trainer's."""
        agent, coordinator = self._agent(), self._cast.coordinator
        holder = coordinator.core.trainers.get(agent.spec.name) if coordinator.up else None
        if holder is not None and holder.session is not None and holder.ranks:
            state = replace(agent.present.core.state, incarnation=Incarnation("rogue"))
            self._hello(self._engine(state, (holder.ranks[0].device_uuid, "gpu-rogue")))

    def _frozen_hello(self) -> None:
        """A model is trained, or served as it was loaded: engines and trainers that would have it otherwise."""
        coordinator, run = self._cast.coordinator, self._around.settings.run_id
        if not coordinator.up or not coordinator.core.model(REFERENCE).frozen:
            return
        trained = next((n for n, m in sorted(coordinator.core.models.items()) if m.term), None)
        name, life = EngineId("rogue"), Incarnation("rogue")
        other = Held(FROZEN, digest_of(CONTENT))
        hellos = [
            self._engine(EngineState(run, REFERENCE, name, life, Life.RUNNING, Unset()), ("gpu-rogue",)),
            self._engine(EngineState(run, REFERENCE, name, life, Life.RUNNING, other, frozen=True), ("gpu-rogue",)),
            self._trainer_of(REFERENCE),
        ]
        if trained is not None:
            frozen = EngineState(run, trained, name, life, Life.RUNNING, other, frozen=True)
            hellos.append(self._engine(frozen, ("gpu-rogue",)))
        self._hello(self.kernel.rng.choice(hellos))

    def _trainer_of(self, model: ModelName) -> Callable[[int], fe.Event]:
        run, ranks = self._around.settings.run_id, (RankPlace(Rank(0), "host", DeviceUuid("gpu-rogue")),)
        name, life = TrainerId("rogue"), Incarnation("rogue")
        return lambda session: fe.TrainerConnected(session, run, model, name, life, ranks, Term(0), "", True)

    # ---- to the coordinator: calls ----

    def _wrong_calls(self) -> None:
        coordinator, rng = self._cast.coordinator, self.kernel.rng
        team = rng.choice(list(self._cast.teams.values()))
        stream = connect(self, coordinator)
        if stream is not None:
            event = rng.choice(self.calls(team))
            stream.to_server(lambda: self.call(event))
            self.after(1.0, stream.cancel)

    def calls(self, team: Team) -> list[fe.Event]:
        run, other, model = self._around.settings.run_id, RunId("other"), team.spec.name
        core, nobodys = self._cast.coordinator.core, UpdateId("nobody's")
        term, layout = core.model(model).term, team.spec.layout
        version = WeightVersion(10**6, term)
        kept = Written(layout, CONTENT).kept(model, version, "rogue")
        calls: list[fe.Event] = [
            fe.AbortRequested(run, nobodys, Term(1), "why not"),
            fe.AbortRequested(other, nobodys, Term(1), "why not"),
            fe.UpdateRequested(UpdateId("r"), "r", run, model, Term(0), 1, None),
            fe.UpdateRequested(UpdateId("r"), "r", other, model, term, 1, None),
            fe.RollbackRequested(UpdateId("r"), "r", run, model, 10**6),
            fe.RollbackRequested(UpdateId("r"), "r", other, model, 1),
            fe.CheckpointPublished(run, term, kept),
            fe.CheckpointPublished(run, Term(0), kept),
            fe.CheckpointRetired(run, model, Term(0), 1),
            fe.LedgerAccepted(other, "nobody"),
            fe.KeepRequested(other, EngineId("e0"), model, 1),
            fe.KeepRequested(run, EngineId("nobody"), ModelName(""), 1),
            fe.KeepRequested(run, EngineId("e0"), ModelName("teacher"), 1),
            fe.KeepRequested(run, next(iter(team.agents.values())).engine_id, model, 10**6),
            fe.ReleaseRequested(other, EngineId("e0")),
            fe.ReleaseRequested(run, EngineId("nobody")),
        ]
        if team.served and term:
            served = max(team.served)
            calls.append(fe.CheckpointPublished(run, term, replace(kept, version=served)))
        answered = [r.known for r in core.requests.values() if r.known.model == model]
        if answered and term:
            known = self.kernel.rng.choice(answered)
            conflict = fe.UpdateRequested(UpdateId("r"), known.request_id, run, model, term, 1, None, b"other", 1)
            calls += [conflict, conflict]
        return calls

    def call(self, event: fe.Event) -> None:
        witness = self._around.witness
        try:
            self._cast.coordinator.handle(event)
        except e.WeightplaneError:
            return
        witness.check(False, "refusals", f"{event} was not refused")

    def _old_life(self) -> None:
        """A report for another life, engine or model than the session's."""
        coordinator = self._cast.coordinator
        live = [r for _, r in sorted(coordinator.core.engines.items()) if r.session in coordinator.sessions]
        stream = connect(self, coordinator)
        if stream is None:
            return
        if live:
            record = self.kernel.rng.choice(live)
            session = record.session
            assert session is not None
            others = (
                replace(record.state, incarnation=Incarnation("old")),
                replace(record.state, engine_id=EngineId("another")),
                replace(record.state, model=ModelName("teacher")),
            )
            event = fe.EngineReported(session, self.kernel.rng.choice(others), True)
            stream.to_server(lambda: self._old_word(event))
        self.after(1.0, stream.cancel)

    def _old_word(self, event: fe.EngineReported) -> None:
        with suppress(
            e.WrongIncarnation, e.UnknownEngine, e.WrongModel
        ):  # or its session ended meanwhile, and the word is nobody's
            self._cast.coordinator.handle(event)


def _nothing() -> None:
    pass
