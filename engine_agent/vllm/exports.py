"""The agent's half of opening device memory: every worker is told what to open, and every worker answers."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.core.errors import IpcNotPossible
from controlplane.core.names import device_uuid
from controlplane.device_memory.ranges import ExportedProbe
from engine_agent.vllm.calls import Core


async def open_exports(
    core: Core, device_uuids: Sequence[str], probes: Sequence[ExportedProbe], limit_seconds: float
) -> None:
    """Worker i opens the export of device i; with no probes all close what they have.

    Raises IpcNotPossible: of what every worker says, the first that could not; the others have closed theirs then.
    EngineDied, DeadlineExceeded.
    """
    by_device = {device_uuid(p.range.device_uuid): p for p in probes}
    missing = [uuid for uuid in device_uuids if probes and device_uuid(uuid) not in by_device]
    if missing:
        raise IpcNotPossible(engine_id=core.engine_id, device_uuid=missing[0], cause="no rank exported any for it")
    told = [by_device[device_uuid(uuid)].told() for uuid in device_uuids] if probes else []
    await core.tell("weightplane_open_exports", limit_seconds, exports=told, engine_id=core.engine_id)
    answers = await core.collect("weightplane_exports", limit_seconds)
    failed = next((a for a in answers if a["cause"]), None)
    if failed is not None:
        await core.tell("weightplane_open_exports", limit_seconds, exports=[], engine_id=core.engine_id)
        rank = int(failed["rank"])
        cause = f"worker {rank}: {failed['cause']}"
        raise IpcNotPossible(engine_id=core.engine_id, device_uuid=device_uuids[rank], cause=cause)
