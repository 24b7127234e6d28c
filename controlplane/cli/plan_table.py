"""A dry run's answer as tables, or as JSON that stays so: keys are only ever added.

Pure: takes the answer, gives something that rich can print, or plain values.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from controlplane.cli.tables import add_row, new_table
from controlplane.rpc.enum_words import word_of
from weightplane.v1 import fleet_pb2, operator_pb2, weight_update_pb2

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_DIGEST_SHOWN = 12
_READ_IN_PLACE = "in place"
"""What is staged lies in the sender's memory; the engine's host needs none."""


def render_plan(found: operator_pb2.PlanResponse) -> RenderableType:
    """The whole of `weightplane plan`."""
    parts: list[RenderableType] = [_head(found)]
    if found.plan.assignments:
        parts += [Text(), _engines_table(found), Text(), _senders_table(found)]
    lines = [f"left out: {e.engine_id}: {e.cause}" for e in found.left_out] + [f"note: {n}" for n in found.notes]
    parts += [Text(), *map(Text, lines)] if lines else []
    refused = [Text(f"would be refused: {p.reason}: {p.message}", style="bold red") for p in found.problems]
    return Group(*parts, *([Text(), *refused] if refused else []))


def plan_json(found: operator_pb2.PlanResponse) -> dict[str, Any]:
    """Sizes are bytes, digests hex; null where nothing is known or nothing is meant."""
    costs = {cost.engine_id: cost for cost in found.engines}
    return {
        "run_id": found.run_id,
        "model": found.model,
        "trainer": found.trainer_id,
        "term": found.term,
        "rank_count": found.rank_count,
        "load": _load_json(found),
        "plan_revision": found.plan.revision,
        "plan_digest": found.plan.digest.hex(),
        "engines": [_assignment_json(a, costs[a.engine.engine_id]) for a in found.plan.assignments],
        "senders": [_sender_json(s) for s in found.senders],
        "left_out": [{"engine": e.engine_id, "cause": e.cause} for e in found.left_out],
        "notes": list(found.notes),
        "problems": [{"reason": p.reason, "message": p.message} for p in found.problems],
    }


def size(byte_count: int) -> str:
    """In the largest unit that leaves a digit before the point."""
    for unit, word in _UNITS:
        if byte_count >= unit:
            return f"{byte_count / unit:.1f} {word}"
    return f"{byte_count} B"


def _head(found: operator_pb2.PlanResponse) -> Text:
    who = f"run {found.run_id}, model {found.model}: trainer {found.trainer_id}, term {found.term}"
    lines = [f"{who}, {found.rank_count} ranks"]
    if found.HasField("load"):
        load = found.load
        chunks, module = size(load.chunk_bytes), size(load.largest_module_bytes)
        lines.append(
            f"sends {load.tensor_count} tensors, {size(load.byte_count)}; chunks of {chunks}, largest module {module}"
        )
    if found.plan.assignments:
        lines.append(f"plan revision {found.plan.revision}, digest {found.plan.digest.hex()[:_DIGEST_SHOWN]}")
    return Text("\n".join(lines))


def _engines_table(found: operator_pb2.PlanResponse) -> RenderableType:
    table = new_table("ENGINE", "REQUIRED", "RANKS", "TRANSPORT", "APPLY", "LINK", "FATE", "STAGED", "LOADING", "WHY")
    for assignment, cost in zip(found.plan.assignments, found.engines, strict=True):
        add_row(
            table,
            assignment.engine.engine_id,
            "yes" if assignment.required else "no",
            ",".join(map(str, assignment.ranks)),
            transport_word(assignment.transport),
            _apply(assignment),
            assignment.link,
            _fate(assignment) or "",
            _size_or_unknown(cost, "staging_bytes", zero=_READ_IN_PLACE),
            _size_or_unknown(cost, "loading_bytes"),
            assignment.reason,
        )
    return table


def _senders_table(found: operator_pb2.PlanResponse) -> RenderableType:
    table = new_table("RANK", "TRANSPORT", "SENDS", "ENGINES", "MEMORY", "ON DEVICE", "HOST")
    for sender in found.senders:
        for i, sent in enumerate(sender.sent):
            whose = (_size_or_unknown(sender, "memory_bytes"), _size_or_unknown(sender, "device_memory_bytes"))
            add_row(
                table,
                str(sender.rank) if i == 0 else "",
                transport_word(sent.transport),
                _size_or_unknown(sent, "byte_count"),
                ", ".join(sent.engine_ids),
                *(whose if i == 0 else ("", "")),
                sender.host_id if i == 0 else "",
            )
    return table


def transport_word(transport: weight_update_pb2.Transport.ValueType) -> str:
    return word_of(weight_update_pb2.Transport, transport)


def _apply(assignment: fleet_pb2.Assignment) -> str:
    return word_of(weight_update_pb2.Apply, assignment.apply)


def _fate(assignment: fleet_pb2.Assignment) -> str | None:
    if not assignment.link:
        return None
    return word_of(weight_update_pb2.LinkFate, assignment.fate)


Costs = operator_pb2.EngineCost | operator_pb2.SenderCost | operator_pb2.SentBytes


def _known(cost: Costs, field: str) -> int | None:
    return getattr(cost, field) if cost.HasField(field) else None  # type: ignore[arg-type]


def _size_or_unknown(cost: Costs, field: str, zero: str = "none") -> str:
    byte_count = _known(cost, field)
    return "unknown" if byte_count is None else size(byte_count) if byte_count else zero


def _load_json(found: operator_pb2.PlanResponse) -> dict[str, int] | None:
    if not found.HasField("load"):
        return None
    load = found.load
    return {
        "tensor_count": load.tensor_count,
        "byte_count": load.byte_count,
        "chunk_bytes": load.chunk_bytes,
        "largest_module_bytes": load.largest_module_bytes,
    }


def _assignment_json(assignment: fleet_pb2.Assignment, cost: operator_pb2.EngineCost) -> dict[str, Any]:
    return {
        "engine": assignment.engine.engine_id,
        "incarnation": assignment.engine.incarnation,
        "endpoint": assignment.endpoint,
        "required": assignment.required,
        "leader": assignment.leader,
        "ranks": list(assignment.ranks),
        "device_uuids": list(assignment.device_uuids),
        "transport": transport_word(assignment.transport),
        "apply": _apply(assignment),
        "link": assignment.link or None,
        "fate": _fate(assignment),
        "reason": assignment.reason,
        "staging_bytes": _known(cost, "staging_bytes"),
        "loading_bytes": _known(cost, "loading_bytes"),
    }


def _sender_json(sender: operator_pb2.SenderCost) -> dict[str, Any]:
    return {
        "rank": sender.rank,
        "host_id": sender.host_id,
        "memory_bytes": _known(sender, "memory_bytes"),
        "device_memory_bytes": _known(sender, "device_memory_bytes"),
        "sent": [
            {
                "transport": transport_word(s.transport),
                "engines": list(s.engine_ids),
                "byte_count": _known(s, "byte_count"),
            }
            for s in sender.sent
        ],
    }
