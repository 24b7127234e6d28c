"""What an update was, as spans: made from its account when its decision is in the ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator

from controlplane import tracing
from controlplane.core.errors import WeightplaneError
from controlplane.core.fleet_effects import Carry
from controlplane.core.traces import SEND, UPDATE, SpanEvent, SpanRecord, SpanRef, Value, update_span
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase, UpdateTransaction

NOT_COMMITTED = "UPDATE_FAILED"


def trace_decided(run_id: str, update: UpdateTransaction) -> None:
    """The root of its trace, from begin to decision, and its two phases. After a restart of the coordinator what was
    before it is not known, and left out."""
    times, root = update.times, tracing.decided(update_span(run_id, update.update_id, UPDATE))
    end = tracing.unix_ns(times.decided if times.decided is not None else time.monotonic())
    known = [tracing.unix_ns(at) for at in (times.began, times.went_go) if at is not None]
    failed = update.phase is Phase.FAILED
    tracing.emit(
        SpanRecord(
            "update",
            root,
            None,
            min([*known, end]),
            end,
            _attributes(update),
            tuple(_events(update, end)),
            NOT_COMMITTED if failed else "",
            update.cause,
        )
    )
    if times.began is not None:
        went = end if times.went_go is None else tracing.unix_ns(times.went_go)
        _phase("preparing", root, tracing.unix_ns(times.began), went)
    if times.went_go is not None:
        _phase("go", root, tracing.unix_ns(times.went_go), end)


def trace_carry(run_id: str, carry: Carry, began: float, error: WeightplaneError | None) -> None:
    """What the coordinator brought to one engine from a checkpoint, for an update (a rollback) or as a catch-up, which
    is a trace of its own."""
    of_update = carry.waits_for_go
    run = (run_id, carry.update_id)
    attributes: dict[str, Value] = {
        "weightplane.update_id": carry.update_id,
        "weightplane.version": str(carry.version),
        "weightplane.engine_id": carry.engine.engine_id,
        "weightplane.transport": "checkpoint",
        "weightplane.bytes": carry.checkpoint.byte_count,
    }
    tracing.emit(
        SpanRecord(
            "send" if of_update else "catch up",
            update_span(*run, SEND, carry.engine.engine_id),
            update_span(*run, UPDATE) if of_update else None,
            tracing.unix_ns(began),
            time.time_ns(),
            attributes,
            error="" if error is None else error.reason,
            error_message="" if error is None else str(error),
        )
    )


def _phase(name: str, root: SpanRef, start: int, end: int) -> None:
    tracing.emit(SpanRecord(name, tracing.child(root), root, start, end))


def _attributes(update: UpdateTransaction) -> dict[str, Value]:
    said: dict[str, Value] = {
        "weightplane.update_id": update.update_id,
        "weightplane.model": update.model,
        "weightplane.version": str(update.version),
        "weightplane.term": update.term,
        "weightplane.bytes": update.byte_count,
        "weightplane.phase": update.phase.value,
        "weightplane.engines": len(update.outcomes),
        "weightplane.restarted": update.times.began is None,
    }
    if update.step is not None:
        said["weightplane.step"] = update.step
    if update.restores is not None:
        said["weightplane.restores"] = str(update.restores)
    if update.cause:
        said["weightplane.cause"] = update.cause
    return said


def _events(update: UpdateTransaction, end: int) -> Iterator[SpanEvent]:
    if update.times.went_go is not None:
        yield SpanEvent("go", tracing.unix_ns(update.times.went_go))
    for outcome in update.outcomes.values():
        stages = update.times.stages.get(outcome.engine_id, {})
        at = tracing.unix_ns(max(stages.values())) if stages else end
        yield SpanEvent("engine outcome", at, _outcome(outcome))


def _outcome(outcome: Outcome) -> dict[str, Value]:
    stage = "lost" if outcome.lost else outcome.stage.value if outcome.stage else "silent"
    said: dict[str, Value] = {
        "weightplane.engine_id": outcome.engine_id,
        "weightplane.stage": stage,
        "weightplane.required": outcome.required,
    }
    return said | ({"error.type": outcome.error_reason} if outcome.error_reason else {})
