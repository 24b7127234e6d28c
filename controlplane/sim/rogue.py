"""Somebody who says wrong things: frames for other runs, models, lives and layouts, counts that are not true.

Everything it sends must be refused with the right reason and change nothing. It never states a commit that is
right, so nothing of it may ever be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.core.plan import EnginePlace
from controlplane.core.versions import (
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    UpdateId,
    WeightVersion,
)
from controlplane.sim.coordinator import Session
from controlplane.sim.kernel import Process, connect
from controlplane.sim.settings import LAYOUT, POLICY, checksum, digest_of
from controlplane.sim.update_stream import ChunkFrame, UpdateStream, Writer

if TYPE_CHECKING:
    from controlplane.sim.agent import Agent, Life
    from controlplane.sim.world import World

CONTENT = 999
"""Weights that are no version's."""
A, B = LAYOUT.tensors
LAYOUTS = {
    "MANIFEST_INCOMPLETE": Layout((A,)),
    "UNKNOWN_TENSOR": Layout((A, B, TensorSpec("c", DType.BF16, (1,)))),
    "SHAPE_MISMATCH": Layout((A, replace(B, shape=(4,)))),
    "DTYPE_MISMATCH": Layout((A, replace(B, dtype=DType.F32))),
    "FORMAT_MISMATCH": Layout((A, B), format="other"),
}

Frame = Callable[[UpdateStream], None]


@dataclass(frozen=True, slots=True)
class Lie:
    """Changes to an honest open frame, and what follows it."""

    changes: dict[str, object]
    frames: Sequence[Frame] = ()


class Rogue(Process):
    """Acts when the world's faults say so."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kernel, "rogue")
        self.world = world
        self._count = 0

    def boot(self) -> None:
        pass

    def act(self) -> None:
        rng = self.kernel.rng
        if rng.random() < 0.3:
            rng.choice((self._wrong_hello, self._misfit, self._wrong_calls, self._old_life))()
            return
        agent = rng.choice(list(self.world.agents.values()))
        if agent.up and agent.present.running:
            self._count += 1
            self.lie(agent, rng.choice(list(self.lies(agent.present).values())))

    # ---- to an engine agent ----

    def lies(self, life: Life) -> dict[str, Lie]:
        """By the reason that it should meet."""
        version = self._version(life)
        layout = _layout_if_needed
        whole = (layout, _chunk(version, 0, CONTENT), _chunk(version, 1, CONTENT))
        digest = digest_of(CONTENT)
        lies = {
            "WRONG_RUN": Lie({"run_id": RunId("other")}),
            "WRONG_MODEL": Lie({"model": ModelName("teacher")}),
            "WRONG_INCARNATION": Lie({"incarnation": Incarnation("old")}),
            "STALE_TERM": Lie({"writer_term": Term(max(life.core.term - 1, 0))}),
            "STALE_VERSION": Lie({"version": WeightVersion(max(life.highest - 1, 0), version.term)}),
            "LAYOUT_UNKNOWN": Lie({"layout_digest": b"x" * 32}, (layout,)),
            "BYTE_COUNT_MISMATCH": Lie({}, (*whole, lambda s: s.commit(version, 2, 1, digest))),
            "chunks": Lie({}, (*whole, lambda s: s.commit(version, 3, LAYOUT.byte_count, digest))),
            "manifest": Lie({"byte_count": 1}, (layout,)),
            "content": Lie({}, (*whole, lambda s: s.commit(version, 2, LAYOUT.byte_count, b"y" * 32))),
            "FRAME_OUT_OF_ORDER": Lie({}, (layout, lambda s: s.commit(version, 0, 0, digest))),
            "UPDATE_ABORTED": Lie({}, (layout, lambda s: s.abort("no reason"))),
            "silence": Lie({}, (layout,)),
            "CHECKSUM_MISMATCH": Lie({}, (layout, _chunk(version, 0, CONTENT, really=7))),
            "INVALID_MESSAGE": Lie({}, (layout, _no_such_tensor(version))),
            "another version": Lie({}, (layout, _chunk(WeightVersion(3, Term(0)), 0, CONTENT))),
        }
        if life.highest > 0:
            same = WeightVersion(life.highest, version.term)
            frames = (layout, _chunk(same, 0, CONTENT), _chunk(same, 1, CONTENT))
            lies["VERSION_CONFLICT"] = Lie(
                {"version": same}, (*frames, lambda s: s.commit(same, 2, LAYOUT.byte_count, digest))
            )
        for reason, other in LAYOUTS.items():
            changes: dict[str, object] = {"layout_digest": other.digest, "byte_count": other.byte_count}
            lies[reason] = Lie(changes, (lambda s, other=other: s.layout(other),))  # type: ignore[misc]
        return lies

    def _version(self, life: Life) -> WeightVersion:
        return WeightVersion(10**6 + self._count, life.core.term)

    def lie(self, agent: Agent, lie: Lie) -> None:
        stream = connect(self, agent)
        if stream is None:
            return
        life = agent.present
        opened = replace(self._opened(life), **lie.changes)  # type: ignore[arg-type]
        remote: list[UpdateStream] = []
        stream.to_server(lambda: self._deliver(agent, remote, opened, lie, accept=lambda: agent.present.accept(stream)))
        for frame in lie.frames:
            stream.to_server(lambda frame=frame: frame(remote[0]) if remote else None)  # type: ignore[misc]
        self.after(self.kernel.rng.choice((1.0, 20.0)), stream.cancel)

    def _deliver(
        self,
        agent: Agent,
        remote: list[UpdateStream],
        opened: ee.Opened,
        lie: Lie,
        accept: Callable[[], UpdateStream],
    ) -> None:
        if not agent.present.over:
            remote.append(accept())
            remote[0].open(lambda number: replace(opened, stream=number), Writer(lambda a, b: None, _nothing, _nothing))

    def _opened(self, life: Life) -> ee.Opened:
        state = life.core.state
        return ee.Opened(
            0,
            state.run_id,
            state.model,
            state.incarnation,
            UpdateId(f"rogue{self._count}"),
            life.core.term,
            self._version(life),
            LAYOUT.digest,
            len(LAYOUT.tensors),
            LAYOUT.byte_count,
        )

    # ---- to the coordinator ----

    def _hello(self, event: Callable[[int], fe.Event]) -> Session | None:
        stream = connect(self, self.world.coordinator)
        if stream is None:
            return None
        session, coordinator = Session(stream, lambda news, term: None, lambda news: None), self.world.coordinator
        stream.to_server(lambda: coordinator.hello(session, event))
        self.after(1.0, stream.cancel)
        return session

    def _engine(self, run: RunId, incarnation: str, devices: tuple[str, ...]) -> Callable[[int], fe.Event]:
        agent = self.kernel.rng.choice(list(self.world.agents.values()))
        state = replace(agent.present.core.state, run_id=run, incarnation=Incarnation(incarnation))
        uuids = tuple(DeviceUuid(d) for d in devices)
        place = EnginePlace(EngineId(agent.name), state.incarnation, "rogue", "host", uuids)
        return lambda session: fe.EngineConnected(session, place, state, True, (), Term(0), Term(0))

    def _wrong_hello(self) -> None:
        self._hello(self._engine(RunId("other"), "rogue", ("gpu-rogue",)))

    def _misfit(self) -> None:
        """An engine of two devices, one of them the trainer's."""
        holder = self.world.coordinator.core.trainers.get(POLICY) if self.world.coordinator.up else None
        if holder is not None and holder.session is not None and holder.ranks:
            self._hello(self._engine(self.world.settings.run_id, "rogue", (holder.ranks[0].device_uuid, "gpu-rogue")))

    def _wrong_calls(self) -> None:
        coordinator, run = self.world.coordinator, self.world.settings.run_id
        calls: tuple[fe.Event, ...] = (
            fe.AbortRequested(run, UpdateId("nobody's"), Term(1), "why not"),
            fe.AbortRequested(RunId("other"), UpdateId("nobody's"), Term(1), "why not"),
            fe.UpdateRequested(UpdateId("r"), "r", run, POLICY, Term(0), 1, None),
            fe.UpdateRequested(UpdateId("r"), "r", RunId("other"), POLICY, Term(1), 1, None),
        )
        stream = connect(self, coordinator)
        if stream is not None:
            event = self.kernel.rng.choice(calls)
            stream.to_server(lambda: self._call(event))
            self.after(1.0, stream.cancel)

    def _call(self, event: fe.Event) -> None:
        witness = self.world.witness
        try:
            self.world.coordinator.handle(event)
        except e.WeightplaneError:
            return
        witness.check(False, "refusals", f"{event} was not refused")

    def _old_life(self) -> None:
        """A report for another life than the session's."""
        coordinator = self.world.coordinator
        live = [r for _, r in sorted(coordinator.core.engines.items()) if r.session in coordinator.sessions]
        stream = connect(self, coordinator)
        if stream is None:
            return
        if live:
            record = self.kernel.rng.choice(live)
            session = record.session
            assert session is not None
            event = fe.EngineReported(session, replace(record.state, incarnation=Incarnation("old")), True)
            stream.to_server(lambda: self._old_word(event))
        self.after(1.0, stream.cancel)

    def _old_word(self, event: fe.EngineReported) -> None:
        with suppress(e.WrongIncarnation):  # or its session ended meanwhile, and the word is nobody's
            self.world.coordinator.handle(event)


def _layout_if_needed(stream: UpdateStream) -> None:
    if stream.layout_needed:
        stream.layout(LAYOUT)


def _chunk(version: WeightVersion, index: int, content: int, really: int | None = None) -> Frame:
    """A whole tensor; `really` are the bytes that come, whatever its checksum says."""
    record = Record(index, 0, 0, LAYOUT.tensors[index].byte_count, checksum(content, index))
    return _frame(version, index, record, content if really is None else really)


def _no_such_tensor(version: WeightVersion) -> Frame:
    return _frame(version, 0, Record(99, 0, 0, 1, None), CONTENT)


def _frame(version: WeightVersion, index: int, record: Record, content: int) -> Frame:
    def event(stream: int) -> ee.ChunkArrived:
        return ee.ChunkArrived(stream, version, index, (record,), record.byte_count)

    return lambda s: s.chunk(ChunkFrame(event, {record.tensor: content}))


def _nothing() -> None:
    pass
