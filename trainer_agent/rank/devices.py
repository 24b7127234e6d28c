"""Which device a training rank computes on, by UUID: what the planner matches slots with."""

from __future__ import annotations

import os
from collections.abc import Mapping

from controlplane.core.errors import InvalidRequest
from controlplane.core.names import device_uuid
from controlplane.core.versions import DeviceUuid
from controlplane.devices import cpu_device_uuid

CPU_DEVICE_VARIABLE = "WEIGHTPLANE_CPU_DEVICE"
"""Index of the CPU "device" of this process, where LOCAL_RANK is not it."""


def current_device(environment: Mapping[str, str] = os.environ) -> DeviceUuid:
    """UUID of the GPU that this process has made current; on hosts without GPUs, of its CPU index.

    Raises:
        InvalidRequest: the index in the environment is no number that is 0 or more.
    """
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return device_uuid(str(properties.uuid))
    name = CPU_DEVICE_VARIABLE if CPU_DEVICE_VARIABLE in environment else "LOCAL_RANK"
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise InvalidRequest(field=name, problem=f"{text!r} is no device index")
    return cpu_device_uuid(int(text))
