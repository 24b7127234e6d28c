"""What the simulator's findings begin from: a hello, an engine asleep, lent devices, five equal engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controlplane.core import engine_events as ee
from controlplane.core import fleet_events as fe
from controlplane.core.canary import Canary
from controlplane.core.engine_state import EngineState, Stage
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import DeviceUuid, Rank, Term
from tests.support.engine_core import Agent, version
from tests.support.fleet_core import POLICY, RUN, Fleet


def hello(state: EngineState) -> fe.EngineConnected:
    place = EnginePlace(state.engine_id, state.incarnation, f"{state.engine_id}:1", "host", (DeviceUuid("d"),))
    return fe.EngineConnected(999, place, state, False, (), Term(1), Term(1))


def asleep() -> Agent:
    """An engine that serves version 1 and was put to sleep by ann."""
    agent = Agent()
    agent.core.capabilities = frozenset({"sleep"})
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.handle(ee.SleepRequested("ann", 1))
    return agent


RANKS = (RankPlace(Rank(0), "host", DeviceUuid("dev-e0")),)
"""A trainer on e0's device."""


def lent() -> tuple[Fleet, UpdateTransaction, int]:
    """A version with a checkpoint, and a trainer that holds e0's devices; e0 starts anew on them."""
    f = Fleet()
    engines = {name: f.engine(name) for name in ("e0", "e1")}
    trainer = f.trainer(ranks=RANKS)
    update = f.push("u1", engines)
    f.handle(fe.CheckpointPublished(RUN, Term(1), kept(update)))
    f.handle(fe.TrainerReported(trainer, Term(1), 1, "train", 1, holds_devices=True))
    f.effects.clear()
    f.engine("e0", incarnation="i2")
    return f, update, trainer


def kept(update: UpdateTransaction) -> CheckpointKept:
    return CheckpointKept(POLICY, update.version, "policy-1", b"l" * 32, b"d", 2, 1, 28)


def five(*wrong: str) -> tuple[Fleet, UpdateTransaction, Callable[[str], object]]:
    """Equal engines in an update that went go, and how one applies it; the wrong ones say something else."""
    f = Fleet()
    sessions = {}
    for name in (f"e{i}" for i in range(5)):
        f.engine(name)
        f.sessions += 1
        sessions[name] = f.sessions
        event = replace(hello(f.states[name]), session=f.sessions)
        f.handle(replace(event, place=replace(event.place, likeness="alike"), max_term=Term(0)))
    f.trainer()
    update = f.begin("u1")
    f.stage_all(sessions, update, Stage.READY)

    def applies(name: str) -> object:
        canary = Canary((-2.0,) if name in wrong else (-1.0,))
        f.states[name] = replace(f.states[name], canary=canary)
        return f.stage(sessions[name], name, update, Stage.APPLIED)

    return f, update, applies
