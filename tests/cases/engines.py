"""In-memory engines with a test's hand on them: at named points of their work they fail, or wait for a word."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from controlplane.core.canary import Canary
from engine_agent.daemon import building
from engine_agent.engine import InstallReport, LiveRequests, StagedWeights
from engine_agent.memory.engine import MemoryEngine, MemorySettings, _Live

POINTS = ("quiesce", "first_byte", "half", "canary", "sleep", "wake")
"""In the order of an update: `first_byte` is before the weights are touched, `half` while they are a mixture."""


@dataclass
class Held:
    """A point at which the engine stands: `reached` says that it does, and it goes on after `go`."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> None:
        self.reached.set()
        await self.go.wait()


class Hand:
    """What a test does to one engine, over all of its lives."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {}
        self._limit: int | None = None
        self._limit_moved = asyncio.Event()
        self.engine: HandledEngine | None = None
        """Its present life."""

    def fail(self, point: str, error: Exception) -> None:
        """The next time that the engine comes to `point` this is raised there."""

        async def failing() -> None:
            del self._actions[point]
            raise error

        self._set(point, failing)

    def hold(self, point: str) -> Held:
        """Whenever the engine comes to `point` it stands there until told to go."""
        held = Held()
        self._set(point, held)
        return held

    def limit_samples(self, tokens: int | None) -> None:
        """No sample gets longer than `tokens` until this is called again; None lets all of them run."""
        self._limit = tokens
        self._limit_moved.set()
        self._limit_moved = asyncio.Event()

    async def at(self, point: str) -> None:
        action = self._actions.get(point)
        if action is not None:
            await action()

    async def may_make(self, position: int) -> None:
        while self._limit is not None and position >= self._limit:
            await self._limit_moved.wait()

    def _set(self, point: str, action: Callable[[], Awaitable[None]]) -> None:
        assert point in POINTS, point
        self._actions[point] = action


class HandledEngine(MemoryEngine):
    """The engine's own code, with the hand's points in it. Its label at start is that of whoever launched it."""

    def __init__(self, settings: MemorySettings, engine_id: str, hand: Hand, **how: bool) -> None:
        super().__init__(settings, engine_id, **how)
        self._hand = hand
        self._whole = True
        self.tokens_of_a_mixture = 0
        hand.engine = self

    @property
    def label(self) -> str:
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        """What somebody else wrote into the engine: no word of ours."""
        self._label = label

    def die(self, cause: str) -> None:
        """From its next step on it is gone."""
        self._death = cause

    @property
    def makes_tokens(self) -> bool:
        """Its scheduler runs."""
        return self._running.is_set()

    @property
    def made(self) -> list[int]:
        """How many tokens each live sample has."""
        return [live.seen for live in self._live.values()]

    async def _step(self, live: _Live, prompt: Sequence[int], position: int) -> int:
        await self._hand.may_make(position)
        while not self._running.is_set():  # it may have been quiesced meanwhile
            await self._running.wait()
        self.tokens_of_a_mixture += not self._whole
        return await super()._step(live, prompt, position)

    async def quiesce(self) -> LiveRequests:
        await self._hand.at("quiesce")
        return await super().quiesce()

    async def install(self, staged: StagedWeights) -> InstallReport:
        await self._hand.at("first_byte")
        self._weights, self._whole = hashlib.sha256(b"half of two versions").digest(), False
        await self._hand.at("half")
        report = await super().install(staged)
        self._whole = True
        return report

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        await self._hand.at("canary")
        return await super().canary(prompt)

    async def sleep(self, level: int) -> None:
        await self._hand.at("sleep")
        await super().sleep(level)

    async def wake(self, *, kv_cache: bool) -> None:
        await self._hand.at("wake")
        await super().wake(kv_cache=kv_cache)


Hands = defaultdict[str, Hand]
"""By engine."""


def lay_hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """Every in-memory engine that an agent of this process starts from now on has a hand on it."""
    hands: Hands = defaultdict(Hand)

    def make(settings: MemorySettings, engine_id: str, **how: bool) -> HandledEngine:
        return HandledEngine(settings, engine_id, hands[engine_id], **how)

    monkeypatch.setattr(building, "MemoryEngine", make)
    return hands
