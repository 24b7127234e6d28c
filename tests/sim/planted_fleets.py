"""Cores of coordinators that each break one rule."""

from __future__ import annotations

from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_records import EngineKept, EngineRecord, UpdateDecided, UpdateWentGo
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, Term, WeightVersion


class TrustsSilence(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        return [] if isinstance(event, fe.Tick) else super().handle(event, now)


class RoutesWhatIsShut(FleetCore):
    def routable(self, record: EngineRecord) -> bool:
        return record.state.applied in self.model(record.state.model).served


class SavesNoDecision(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fx.Save) and isinstance(x.record, UpdateDecided))]


class SavesNoGo(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fx.Save) and isinstance(x.record, UpdateWentGo))]


class GivesNumbersTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.UpdateRequested):
            self.next_number = 1
        return super().handle(event, now)


class GivesTermsTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.TrainerConnected):
            self.model(event.model).term = Term(0)
        return super().handle(event, now)


class NeverDecides(FleetCore):
    def open_update(self, model: ModelName) -> UpdateTransaction | None:
        return None


class CarriesOntoLentDevices(FleetCore):
    def lent(self, record: EngineRecord) -> bool:
        return False


class ServesUnitsApart(FleetCore):
    def served_for(self, record: EngineRecord) -> tuple[WeightVersion, ...]:
        return self.model(record.state.model).served


class RoutesUnitsApart(FleetCore):
    def routable(self, record: EngineRecord) -> bool:
        return self._open(record) and record.state.applied in self.model(record.state.model).served


class RollsBackUnderAnOldNumber(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.RollbackRequested) and event.number in self.model(event.model).checkpoints:
            self.next_number = event.number
        return super().handle(event, now)


class AnswersARequestTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.UpdateRequested):
            self.requests.clear()
        return super().handle(event, now)


class PlansForWhoStays(FleetCore):
    def kept_at(self, record: EngineRecord) -> EngineKept | None:
        return None


class TellsWhoStaysWhatTheFleetServes(FleetCore):
    def served_to(self, session: int, model: ModelName) -> tuple[WeightVersion, ...]:
        record = self.of_session(session)
        stays = record is not None and self.kept_at(record) is not None
        return self.model(model).served if stays else super().served_to(session, model)


class RetiresWhatIsStayedAt(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if not isinstance(event, fe.CheckpointRetired):
            return super().handle(event, now)
        kept, self.kept = self.kept, {}
        try:
            return super().handle(event, now)
        finally:
            self.kept = kept


class KeepsAnyCheckpoint(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.CheckpointPublished):
            version = event.checkpoint.version
            self.model(event.checkpoint.model).digests[version] = event.checkpoint.content_digest
        return super().handle(event, now)


class NeverCarries(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fx.StartCarry)]


class AcceptsALedgerBelowWhatAgentsSaw(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, fe.LedgerAccepted):
            self.seen.number = 0
        return super().handle(event, now)
