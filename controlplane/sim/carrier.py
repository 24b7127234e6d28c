"""The coordinator as a writer: one stream per carry, which names a checkpoint; as `controlplane.coordinator.carrier`.

What comes of it is told to the core as `CarryEnded`; what the engine holds then is the engine's own report's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, UpdateId
from controlplane.sim.agent import Agent
from controlplane.sim.frames import Writer
from controlplane.sim.kernel import Stream, connect
from controlplane.sim.sessions import Sessions
from controlplane.sim.update_stream import UpdateStream


class Carrier:
    """All carries of one coordinator's life; a crash ends them."""

    def __init__(self, coordinator: Sessions, agents: Mapping[str, Agent]) -> None:
        self.coordinator = coordinator
        self.agents = agents
        self._under_way: dict[tuple[UpdateId, EngineId], Carriage] = {}

    def forget(self) -> None:
        self._under_way.clear()

    def start(self, carry: fx.Carry) -> None:
        carriage = Carriage(self, carry)
        self._under_way[(carry.update_id, carry.engine.engine_id)] = carriage
        self.coordinator.after(0.0, carriage.begin)

    def over(self, carry: fx.Carry, error: e.WeightplaneError | None) -> None:
        del self._under_way[(carry.update_id, carry.engine.engine_id)]
        self.coordinator.handle(fe.CarryEnded(carry.update_id, carry.engine.engine_id, error))

    def update_changed(self, update_id: UpdateId) -> None:
        for (of, _), carriage in list(self._under_way.items()):
            if of == update_id:
                carriage.look()


class Carriage:
    """One carry."""

    def __init__(self, carrier: Carrier, carry: fx.Carry) -> None:
        self._carrier = carrier
        self._coordinator = carrier.coordinator
        self._around = self._coordinator.around
        self._carry = carry
        self._stream: Stream | None = None
        self._remote: list[UpdateStream] = []
        self._ready = False
        self._said = False
        self._over = False

    def begin(self) -> None:
        self._around.faults.point(self._coordinator, "coordinator.before_carry")
        agent = self._carrier.agents[self._carry.engine.engine_id]
        stream = self._stream = connect(self._coordinator, agent)
        if stream is None:
            self._end(e.PeerLost(peer=agent.name, cause="nobody listens there"))
            return
        stream.on_client_end = self._end
        writer = Writer(lambda layout, attached: self._accepted(attached), self._got_ready, lambda: self._end(None))
        opened = self._opened()
        stream.to_server(lambda: self._deliver(agent, stream, opened, writer))
        s = self._around.settings
        self._coordinator.after(s.ready_limit + s.go_limit, self._late)

    def _deliver(self, agent: Agent, stream: Stream, opened: partial[ee.Opened], writer: Writer) -> None:
        if not agent.present.over:
            self._remote.append(agent.present.accept(stream))
            self._remote[0].open(opened, writer, self._carry.checkpoint.name)

    def _opened(self) -> partial[ee.Opened]:
        kept = self._carry.checkpoint
        return partial(
            ee.Opened,
            run_id=self._around.settings.run_id,
            model=kept.model,
            incarnation=self._carry.engine.incarnation,
            update_id=self._carry.update_id,
            writer_term=self._coordinator.core.term,
            version=self._carry.version,
            layout_digest=kept.layout_digest,
            tensor_count=kept.tensor_count,
            byte_count=kept.byte_count,
            by_coordinator=True,
            engine_id=self._carry.engine.engine_id,
        )

    # ---- what the engine says ----

    def _accepted(self, attached: bool) -> None:
        self._said = self._said or attached

    def _got_ready(self) -> None:
        self._ready = True
        self.look()

    def look(self) -> None:
        """Commit as soon as the engine is ready and the fleet goes."""
        if self._over or self._said or not self._ready:
            return
        update = self._coordinator.core.updates.get(self._carry.update_id)
        if self._carry.waits_for_go and (update is None or update.phase is Phase.PREPARING):
            return
        self._said = True
        version, kept = self._carry.version, self._carry.checkpoint
        if update is not None and not update.went_go:
            self._to_agent(lambda s: s.abort("given up"))
            return
        self._around.faults.point(self._coordinator, "coordinator.before_carry_commit")
        self._to_agent(lambda s: s.commit(version, kept.file_count, kept.byte_count, kept.content_digest))

    def _to_agent(self, act: Callable[[UpdateStream], None]) -> None:
        remote = self._remote
        if self._stream is not None:
            self._stream.to_server(lambda: act(remote[0]) if remote else None)

    def _late(self) -> None:
        if not self._over:
            seconds = self._around.settings.ready_limit + self._around.settings.go_limit
            self._end(e.DeadlineExceeded("carry", self._carry.engine.engine_id, seconds))

    def _end(self, error: e.WeightplaneError | None) -> None:
        if self._over:
            return
        self._over = True
        if self._stream is not None:
            self._stream.cancel()
        self._carrier.over(self._carry, error)
