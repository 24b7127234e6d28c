"""What the coordinator shows: the core's records as messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.core.canary import Verification
from controlplane.core.conditions import Condition
from controlplane.core.engine_state import Refusal
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_book import Doubt
from controlplane.core.fleet_doubts import verification
from controlplane.core.fleet_preview import Preview
from controlplane.core.fleet_records import CheckpointKept, EngineKept, EngineRecord, Judged, TrainerRecord
from controlplane.core.kept_stacks import Kept
from controlplane.core.names import natural_key
from controlplane.core.plan import EnginePlace
from controlplane.core.plan_costs import SenderCost, engine_costs, sender_costs
from controlplane.core.update_outcomes import Outcome, Times
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, ModelName, UpdateId, WeightVersion
from controlplane.rpc.codec import commit_to_proto, engine_ref, version_to_proto
from controlplane.rpc.engine_codec import (
    STAGES,
    conditions_to_proto,
    refusal_to_proto,
    state_to_proto,
    timestamp,
    timings_to_proto,
)
from controlplane.rpc.plan_codec import TRANSPORTS, load_to_proto, plan_to_proto
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2

T = TypeVar("T")
MAX_OUTCOMES_SHOWN = 4096
"""Of all updates in a view together: a fleet of a thousand engines must fit into one message."""
COMMITS_TOLD = 8
"""To agents, in each state; they remember those before."""
VERIFICATIONS = {v: engine_pb2.Verification.Value(f"VERIFICATION_{v.name}") for v in Verification}
PHASES = {p: fleet_pb2.UpdatePhase.Value(f"UPDATE_PHASE_{p.name}") for p in Phase}


def fleet_state(core: FleetCore, session: int = 0) -> fleet_pb2.FleetState:
    """As a session is told it: the members of a unit have one gate, and may serve less. 0: as it is."""
    models = [
        fleet_pb2.ModelState(
            model=name,
            term=m.term,
            served=[version_to_proto(v) for v in core.served_to(session, name)],
            ordinal=m.ordinal,
            frozen=m.frozen,
            doubted=[
                _doubted(n, d)
                for n, d in sorted(core.doubts.items())
                if n in core.engines and core.engines[n].state.model == name
            ],
            kept=[
                fleet_pb2.KeptEngine(engine_id=k.engine_id, version=version_to_proto(k.version))
                for k in _by_name(core.kept)
                if k.model == name
            ],
            commits=[commit_to_proto(c) for c in m.commits.latest[-COMMITS_TOLD:]],
            device_holder=core.device_holder(name),
        )
        for name, m in sorted(core.models.items())
    ]
    return fleet_pb2.FleetState(revision=core.revision, models=models)


def _doubted(name: EngineId, doubt: Doubt) -> fleet_pb2.DoubtedEngine:
    return fleet_pb2.DoubtedEngine(
        engine=engine_ref(name, doubt.incarnation), version=version_to_proto(doubt.version), cause=doubt.cause[:1024]
    )


def routes(core: FleetCore, model: ModelName, revision: int, *, kept: bool) -> fleet_pb2.WatchRoutesResponse:
    """`kept`: also engines that stay at a version of their own, marked as such."""
    all_routable = [r for r in _by_name(core.engines) if r.state.model == model and core.routable(r)]
    found = [r for r in all_routable if kept or core.kept_at(r) is None]
    return fleet_pb2.WatchRoutesResponse(
        run_id=core.settings.run_id,
        revision=revision,
        routes=[_route(r, kept=core.kept_at(r) is not None) for r in found],
        served=[version_to_proto(v) for v in core.model(model).served],
        commits=[commit_to_proto(c) for c in core.model(model).commits.latest],
    )


def update_state(update: UpdateTransaction, shift: float) -> fleet_pb2.UpdateState:
    """`shift` seconds turn the core's monotonic time into the clock's; the same for all views of one coordinator's
    life, so that a state that did not change looks the same."""
    times = update.times
    return fleet_pb2.UpdateState(
        update_id=update.update_id,
        model=update.model,
        version=version_to_proto(update.version),
        step=update.step,
        phase=PHASES[update.phase],
        cause=update.cause,
        engines=[_outcome(o, times, shift) for o in _by_name(update.outcomes)],
        restores=None if update.restores is None else version_to_proto(update.restores),
        content_digest=update.content_digest,
        begin_time=_date(times.began, shift),
        go_time=_date(times.went_go, shift),
        decide_time=_date(times.decided, shift),
        deadline_time=None if update.phase.final else _date(update.deadline, shift),
        byte_count=update.byte_count,
    )


def kept_stacks(kept: Kept, shift: float) -> operator_pb2.GetStacksResponse:
    told = [fleet_pb2.KeptStacks(name=p.name, pid=p.pid, text=p.text, problem=p.problem) for p in kept.processes]
    return operator_pb2.GetStacksResponse(processes=told, report_time=_date(kept.at, shift) if told else None)


def _date(at: float | None, shift: float) -> Timestamp | None:
    return None if at is None else timestamp(at + shift)


@dataclass(frozen=True, slots=True)
class _EngineShown:
    """What a view says of an engine, but for the time of its report."""

    place: EnginePlace
    judged: Judged
    conditions: tuple[Condition, ...]
    refused: Refusal | None
    capabilities: tuple[str, ...]
    desired: WeightVersion | None
    catch_up: str
    verification: Verification
    kept: EngineKept | None
    lag: int | None


class Messages:
    """Messages that a view has in common with those before it: it is made often, and little changes in between."""

    def __init__(self) -> None:
        self._updates: dict[UpdateId, fleet_pb2.UpdateState] = {}
        """Decided ones."""
        self._plans: dict[UpdateId, fleet_pb2.Plan] = {}
        self._engines: dict[EngineId, tuple[_EngineShown, operator_pb2.EngineView]] = {}

    def engine(self, shown: _EngineShown, reported_at: float, shift: float) -> operator_pb2.EngineView:
        """To be copied: the next view has the same message."""
        before = self._engines.get(shown.place.engine_id)
        made = before[1] if before is not None and before[0] == shown else _engine_view(shown, shift)
        made.report_time.FromNanoseconds(int((reported_at + shift) * 1e9))
        self._engines[shown.place.engine_id] = shown, made
        return made

    def update(self, update: UpdateTransaction, shift: float) -> fleet_pb2.UpdateState:
        if not update.phase.final:
            return update_state(update, shift)
        if update.update_id not in self._updates:
            self._updates[update.update_id] = update_state(update, shift)
        return self._updates[update.update_id]

    def plan(self, update: UpdateTransaction) -> fleet_pb2.Plan:
        if update.update_id not in self._plans:
            self._plans[update.update_id] = plan_to_proto(update.plan)
        return self._plans[update.update_id]

    def forget(self, core: FleetCore, planned: Collection[UpdateId]) -> None:
        """Keep what the core knows, and these plans."""
        self._updates = {k: v for k, v in self._updates.items() if k in core.updates}
        self._plans = {k: v for k, v in self._plans.items() if k in planned}
        self._engines = {k: v for k, v in self._engines.items() if k in core.engines}


def fleet_view(core: FleetCore, now: float, shift: float, messages: Messages) -> operator_pb2.FleetView:
    """Everything, less what happened. `now` is the core's monotonic time; `shift` as for `update_state`."""
    plans = _latest_plans(core)
    messages.forget(core, {u.update_id for u in plans})
    core.date_conditions(now)
    regressed = next(iter(core.above.values()), None)
    return operator_pb2.FleetView(
        run_id=core.settings.run_id,
        coordinator_term=core.term,
        recovering=core.recovering,
        state=fleet_state(core),
        engines=[messages.engine(shown, at, shift) for shown, at in _shown_engines(core)],
        trainers=[_trainer_view(t, shift) for _, t in sorted(core.trainers.items())],
        updates=[messages.update(u, shift) for u in _shown(core.updates.values())],
        checkpoints=[checkpoint(c) for _, m in sorted(core.models.items()) for c in _newest_checkpoints(m.checkpoints)],
        ledger_regressed="" if regressed is None else str(regressed),
        time=timestamp(now + shift),
        awaited_engine_ids=sorted(core.awaited, key=natural_key),
        plans=[operator_pb2.ModelPlan(model=u.model, update_id=u.update_id, plan=messages.plan(u)) for u in plans],
    )


def _latest_plans(core: FleetCore) -> list[UpdateTransaction]:
    """Each model's latest update that this coordinator planned, by model."""
    latest: dict[ModelName, UpdateTransaction] = {}
    for update in core.updates.values():
        known = latest.get(update.model)
        if update.plan.assignments and (known is None or known.version.number < update.version.number):
            latest[update.model] = update
    return [latest[name] for name in sorted(latest)]


def preview(found: Preview, run_id: str) -> operator_pb2.PlanResponse:
    """A dry run's answer."""
    trainer, load = found.trainer, found.trainer.load
    hosts = {r.rank: r.host_id for r in trainer.ranks}
    return operator_pb2.PlanResponse(
        run_id=run_id,
        model=found.model,
        trainer_id=trainer.trainer_id,
        term=trainer.term,
        rank_count=len(trainer.ranks),
        load=None if load is None else load_to_proto(load),
        plan=plan_to_proto(found.plan),
        senders=[_sender_cost(c, hosts[c.rank]) for c in sender_costs(found.plan, load)],
        engines=[
            operator_pb2.EngineCost(engine_id=c.engine_id, staging_bytes=c.staging_bytes, loading_bytes=c.loading_bytes)
            for c in engine_costs(found.plan, load)
        ],
        left_out=[operator_pb2.LeftOutEngine(engine_id=name, cause=cause) for name, cause in found.left_out],
        problems=[operator_pb2.PlanProblem(reason=p.reason, message=str(p)) for p in found.problems],
        notes=found.notes,
    )


def _sender_cost(cost: SenderCost, host_id: str) -> operator_pb2.SenderCost:
    return operator_pb2.SenderCost(
        rank=cost.rank,
        host_id=host_id,
        sent=[
            operator_pb2.SentBytes(transport=TRANSPORTS[s.transport], engine_ids=s.engine_ids, byte_count=s.byte_count)
            for s in cost.sent
        ],
        memory_bytes=cost.memory_bytes,
        device_memory_bytes=cost.device_memory_bytes,
    )


def checkpoint(kept: CheckpointKept) -> fleet_pb2.Checkpoint:
    return fleet_pb2.Checkpoint(
        model=kept.model,
        version=version_to_proto(kept.version),
        name=kept.name,
        layout_digest=kept.layout_digest,
        content_digest=kept.content_digest,
        tensor_count=kept.tensor_count,
        file_count=kept.file_count,
        byte_count=kept.byte_count,
    )


def _by_name(found: Mapping[EngineId, T]) -> list[T]:
    """In the order of plans."""
    return [found[name] for name in sorted(found, key=natural_key)]


def _newest_checkpoints(checkpoints: Mapping[int, CheckpointKept]) -> list[CheckpointKept]:
    return [kept for _, kept in sorted(checkpoints.items(), reverse=True)]


def _shown(updates: Iterable[UpdateTransaction]) -> list[UpdateTransaction]:
    """Newest first: the newest, and those before as far as there is room."""
    shown: list[UpdateTransaction] = []
    room = MAX_OUTCOMES_SHOWN
    for update in sorted(updates, key=lambda u: -u.version.number):
        room -= len(update.outcomes)
        if shown and room < 0:
            break
        shown.append(update)
    return shown


def _route(record: EngineRecord, *, kept: bool) -> fleet_pb2.Route:
    route = fleet_pb2.Route(
        engine=engine_ref(record.place.engine_id, record.place.incarnation),
        endpoint=record.place.endpoint,
        live_requests=record.state.live_requests,
        max_requests=record.place.max_requests,
        kept=kept,
    )
    if record.state.applied is not None:
        route.applied.CopyFrom(version_to_proto(record.state.applied))
    return route


def _outcome(outcome: Outcome, times: Times, shift: float) -> fleet_pb2.EngineOutcome:
    timings = times.installs.get(outcome.engine_id)
    return fleet_pb2.EngineOutcome(
        engine=engine_ref(outcome.engine_id, outcome.incarnation),
        required=outcome.required,
        stage=STAGES[outcome.stage] if outcome.stage is not None else engine_pb2.UPDATE_STAGE_UNSPECIFIED,
        lost=outcome.lost,
        error_reason=outcome.error_reason,
        error_message=outcome.error_message,
        awaited=outcome.awaited,
        changed_tensors=outcome.changed_tensors,
        tensor_count=outcome.tensor_count,
        verification=VERIFICATIONS[outcome.verification],
        stage_times=[
            fleet_pb2.StageTime(stage=STAGES[stage], time=timestamp(at + shift))
            for stage, at in times.stages.get(outcome.engine_id, {}).items()
        ],
        timings=None if timings is None else timings_to_proto(timings),
    )


def _shown_engines(core: FleetCore) -> Iterator[tuple[_EngineShown, float]]:
    """In the order of plans, each with the time of its report. Their conditions are dated."""
    under_way = {name: core.open_update(name) for name in core.models}
    for record in _by_name(core.engines):
        assert record.judged is not None, "its conditions are dated"
        carry = core.carries.get(record.place.engine_id)
        shown = _EngineShown(
            place=record.place,
            judged=record.judged,
            conditions=record.conditions,
            refused=record.refused,
            capabilities=record.capabilities,
            desired=core.desired_beside(record, under_way.get(record.state.model)),
            catch_up="" if carry is None else carry.update_id,
            verification=verification(core, record.state),
            kept=core.kept_at(record),
            lag=_lag(core, record),
        )
        yield shown, record.reported_at


def _engine_view(shown: _EngineShown, shift: float) -> operator_pb2.EngineView:
    place, judged = shown.place, shown.judged
    status = state_to_proto(judged.state, frozenset(judged.served))
    if shown.refused is not None:
        status.refused.CopyFrom(refusal_to_proto(shown.refused, shift))
    return operator_pb2.EngineView(
        status=status,
        known=judged.known,
        routable=judged.routable,
        endpoint=place.endpoint,
        device_uuids=place.device_uuids,
        desired=None if shown.desired is None else version_to_proto(shown.desired),
        conditions=conditions_to_proto(shown.conditions, shift),
        group=place.group,
        unit=place.unit,
        catch_up=shown.catch_up,
        verification=VERIFICATIONS[shown.verification],
        kept=None if shown.kept is None else version_to_proto(shown.kept.version),
        capabilities=shown.capabilities,
        lag=shown.lag,
        likeness=place.likeness,
        host_id=place.host_id,
        software=place.software,
    )


def _lag(core: FleetCore, record: EngineRecord) -> int | None:
    """INV-8: of an engine that is not heard nobody knows it."""
    applied = record.state.applied
    return None if record.session is None or applied is None else core.model(record.state.model).commits.lag(applied)


def _trainer_view(trainer: TrainerRecord, shift: float) -> operator_pb2.TrainerView:
    status = fleet_pb2.TrainerStatus(
        term=trainer.term,
        step=trainer.step,
        phase=trainer.phase,
        progress=trainer.progress,
        holds_devices=trainer.holds_devices,
        lost_ranks=[fleet_pb2.LostRank(rank=lost.rank, cause=lost.cause) for lost in trainer.lost],
    )
    return operator_pb2.TrainerView(
        trainer_id=trainer.trainer_id,
        model=trainer.model,
        incarnation=trainer.incarnation,
        term=trainer.term,
        status=status,
        connected=trainer.session is not None,
        lease_expire_time=timestamp(trainer.expires_at + shift),
        rank_count=len(trainer.ranks),
        left=trainer.left,
        software=trainer.software,
    )
