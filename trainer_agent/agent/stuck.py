"""When a push's time is over: who was waited for, how far they were, and what they are doing just then.

Promises: one rule for who it is: an engine that has bytes to read, else the rank that has not exported them, else an
engine that has not installed. Looking takes less time than ranks wait beyond their own limit, and fails nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc
import structlog

from controlplane import stacks
from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.stubs import Stubs
from weightplane.v1 import engine_pb2, fleet_pb2, lifecycle_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

LOOK_SECONDS = 8.0
"""For all processes together; what is not answered by then is said to be so."""
SAID_SECONDS = 1.0
"""More, for the call that was not answered to say it."""
MAX_TEXT_LENGTH = 256 * 1024
"""Of all stacks together, on their way to a rank."""
REPORT_SECONDS = 5.0
REPORTED, REPORTED_LENGTH, NAME_LENGTH, PROBLEM_LENGTH = 32, 16 * 1024, 256, 1024
"""What the coordinator takes: see ReportStacksRequest."""
_ENDED = frozenset({engine_pb2.UPDATE_STAGE_APPLIED, engine_pb2.UPDATE_STAGE_FAILED, engine_pb2.UPDATE_STAGE_ABORTED})


@dataclass(frozen=True, slots=True)
class Stream:
    """How far one engine's stream was."""

    assignment: fleet_pb2.Assignment
    announced_bytes: int
    whole: bool
    """Its leader announced everything."""
    sent_bytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Waited:
    """Who was waited for: names for people, and whose stacks tell more."""

    names: tuple[str, ...]
    ranks: frozenset[int] = frozenset()
    engines: tuple[fleet_pb2.Assignment, ...] = ()

    def late(self, phase: str, seconds: float) -> DeadlineExceeded:
        names = ", ".join(self.names) or "the coordinator's decision"
        return DeadlineExceeded(phase=phase, waited_for=names, waited_seconds=round(seconds, 1))


def before_go(streams: Iterable[Stream], byte_count: int) -> Waited:
    """Whom a push waits for whose bytes are not all in."""
    names: dict[str, None] = {}
    ranks: set[int] = set()
    engines: list[fleet_pb2.Assignment] = []
    for stream in streams:
        leader = stream.assignment.leader
        if stream.ready:
            continue
        if not stream.whole and stream.sent_bytes >= stream.announced_bytes:
            names[f"rank {leader} (exported {stream.announced_bytes} of {byte_count} bytes)"] = None
            ranks |= set(stream.assignment.ranks)
        else:
            engine = stream.assignment.engine.engine_id
            names[f"{engine} ({stream.sent_bytes} of {byte_count} bytes sent)"] = None
            engines.append(stream.assignment)
    return Waited(tuple(names), frozenset(ranks), tuple(engines))


def after_go(state: fleet_pb2.UpdateState, assignments: Iterable[fleet_pb2.Assignment]) -> Waited:
    """Whom it waits for once commit frames went."""
    stages = {e.engine.engine_id: e.stage for e in state.engines if e.stage not in _ENDED and not e.lost}
    engines = tuple(a for a in assignments if a.engine.engine_id in stages)
    streaming = {a.engine.engine_id for a in engines if a.apply == weight_update_pb2.APPLY_STREAMING}
    names = [
        f"{e} ({engine_pb2.UpdateStage.Name(stage).removeprefix('UPDATE_STAGE_').lower()}, "
        f"{'as bytes come' if e in streaming else 'all bytes sent'})"
        for e, stage in stages.items()
    ]
    return Waited(tuple(names), engines=engines)


def before_begin(ranks: RankSet, begun: Mapping[int, object]) -> Waited:
    """Whom ranks wait for that are in `push` already."""
    absent = sorted(ranks.members.keys() - begun.keys())
    return Waited(tuple(f"rank {r} ({ranks.doing(r)})" for r in absent), frozenset(absent))


async def look(waited: Waited, ranks: RankSet, stubs: Stubs, run_id: str) -> list[stacks.Stacks]:
    """The stacks of those processes."""
    pids = {f"rank {r}": ranks.members[r].pid for r in sorted(waited.ranks) if r in ranks.members}
    looks = [asyncio.create_task(stacks.dump(pids))]
    looks += [asyncio.create_task(_of_engine(stubs, run_id, a)) for a in waited.engines[: stacks.MAX_PROCESSES]]
    done, late = await asyncio.wait(looks, timeout=LOOK_SECONDS + SAID_SECONDS)
    for task in late:
        task.cancel()
    found = [s for task in looks if task in done for s in task.result()]
    for each in found:
        log.warning("stacks", of=each.name, pid=each.pid, problem=each.problem, text=each.text)
    return found


def as_text(found: Iterable[stacks.Stacks]) -> str:
    """For the ranks' error."""
    return "\n".join(map(str, found))[:MAX_TEXT_LENGTH]


async def report(found: Iterable[stacks.Stacks], state: fleet_pb2.UpdateState, stubs: Stubs, run_id: str) -> None:
    """Have the coordinator keep them, for `weightplane why`. What does not get there is in the log."""
    request = fleet_pb2.ReportStacksRequest(run_id=run_id, update_id=state.update_id, term=state.version.term)
    for each in list(found)[:REPORTED]:
        request.processes.add(
            name=each.name[:NAME_LENGTH] or "unnamed",
            pid=each.pid,
            text=each.text[:REPORTED_LENGTH],
            problem=each.problem[:PROBLEM_LENGTH],
        )
    try:
        await stubs.fleet.ReportStacks(request, timeout=REPORT_SECONDS)
    except (grpc.aio.AioRpcError, WeightplaneError) as error:
        log.info("stacks_not_reported", update_id=state.update_id, cause=str(error))


async def _of_engine(stubs: Stubs, run_id: str, assignment: fleet_pb2.Assignment) -> list[stacks.Stacks]:
    request = lifecycle_pb2.DumpStacksRequest(run_id=run_id)
    try:
        answer = await stubs.lifecycle(assignment.endpoint).DumpStacks(request, timeout=LOOK_SECONDS)
    except grpc.aio.AioRpcError as error:
        return [stacks.Stacks(assignment.engine.engine_id, 0, problem=str(from_rpc_error(error)))]
    return [stacks.Stacks(p.name, p.pid, p.text, p.problem) for p in answer.processes]
