"""A coordinator's core whose engines serve a version with a checkpoint; what is carried and kept by it."""

from __future__ import annotations

from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import EngineId, ModelName, Term, WeightVersion
from tests.support.fleet_core import POLICY, RUN, Fleet


def kept(version: WeightVersion, digest: bytes = b"d") -> CheckpointKept:
    return CheckpointKept(POLICY, version, f"policy-{version.number}", b"l" * 32, digest, 2, 1, 28)


def publish(f: Fleet, update: UpdateTransaction, term: int = 1) -> None:
    f.handle(events.CheckpointPublished(RUN, Term(term), kept(update.version)))


def served(names: tuple[str, ...] = ("e0", "e1")) -> tuple[Fleet, dict[str, int], UpdateTransaction]:
    """Engines that serve a version with a checkpoint."""
    f = Fleet()
    engines = {name: f.engine(name) for name in names}
    f.trainer()
    update = f.push("u1", engines)
    publish(f, update)
    f.effects.clear()
    return f, engines, update


def carries(f: Fleet) -> list[fx.Carry]:
    return [x.carry for x in f.effects if isinstance(x, fx.StartCarry)]


def keep(f: Fleet, number: int, name: str = "eval", model: str = "") -> None:
    f.handle(events.KeepRequested(RUN, EngineId(name), ModelName(model), number))
