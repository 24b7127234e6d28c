"""The far end of a link's probe, in a process of its own: what an engine's host would do with the bytes.

One question comes as a line of JSON, one answer goes as a line of JSON: `problem`, empty if the bytes came as they were
sent. It uses the engine agent's own receivers, so that what works here works there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from controlplane.core.errors import WeightplaneError
from controlplane.rpc.logs import configure_logging

Asked = dict[str, Any]


def shared_memory(asked: Asked) -> None:
    """A segment is opened, and its bytes compared. Raises SegmentUnreadable, ChecksumMismatch."""
    from controlplane.core.assembly import Record
    from controlplane.core.layout import DType, Layout, TensorSpec
    from controlplane.devices import host_id
    from engine_agent.receivers.port import Buffer
    from engine_agent.receivers.shared_memory import SharedMemoryReceiver

    size, checksum = int(asked["byte_count"]), bytes.fromhex(asked["checksum"])
    receiver = SharedMemoryReceiver(Layout((TensorSpec("probe", DType.U8, (size,)),)), host_id(), ())
    try:
        buffer = Buffer("", str(asked["segment"]), str(asked["host_id"]), 0, size)
        receiver.place([Record(0, 0, 0, size, checksum)], [buffer])
        receiver.check(0, checksum)
    finally:
        receiver.close()


def broadcast(asked: Asked) -> None:
    """A link is joined, and its probe compared. Raises LinkFailed."""
    from engine_agent.receivers.links import LinkPlace, ReceiverLink

    link = ReceiverLink(LinkPlace(str(asked["link_id"]), str(asked["rendezvous"]), 2, 1, 0), "doctor")
    try:
        link.join()
    finally:
        link.close()


def cuda_ipc(asked: Asked) -> None:
    """Device memory is opened, and its probe compared. Raises IpcNotPossible."""
    from controlplane.device_memory.cuda import CudaMemory
    from controlplane.device_memory.ranges import ExportedProbe
    from engine_agent.vllm.cuda_ipc import OpenedExports

    opened = OpenedExports(CudaMemory(), "doctor")
    try:
        opened.open(ExportedProbe.heard(asked["probe"]))
    finally:
        opened.close()


PROBES: dict[str, Callable[[Asked], None]] = {
    "shared_memory": shared_memory,
    "broadcast": broadcast,
    "cuda_ipc": cuda_ipc,
}


def main() -> None:
    configure_logging("doctor", level="ERROR")
    asked = json.loads(sys.stdin.readline())
    problem = ""
    try:
        PROBES[asked["transport"]](asked)
    except (WeightplaneError, ImportError) as error:
        problem = str(error)
    print(json.dumps({"problem": problem}), flush=True)


if __name__ == "__main__":
    main()
