"""The witness's half that watches the coordinator: what it knows, decides, tells and routes to (INV-7 to INV-10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.canary import AT_LEAST
from controlplane.core.engine_state import EngineState, HoldKind, Residency, Stage
from controlplane.core.plan import EnginePlace, Plan
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, Term, WeightVersion
from controlplane.sim.news import FleetNews
from controlplane.sim.witness_base import Watched
from controlplane.sim.witness_records import Delivered, Lent, RecordWitness

IN_THE_WEIGHTS = (Stage.INSTALLING, Stage.APPLIED, Stage.FAILED)


class FleetWitness(RecordWitness):
    """Nothing in a `FleetCore` is asked whether it is right; what it knows is compared with what was delivered."""

    def fleet(self, coordinator: Watched, event: fe.Event, effects: list[fx.Effect]) -> None:
        """The coordinator decided `event`; nothing was told yet."""
        self.coverage.fleet_events[type(event).__name__] += 1
        core = coordinator.core
        match event:
            case fe.EngineConnected():
                self._note_hello(coordinator, event)
            case fe.EngineReported():
                self._note_report(coordinator, event)
            case fe.TrainerConnected():
                self._note_trainer(event, effects)
            case fe.TrainerReported():
                self._note_lending(event)
            case fe.CarryEnded(update_id, engine_id, e.EngineDraining()) if update_id in self.drained:
                self.drained[update_id].add(engine_id)
            case fe.Tick():
                for engine_id in core.engines:
                    self._check_record(coordinator, engine_id)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, fx.Save):
                self.check_record_to_write(coordinator, effect.record)

    # ---- engines ----

    def coordinator_paused(self, seconds: float) -> None:
        """It stood still itself: what engines said meanwhile is still unread, so their silence does not count."""
        self.delivered = {i: replace(d, at=d.at + seconds) for i, d in self.delivered.items()}

    def _note_hello(self, coordinator: Watched, event: fe.EngineConnected) -> None:
        engine_id, record = event.place.engine_id, coordinator.core.engines.get(event.place.engine_id)
        if record is None or record.session != event.session:  # it obeys a later coordinator, and was sent away
            return
        self.engine_of[event.session] = engine_id
        now = self._kernel.now
        self.delivered[engine_id] = Delivered(event.session, event.place, event.state, event.gate_open, now)
        self._note_drain(event.state)
        self._check_record(coordinator, engine_id)

    def _note_report(self, coordinator: Watched, event: fe.EngineReported) -> None:
        engine_id = event.state.engine_id
        last = self.delivered.get(engine_id)
        record = coordinator.core.engines.get(engine_id)
        if last is None or record is None or record.session != event.session:
            return
        self.check(last.state.incarnation == event.state.incarnation, "INV-8", "an old life's word was taken")
        self.delivered[engine_id] = replace(last, state=event.state, gate_open=event.gate_open, at=self._kernel.now)
        self._note_drain(event.state)
        self._check_record(coordinator, engine_id)

    def _note_drain(self, state: EngineState) -> None:
        progress = state.progress
        inside = progress.update_id if progress is not None and progress.stage in IN_THE_WEIGHTS else None
        if state.held_by(HoldKind.DRAINING) is not None:
            for update_id in self.drained.keys() - {inside}:
                self.drained[update_id].add(state.engine_id)

    def _check_record(self, coordinator: Watched, engine_id: EngineId) -> None:
        """INV-8: what is known is what that incarnation said, and silence is UNKNOWN."""
        record, last = coordinator.core.engines[engine_id], self.delivered[engine_id]
        self.check(record.state == last.state, "INV-8", f"{engine_id} never said {record.state}")
        if record.session is not None:
            self.check(record.session == last.session, "INV-8", f"{engine_id}'s session is another's")
            silent = self._kernel.now - last.at
            self.check(silent <= self._ttl + 1e-6, "INV-8", f"{engine_id} was silent for {silent} s and is not UNKNOWN")
        self._check_route(coordinator, engine_id)

    def told_ways(self, plan: Plan, avoid: Sequence[fe.Avoided]) -> None:
        """A plan is told: each engine is in it once, and no way that the request said does not work."""
        broken = {(a.engine_id, a.incarnation, a.transport) for a in avoid}
        ways = [(a.engine.engine_id, a.engine.incarnation, a.transport) for a in plan.assignments]
        self.check(len({engine_id for engine_id, _, _ in ways}) == len(ways), "plans", "an engine is in a plan twice")
        self.check(not broken.intersection(ways), "plans", f"{broken.intersection(ways)} failed before")
        for a in plan.assignments:
            self.coverage.ways[a.transport] += 1

    def gives_route(self, coordinator: Watched, engine_id: EngineId) -> None:
        """To a client: by what is on the disk."""
        self._check_route(coordinator, engine_id)

    def _may_serve(self, coordinator: Watched, engine_id: EngineId) -> tuple[WeightVersion, ...]:
        """By what is on the disk: what the fleet serves, or what that engine stays at."""
        kept, last = coordinator.ledger.kept, self.delivered[engine_id]
        stays = None if last.place.unit else kept.stays.get(engine_id)
        return kept.served.get(last.state.model, ()) if stays is None else (stays.version,)

    def _check_route(self, coordinator: Watched, engine_id: EngineId) -> None:
        """INV-10: the engine, and its whole unit, serve one version."""
        core, served = coordinator.core, self._may_serve(coordinator, engine_id)
        if not core.routable(core.engines[engine_id]):
            return
        last = self.delivered[engine_id]
        version = last.state.applied
        self.check(version in served, "INV-10", f"{engine_id} is routable, holds {version}, served is {served}")
        assert version is not None
        missing = self._apart(coordinator, last.place, version, open_too=True)
        self.check(not missing, "INV-10" if not last.place.unit else "units", f"{engine_id} is routable: {missing}")

    def _apart(self, coordinator: Watched, place: EnginePlace, version: WeightVersion, *, open_too: bool) -> str:
        """Who of an engine's unit does not hold that version with its gate open, by their last words; empty: nobody."""
        core = coordinator.core
        if place.unit:
            model = self.delivered[place.engine_id].state.model
            there = [(i, d) for i, d in self.delivered.items() if i in core.engines and d.state.model == model]
            unit = [i for i, d in there if d.place.unit == place.unit]
            if len(unit) < place.unit_size:
                return f"{place.unit} has only {unit}"
        else:
            unit = [place.engine_id]
        for engine_id in unit:
            last = self.delivered[engine_id]
            heard = core.engines[engine_id].session in coordinator.sessions
            if not heard or last.state.applied != version or (open_too and not last.gate_open):
                return f"{engine_id} holds {last.state.applied}, gate {last.gate_open}, heard {heard}"
        return ""

    # ---- trainers ----

    def _note_trainer(self, event: fe.TrainerConnected, effects: list[fx.Effect]) -> None:
        if any(isinstance(x, fx.Welcome) for x in effects):
            before = self.lent.get(event.model)
            same = before is not None and before.incarnation == event.incarnation
            holds = same and before is not None and before.holds
            self.model_of[event.session] = event.model
            self.lent[event.model] = Lent(event.session, event.incarnation, event.ranks, holds, self._kernel.now)

    def _note_lending(self, event: fe.TrainerReported) -> None:
        model = self.model_of.get(event.session)
        lent = self.lent.get(model) if model is not None else None
        if lent is not None and lent.session == event.session:
            lent.holds, lent.at = event.holds_devices, self._kernel.now

    def carries(self, coordinator: Watched, carry: fx.Carry) -> None:
        """It begins now. INV-7: a catch-up brings what is served; devices that are lent are nobody else's."""
        last, model = self.delivered[carry.engine.engine_id], carry.checkpoint.model
        kept, core = coordinator.ledger.kept, coordinator.core
        self.check(last.state.model == model, "models", f"{carry.engine.engine_id} would be given {model}")
        able = last.state.residency is Residency.AWAKE and last.state.held_by(HoldKind.DRAINING) is None
        self.check(able, "sleep", f"{carry.update_id} goes to {last.state}")
        lent = self.lent.get(model)
        if lent is not None and lent.holds and self._kernel.now < max(lent.at, self.began_at) + self._ttl:
            shared = [r for r in lent.ranks if r.device_uuid in last.place.device_uuids]
            self.check(not shared, "devices", f"{carry.update_id} goes to {last.place}, whose devices are lent")
        if not carry.waits_for_go:
            may = self._may_serve(coordinator, carry.engine.engine_id)
            self.check(carry.version in may, "INV-7", f"{carry} is not served")
            stays = carry.engine.engine_id in kept.stays
            self.check(stays or core.open_update(model) is None, "INV-7", f"{carry.update_id} begins in an update")
            self.check(not core.recovering, "restart", f"{carry.update_id} begins before the fleet is known")

    # ---- decisions ----

    def holders(self, coordinator: Watched, update: UpdateTransaction) -> set[EngineId]:
        """Engines of an update that hold its version, by their last words, and are not known to be gone."""
        return {o.engine_id for o in update.outcomes.values() if self._holds_it(coordinator, o.engine_id, update)}

    def _holds_it(self, coordinator: Watched, engine_id: EngineId, update: UpdateTransaction) -> bool:
        last, record = self.delivered.get(engine_id), coordinator.core.engines.get(engine_id)
        if last is None or record is None or last.state.incarnation != update.outcomes[engine_id].incarnation:
            return False
        alive = record.session is not None or self._kernel.now - last.at <= self._ttl + 1e-6
        return alive and last.state.applied == update.version

    def contradicted(self, coordinator: Watched, update: UpdateTransaction) -> set[EngineId]:
        """Of at least three engines that hold its bytes, those that most of them contradict; all here are alike."""
        there = {i: d.state for i, d in self.delivered.items() if self._heard(coordinator, i)}
        said = {
            i: (s.weights, s.canary.prompt_logprobs)
            for i, s in there.items()
            if s.model == update.model and s.applied == update.version and s.canary is not None
        }
        if len({weights for weights, _ in said.values()}) != 1 or len(said) < AT_LEAST:
            return set()
        most, count = Counter(said.values()).most_common(1)[0]
        return {i for i, word in said.items() if word != most} if 2 * count > len(said) else set()

    def _heard(self, coordinator: Watched, engine_id: EngineId) -> bool:
        record = coordinator.core.engines.get(engine_id)
        return record is not None and record.session is not None

    # ---- what the coordinator tells (INV-9: it is on the disk before) ----

    def told_state(self, coordinator: Watched, session: int, news: FleetNews) -> None:
        kept = coordinator.ledger.kept
        engine_id = self.engine_of.get(session)
        own = self.delivered.get(engine_id) if engine_id is not None else None
        for model in news.models:
            on_disk = kept.served.get(model.name, ())
            told, whole = set(model.served), set(on_disk)
            if own is not None and own.session == session and own.place.unit and own.state.model == model.name:
                self.check(told <= whole, "INV-9", f"{told} is told, {on_disk} is on disk")
                for version in told:
                    missing = self._apart(coordinator, own.place, version, open_too=False)
                    self.check(not missing, "units", f"{own.place.engine_id} is told to serve {version}: {missing}")
            else:
                if own is not None and own.session == session and own.state.model == model.name:
                    whole = set(self._may_serve(coordinator, own.place.engine_id))
                self.check(told == whole, "INV-9", f"{told} is told, {on_disk} is on disk")
            self.check(model.term == kept.terms.get(model.name, 0), "INV-9", f"term {model.term} is told, not written")

    def told_term(self, coordinator: Watched, session: int, term: Term) -> None:
        model = self.model_of[session]
        self.check(coordinator.ledger.kept.terms.get(model) == term, "INV-9", f"term {term} is told and not on disk")

    def told_plan(self, coordinator: Watched, request_id: str, update: UpdateTransaction) -> None:
        kept = coordinator.ledger.kept
        self.check(update.update_id in kept.began, "INV-9", f"{update.update_id} is told and not on disk")
        given = self.answers.get(request_id)
        self.check(given == update.version, "requests", f"{request_id} was given {given}, told is {update.version}")

    def told_phase(self, coordinator: Watched, update_id: str, phase: Phase) -> None:
        kept = coordinator.ledger.kept
        if phase is Phase.GO:
            self.check(update_id in kept.went_go, "INV-9", f"go of {update_id} is told and not on disk")
        elif phase.final:
            decided = kept.decided.get(update_id)  # type: ignore[call-overload]
            good = decided is not None and decided.phase is phase
            self.check(good, "INV-9", f"{phase.value} of {update_id} is told and not on disk")
