"""The fleet file: one description of a fleet's engines, read by whatever starts them.

`weightplane up` starts all of it on this machine; a unit or a container starts one engine of it with
`weightplane engine --fleet FILE --id ID`. Promises that what is refused is refused before anything starts, with the key
and both values. Knows nothing of processes.
"""

from controlplane.fleet_file.engines import EngineEntry, coordinator_settings, engines_of
from controlplane.fleet_file.reading import read_fleet_file
from controlplane.fleet_file.settings import FleetFile, GroupSettings, Role

__all__ = [
    "EngineEntry",
    "FleetFile",
    "GroupSettings",
    "Role",
    "coordinator_settings",
    "engines_of",
    "read_fleet_file",
]
