"""Which of the engines that may be asked gets a request. Pure; the table knows what this client has in flight."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol

from controlplane.rollout.routing import Route, RoutingTable


class Policy(Protocol):
    def choose(self, candidates: Sequence[Route], table: RoutingTable, session_id: str) -> Route:
        """One of `candidates`, of which there is at least one."""
        ...


class LeastLoaded:
    """The engine with the fewest of this client's requests, then of everybody's."""

    def choose(self, candidates: Sequence[Route], table: RoutingTable, session_id: str) -> Route:
        return min(candidates, key=table.load)


class PowerOfTwo:
    """The less loaded of two at random: many clients that know little of each other do not all run to one engine."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Route], table: RoutingTable, session_id: str) -> Route:
        return min(self._random.sample(list(candidates), min(2, len(candidates))), key=table.load)


class BySession:
    """Requests of one session go to one engine, which has their prefix in its cache; without a session, the least
    loaded. An engine that comes or goes moves only the sessions that are its own (rendezvous hashing)."""

    def choose(self, candidates: Sequence[Route], table: RoutingTable, session_id: str) -> Route:
        if not session_id:
            return min(candidates, key=table.load)
        return max(candidates, key=lambda r: hashlib.sha256(f"{session_id}\0{r.engine_id}".encode()).digest())
