"""Hosts and devices have one name in every process, and the machine id never leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.core.errors import InvalidRequest
from controlplane.devices import cpu_device_uuid, host_id
from trainer_agent.rank.devices import current_device


def test_another_process_of_this_host_gives_the_same_names() -> None:
    code = "from controlplane.devices import *; print(host_id(), cpu_device_uuid(1))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [host_id(), cpu_device_uuid(1)]


def test_the_host_id_does_not_reveal_the_machine_id() -> None:
    machine_id = Path("/etc/machine-id")
    if machine_id.exists():
        assert machine_id.read_text().strip() not in host_id()
    assert len(host_id()) == 32


def test_devices_differ_by_index_and_by_host() -> None:
    assert len({cpu_device_uuid(0), cpu_device_uuid(1), cpu_device_uuid(0, "other")}) == 3
    assert cpu_device_uuid(0).startswith("CPU-")


def test_a_negative_index_is_no_device() -> None:
    with pytest.raises(ValueError, match="not negative"):
        cpu_device_uuid(-1)


def test_a_rank_is_on_the_device_of_its_local_rank_unless_told_otherwise() -> None:
    assert current_device({"LOCAL_RANK": "1"}) == cpu_device_uuid(1)
    assert current_device({"LOCAL_RANK": "1", "WEIGHTPLANE_CPU_DEVICE": "3"}) == cpu_device_uuid(3)
    assert current_device({}) == cpu_device_uuid(0)


def test_an_index_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="WEIGHTPLANE_CPU_DEVICE"):
        current_device({"WEIGHTPLANE_CPU_DEVICE": "first"})
