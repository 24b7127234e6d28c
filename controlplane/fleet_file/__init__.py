"""The fleet file: one description of a fleet's processes, read by whatever starts them.

`weightplane up` starts all of it, on this machine or on a Ray cluster; a unit or a container starts one process of it,
`weightplane engine --fleet FILE --id ID` or `weightplane trainer --fleet FILE --id ID`. `placed` says which of them one
node must have. Promises that what is refused is refused before anything starts, with the key and both values. Knows
nothing of processes.
"""

from controlplane.fleet_file.engines import EngineEntry, TrainerEntry, coordinator_settings, engines_of, trainers_of
from controlplane.fleet_file.placement import Bundle, Together, placed
from controlplane.fleet_file.reading import read_fleet_file
from controlplane.fleet_file.settings import COORDINATOR, Device, FleetFile, GroupSettings, Role
from controlplane.fleet_file.trainers import TrainerTable

__all__ = [
    "COORDINATOR",
    "Bundle",
    "Device",
    "EngineEntry",
    "FleetFile",
    "GroupSettings",
    "Role",
    "Together",
    "TrainerEntry",
    "TrainerTable",
    "coordinator_settings",
    "engines_of",
    "placed",
    "read_fleet_file",
    "trainers_of",
]
