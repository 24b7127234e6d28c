"""What identifies hosts and devices: the same answer in every process of a host, so that slots can be matched.

Promises: equal host ids share `/dev/shm`; a device has one UUID in every process, whatever the process numbers it
by. Refuses to reveal the machine id: only a hash of it leaves this module.
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from functools import cache
from pathlib import Path

from controlplane.core.versions import DeviceUuid

SHARED_MEMORY = Path("/dev/shm")
_MACHINE_ID = Path("/etc/machine-id")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_NAMESPACE = uuid.UUID("4f0a5c1e-6f0f-5a53-9d0e-6b6f6a2f7c11")


@cache
def host_id() -> str:
    """32 hex digits; the same for all processes of a host that see the same `/dev/shm`, for as long as it is up.

    The kernel's boot id and the mount's device number say it. Machine ids and host names do not: cloned images share
    one, and containers that share a `/dev/shm` have different ones. They stand in where the kernel tells no boot id.
    """
    kernel = _read(_BOOT_ID) or _read(_MACHINE_ID) or socket.gethostname()
    parts = (kernel, _mount(SHARED_MEMORY))
    return hashlib.sha256("\0".join(("weightplane-host-v1", *parts)).encode()).hexdigest()[:32]


def cpu_device_uuid(index: int, host: str | None = None) -> DeviceUuid:
    """The UUID of "device" number `index` of a host without GPUs: `CPU-` and a uuid5 of host and index.

    Trainer ranks and engine workers that are given the same index are colocated by it.

    Raises:
        ValueError: index is negative.
    """
    if index < 0:
        raise ValueError(f"a CPU device's index is not negative: {index}")
    return DeviceUuid(f"CPU-{uuid.uuid5(_CPU_NAMESPACE, f'{host or host_id()}/{index}')}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mount(path: Path) -> str:
    try:
        return str(os.stat(path).st_dev)
    except OSError:
        return ""
