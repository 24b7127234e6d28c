"""One install, from a checked version in shared memory to weights that spoke: stand still, put in, prove.

Promises that nothing is claimed before the last of these is done (INV-1), and that whatever is raised on the way leaves
what the engine holds to its life to say (INV-4): nothing is resumed here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from controlplane import failpoints
from controlplane.core import engine_events as events
from controlplane.core.canary import Canary
from controlplane.core.engine_state import Timings
from controlplane.core.errors import CanaryFailed
from controlplane.core.pauses import PauseMode
from engine_agent.engine import InstallReport
from engine_agent.receivers import Receiver

if TYPE_CHECKING:
    from engine_agent.life import EngineLife


log = structlog.get_logger(__name__)

NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Applied:
    """What an install found out, for the writer."""

    report: InstallReport
    changed_tensors: int | None
    """Tensors whose bytes differ from what this engine held last; None at its first. 0 hints at the wrong model."""
    canary: Canary
    timings: Timings
    content_digest: bytes


class Install:
    """One install in one life, under the life's lock. `run` once."""

    def __init__(self, life: EngineLife, receiver: Receiver, update: events.Update) -> None:
        self._life = life
        self._receiver = receiver
        self._update = update
        self._pause = update.pause or life.pause

    async def run(self) -> None:
        """Raises InstallFailed, InstallTimedOut, CanaryFailed, EngineDied, and what kept it from standing still."""
        failpoints.hit("engine.before_install")
        wait = await self._let_finish()
        quiesce = await self._stand_still()
        report = await self._put_in()
        canary, seconds = await self._prove()
        failpoints.hit("engine.after_install")
        timings = Timings(quiesce, report.load_seconds, report.cache_seconds, seconds, wait)
        update = self._update
        changed = self._life.note_checksums(update)
        self._life.applied(update, self._receiver, Applied(report, changed, canary, timings, update.content_digest))

    async def _let_finish(self) -> float:
        """Seconds that requests were given to end by themselves; nobody enters meanwhile, since the update holds the
        gate. Those that took longer are named."""
        if self._pause.mode is not PauseMode.WAIT:
            return 0.0
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause.wait_seconds):
                await self._life.requests.none_left()
        if self._life.requests.names:
            log.warning(
                "requests_took_longer", requests=self._life.requests.names[:NAMES_SHOWN], pause=str(self._pause)
            )
        return time.monotonic() - began

    async def _stand_still(self) -> float:
        """Seconds until no forward pass ran and every token was with its consumer (INV-11)."""
        began, pause = time.monotonic(), self._pause
        await self._life.stop_scheduler()
        await self._life.engine.quiesce()  # also where a failed install left the scheduler in an unknown state
        if (pause.fallback if pause.mode is PauseMode.WAIT else pause.mode) is PauseMode.ABORT:
            self._life.requests.abort(why="updating")
        return time.monotonic() - began

    async def _put_in(self) -> InstallReport:
        staged = self._receiver.staged(self._update.version.label)
        self._life.apply(events.Quiesced())  # INV-1: unset from here on
        failpoints.hit("engine.mid_install")
        return await self._life.engine.install(staged)

    async def _prove(self) -> tuple[Canary, float]:
        """What the canary said, and how long it took."""
        began = time.monotonic()
        said = await self._life.engine.canary()
        return replace(said, by_reference=await self._agrees_with_the_trainer()), time.monotonic() - began

    async def _agrees_with_the_trainer(self) -> bool:
        """Whether there was something to compare with. Raises CanaryFailed where it is something else."""
        reference = self._update.reference
        if reference is None:
            return False
        said = await self._life.engine.canary(reference.prompt_token_ids)
        problem = reference.disagreement(said.prompt_logprobs)
        if problem:
            raise CanaryFailed(self._life.core.state.engine_id, self._update.version.label, problem)
        return True
