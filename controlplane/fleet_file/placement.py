"""Which processes of a fleet file must be on one node, and what each takes there. Pure: a cluster is asked elsewhere.

An engine and the ranks on its devices share `/dev/shm` and an IPC namespace (they are its slot), so they are placed
together or not at all. Anybody else is placed alone: the more pieces, the more nodes on which they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.fleet_file.settings import FleetFile
from controlplane.fleet_file.trainers import TrainerTable


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one process takes of a node."""

    process: str
    """The engine's or trainer's id."""
    cpus: int
    gpus: int
    """Of its own. Ranks beside engines have none: they compute on the engines'."""


@dataclass(frozen=True, slots=True)
class Together:
    """Processes that one node has, all of them or none."""

    bundles: tuple[Bundle, ...]

    @property
    def name(self) -> str:
        """Of its last process: the trainer's, where there is one."""
        return self.bundles[-1].process

    @property
    def cpus(self) -> int:
        return sum(b.cpus for b in self.bundles)

    @property
    def gpus(self) -> int:
        return sum(b.gpus for b in self.bundles)


def placed(fleet: FleetFile, *, gpu: bool) -> tuple[Together, ...]:
    """Every engine and trainer in exactly one of them, the largest first: they find room while there is some.

    `gpu`: the cluster has GPUs, and each engine gets as many as its group says.
    """
    engines = {
        f"{group.name}-{number}": Bundle(f"{group.name}-{number}", 1, group.devices_each if gpu else 0)
        for group in fleet.groups
        for number in range(group.count)
    }
    slots = [_slot(table, engines, gpu=gpu) for table in fleet.trainers]
    in_slots = {bundle.process for slot in slots for bundle in slot.bundles}
    alone = [Together((bundle,)) for name, bundle in engines.items() if name not in in_slots]
    return tuple(sorted([*slots, *alone], key=lambda t: (-t.gpus, -t.cpus)))


def _slot(table: TrainerTable, engines: dict[str, Bundle], *, gpu: bool) -> Together:
    beside = tuple(engines[name] for name in table.beside)
    own = table.ranks if gpu and not beside else 0
    return Together((*beside, Bundle(table.name, table.ranks, own)))
