"""What the coordinator knows of its fleet, as metrics: made from the view that people see, when they are asked for.

So an engine or a trainer that left has no metric any more, and an engine that is UNKNOWN only those that are true of it
(INV-8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from controlplane.core.update_transaction import UpdateTransaction
from controlplane.rpc.lag_histogram import lag_buckets, lag_family
from controlplane.rpc.metrics import UPDATE_PHASE_SECONDS, UPDATES
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2

_OPEN = (fleet_pb2.UPDATE_PHASE_PREPARING, fleet_pb2.UPDATE_PHASE_GO)
ENGINE = ("engine",)
MODEL = ("model",)
TRAINER = ("trainer",)

FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "coordinator_term": ("The coordinator's term: it grows by one with each start.", ()),
    "coordinator_recovering": ("1 while it waits for reports after a restart: no update begins.", ()),
    "ledger_regressed": ("1 while agents know more than the ledger: a person must act.", ()),
    "model_served_number": ("Highest number that the fleet serves of a model; -1 is none.", MODEL),
    "model_ordinal": ("Fleet commits of a model so far: what lag is counted in.", MODEL),
    "model_update_open_seconds": ("Age of the model's open update; 0 while there is none.", MODEL),
    "engine_known": ("1 while the coordinator hears the engine; else it is UNKNOWN.", ENGINE),
    "engine_routable": ("1 while rollout clients are sent to it.", ENGINE),
    "engine_report_age_seconds": ("How old the engine's last report is.", ENGINE),
    "engine_applied_number": ("Number of the version that an engine holds; -1 is unset.", ENGINE),
    "engine_lag_commits": ("Fleet commits between what an engine holds and the newest.", ENGINE),
    "engine_gate_open": ("1 while tokens may leave the engine.", ENGINE),
    "engine_poisoned": ("1 while the engine's weights are a mixture.", ENGINE),
    "engine_live_requests": ("Requests in the engine.", ENGINE),
    "engine_waiting_requests": ("Requests that wait outside its gate.", ENGINE),
    "trainer_connected": ("1 while the trainer's session lives; none once it said goodbye.", TRAINER),
    "trainer_lease_seconds": ("Time until the trainer's lease ends, unless renewed; below 0 it has.", TRAINER),
    "trainer_step": ("The step that the trainer works on.", TRAINER),
}
"""Name, less its prefix: what it means, its labels."""
LAG_HISTOGRAM = (
    "model_token_lag_commits",
    "How far behind the tokens of all engines of a model were that this coordinator heard of; above 7 is 8 in the sum.",
)

View = operator_pb2.FleetView


def count_decided(update: UpdateTransaction) -> None:
    """Once for each update, when its decision is in the ledger."""
    UPDATES.labels(update.model, update.phase.value).inc()
    began, went, decided = update.times.began, update.times.went_go, update.times.decided
    if began is not None and went is not None:
        UPDATE_PHASE_SECONDS.labels(update.model, "preparing").observe(went - began)
    if went is not None and decided is not None:
        UPDATE_PHASE_SECONDS.labels(update.model, "go").observe(decided - went)


class FleetMetrics(Collector):
    """Of the view that `view` gives. Called from the thread that answers, so it must not wait."""

    def __init__(self, view: Callable[[], View], clock: Callable[[], float] = time.time) -> None:
        self._view = view
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        view, now = self._view(), self._clock()
        made = _Families()
        made.put("coordinator_term", view.coordinator_term)
        made.put("coordinator_recovering", view.recovering)
        made.put("ledger_regressed", bool(view.ledger_regressed))
        for model in view.state.models:
            _model(made, view, model, now)
        for engine in view.engines:
            _engine(made, engine, now)
        for trainer in view.trainers:
            if not trainer.left:
                _trainer(made, trainer, now)
        return [*made.families.values(), _lags(view)]

    def describe(self) -> Iterable[Metric]:
        return [*_Families().families.values(), _lags(View())]


class _Families:
    def __init__(self) -> None:
        self.families = {
            name: GaugeMetricFamily(f"weightplane_{name}", text, labels=labels)
            for name, (text, labels) in FAMILIES.items()
        }

    def put(self, name: str, value: float, *labels: str) -> None:
        self.families[name].add_metric(labels, float(value))


def _model(made: _Families, view: View, model: fleet_pb2.ModelState, now: float) -> None:
    name = model.model
    made.put("model_served_number", max((v.number for v in model.served), default=-1), name)
    made.put("model_ordinal", model.ordinal, name)
    began = [u.begin_time.ToMilliseconds() / 1000 for u in view.updates if u.model == name and u.phase in _OPEN]
    made.put("model_update_open_seconds", max((now - at for at in began if at), default=0.0), name)


def _engine(made: _Families, engine: operator_pb2.EngineView, now: float) -> None:
    status = engine.status
    name = status.engine.engine_id
    made.put("engine_known", engine.known, name)
    made.put("engine_routable", engine.routable, name)
    made.put("engine_report_age_seconds", now - engine.report_time.ToMilliseconds() / 1000, name)
    if not engine.known:
        return
    made.put("engine_applied_number", status.applied.number if status.HasField("applied") else -1, name)
    if engine.HasField("lag"):
        made.put("engine_lag_commits", engine.lag, name)
    made.put("engine_gate_open", status.gate_open, name)
    made.put("engine_poisoned", status.weights == engine_pb2.WEIGHTS_STATE_POISONED, name)
    made.put("engine_live_requests", status.live_requests, name)
    made.put("engine_waiting_requests", status.waiting_requests, name)


def _lags(view: View) -> Metric:
    family = lag_family(f"weightplane_{LAG_HISTOGRAM[0]}", LAG_HISTOGRAM[1])
    for lags in view.token_lags:
        behind = sum(lag * count for lag, count in enumerate(lags.tokens_by_lag))
        family.add_metric([lags.model], lag_buckets(lags.tokens_by_lag), behind)
    return family


def _trainer(made: _Families, trainer: operator_pb2.TrainerView, now: float) -> None:
    name = trainer.trainer_id
    made.put("trainer_connected", trainer.connected, name)
    made.put("trainer_lease_seconds", trainer.lease_expire_time.ToMilliseconds() / 1000 - now, name)
    if trainer.connected and trainer.status.HasField("step"):
        made.put("trainer_step", trainer.status.step, name)
