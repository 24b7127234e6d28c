"""A vllm-router is told of the door while the gate is open. Best effort: the gate does not wait for a router.

Level-triggered, like the gate: what the router has is compared with what is so, at each change and every few seconds.
One that restarted, or did not hear, hears again. A pause of an update is shorter than the grace: it takes nothing out.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import structlog

from engine_agent.life.engine_life import EngineLife

log = structlog.get_logger(__name__)

CALL_SECONDS = 5.0
"""One call; the router itself asks the door's /health before it takes it."""
AGAIN_SECONDS = 5.0
LAST_SECONDS = 2.0
"""For the last word, which the engine's end waits for."""
GRACE_SECONDS = 1.0
"""A gate that is shut for less stays with the router: its requests wait at the door meanwhile."""


class RouterRegistration:
    """Of one door at one router, for one life of its engine."""

    def __init__(self, life: EngineLife, router: str, url: str) -> None:
        self._life = life
        self._router = router.rstrip("/")
        self._url = url
        self._away = False

    async def run(self) -> None:
        """Until cancelled; then the router is told to forget the door."""
        async with httpx.AsyncClient(timeout=CALL_SECONDS, trust_env=False) as http:
            try:
                while True:
                    wanted = self._life.open or not await self._stays_shut()
                    await self._make_so(http, wanted=wanted)
                    await self._change(AGAIN_SECONDS, wanted=not wanted)
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SECONDS):
                        await self._make_so(http, wanted=False)

    async def _stays_shut(self) -> bool:
        return not await self._change(GRACE_SECONDS, wanted=True)

    async def _change(self, seconds: float, *, wanted: bool) -> bool:
        """Whether the gate became so within that time."""
        try:
            await self._life.state.wait_for(lambda _: self._life.open is wanted, seconds)
        except TimeoutError:
            return False
        return True

    async def _make_so(self, http: httpx.AsyncClient, *, wanted: bool) -> None:
        """Raises nothing: a router that is away is told later."""
        try:
            listed = await http.get(f"{self._router}/list_workers")
            listed.raise_for_status()
            if (self._url in listed.json()["urls"]) is wanted:
                return
            verb = "add_worker" if wanted else "remove_worker"
            done = await http.post(f"{self._router}/{verb}", params={"url": self._url})
            done.raise_for_status()
            log.info("router_told", router=self._router, url=self._url, registered=wanted)
            self._away = False
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            if not self._away:  # said once, however often it is tried
                log.warning("router_not_told", router=self._router, registered=wanted, cause=repr(error))
            self._away = True
