"""A streaming install: each part goes into the engine as it comes, between standing still and the canary.

Promises that nothing stands still before the first part is here and checked; that the version is unset before its first
byte is installed (INV-1) and claimed only after the commit frame, the end of the install and the canary (INV-3); that
`put` returns when no worker reads the part any more (INV-12); and that whatever ends the stream before its commit ends
this install, with nothing resumed (INV-4). A part's installation is never cut: the end is seen between two of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from controlplane import failpoints
from controlplane.core import engine_events as events
from controlplane.core.engine_update import Update
from controlplane.core.errors import EngineDied, InstallFailed, InstallTimedOut, WeightplaneError
from controlplane.core.pauses import PausePolicy
from engine_agent.engine import InstallReport, StagedPart
from engine_agent.life.gate import Gate
from engine_agent.life.installing import Applied, Install
from engine_agent.life.life_parts import LifeParts
from engine_agent.receivers import Receiver

_Part = tuple[StagedPart, asyncio.Future[None]]


class StreamingInstall(Install):
    """One streaming install in one life. `run` once, as a task of the life's; the others are its stream's."""

    def __init__(self, life: LifeParts, gate: Gate, receiver: Receiver, update: Update, pause: PausePolicy) -> None:
        super().__init__(life, gate, receiver, update, pause)
        self._waiting: asyncio.Queue[_Part | None] = asyncio.Queue(1)
        """None: the commit frame was taken, no part follows."""
        self._first: _Part | None = None
        self._over: asyncio.Future[WeightplaneError] = asyncio.get_running_loop().create_future()

    # ---- the stream's side ----

    async def put(self, part: StagedPart) -> None:
        """Returns when the part is installed. Raises what ended the install."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._waiting.put((part, done))  # its room is free: one part at a time
        ends: set[asyncio.Future[Any]] = {done, self._over}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise self._over.result()
        done.result()

    def finish(self) -> None:
        """The commit frame was taken, and every part before it was put."""
        self._waiting.put_nowait(None)

    def cut(self, error: WeightplaneError) -> None:
        """No more comes. Idempotent."""
        if not self._over.done():
            self._over.set_result(error)

    # ---- the install ----

    async def run(self) -> Applied:
        """Raises as `Install.run` does, and what it was cut with. The life's lock is held meanwhile."""
        try:
            self._first = await self._next()
            return await super().run()
        except WeightplaneError as error:
            self.cut(error)
            if not isinstance(error, (EngineDied, InstallTimedOut)):  # those rebuild the engine
                await self._life.engine.abandon_streaming()
            raise
        finally:
            self.cut(EngineDied(engine_id=self._life.core.state.engine_id, cause="its life ended"))

    async def _stand_still(self) -> float:
        seconds = await super()._stand_still()
        if self._over.done():  # the stream ended meanwhile, and nothing was touched
            raise self._over.result()
        return seconds

    async def _put_in(self) -> InstallReport:
        """The engine stands still for all of it, the waiting for bytes too."""
        assert self.update.assembly is not None, "chunks came"
        began = time.monotonic()
        self._life.apply(events.Quiesced())  # INV-1: unset from here on
        failpoints.hit("engine.mid_install")
        await self._life.engine.begin_streaming(self.update.assembly.layout, self.update.version.label)
        try:
            report = await self._put_in_parts()
        except InstallFailed as error:  # an earlier part may be in, whatever became of the last one
            raise InstallFailed(error.engine_id, error.version, True, error.cause) from error
        return replace(report, load_seconds=time.monotonic() - began - report.cache_seconds)

    async def _put_in_parts(self) -> InstallReport:
        part = self._first
        while part is not None:
            await self._life.engine.install_part(part[0])
            part[1].set_result(None)
            part = await self._next()
        return await self._life.engine.finish_streaming()

    async def _next(self) -> _Part | None:
        """The next part; None after the commit frame. Raises what cut the install."""
        coming = asyncio.ensure_future(self._waiting.get())
        try:
            ends: set[asyncio.Future[Any]] = {coming, self._over}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            raise self._over.result()
        finally:
            coming.cancel()
