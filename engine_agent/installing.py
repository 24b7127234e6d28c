"""One install, from a checked version in shared memory to weights that spoke: stand still, put in, prove.

Promises that nothing is claimed before the last of these is done (INV-1), and that whatever is raised on the way leaves
what the engine holds to its life to say (INV-4): nothing is resumed here. On an engine that sleeps but for its weights'
memory the proof waits for the KV cache, and the gate for the proof.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane import failpoints
from controlplane.core import engine_events as events
from controlplane.core.engine_state import Residency, Timings
from controlplane.core.errors import EngineDied, WeightplaneError
from engine_agent.engine import CanaryReport, InstallReport
from engine_agent.receivers import Receiver

if TYPE_CHECKING:
    from engine_agent.life import EngineLife


@dataclass(frozen=True, slots=True)
class Applied:
    """What an install found out, for the writer."""

    report: InstallReport
    changed_tensors: int | None
    """Tensors whose bytes differ from what this engine held last; None at its first. 0 hints at the wrong model."""
    canary: CanaryReport | None
    """None: put off until its KV cache is resident."""
    timings: Timings
    content_digest: bytes


class Install:
    """One install in one life, under the life's lock. `run` once."""

    def __init__(self, life: EngineLife, receiver: Receiver, update: events.Update) -> None:
        self._life = life
        self._receiver = receiver
        self._update = update

    async def run(self) -> None:
        """Raises InstallFailed, InstallTimedOut, CanaryFailed, EngineDied, and what kept it from standing still."""
        failpoints.hit("engine.before_install")
        quiesce = await self._stand_still()
        report = await self._put_in()
        speaks = self._life.core.state.residency is Residency.AWAKE
        canary, seconds = await self._prove() if speaks else (None, 0.0)  # put off until there is a KV cache
        failpoints.hit("engine.after_install")
        timings = Timings(quiesce, report.load_seconds, report.cache_seconds, seconds)
        update = self._update
        changed = self._life.note_checksums(update)
        self._life.applied(update, self._receiver, Applied(report, changed, canary, timings, update.content_digest))

    async def _stand_still(self) -> float:
        """Seconds until no forward pass ran and every token was with its consumer (INV-11)."""
        began = time.monotonic()
        await self._life.stop_scheduler()
        await self._life.engine.quiesce()  # also where a failed install left the scheduler in an unknown state
        return time.monotonic() - began

    async def _put_in(self) -> InstallReport:
        staged = self._receiver.staged(self._update.version.label)
        self._life.apply(events.Quiesced())  # INV-1: unset from here on
        failpoints.hit("engine.mid_install")
        return await self._life.engine.install(staged)

    async def _prove(self) -> tuple[CanaryReport, float]:
        """What the canary said, and how long it took."""
        began = time.monotonic()
        return await self._life.engine.canary(), time.monotonic() - began


async def prove_at_last(life: EngineLife) -> None:
    """The canary of a version that was installed without a KV cache; the gate is shut meanwhile. Raises EngineDied."""
    try:
        await life.engine.canary()
    except EngineDied:
        raise
    except WeightplaneError as error:
        life.disproven(error)
    else:
        life.apply(events.Proven())
