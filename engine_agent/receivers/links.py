"""Links: connections over which a sender broadcasts to this engine, seen from the engine agent.

An engine has one link at most. It joins when an update's open frame names one: it comes to the sender's rendezvous,
meets all members there, connects, and checks the probe. The link is kept for later updates that name the same id, until
another is named, an update ends before all of its bytes came, a later term is heard of (G7), or the engine's life ends.
An id that was left is never joined again: its members have gone.

Every wait has a deadline and ends when the link is left; a thread that gloo holds ends by gloo's timeout.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import Any

import structlog
import xxhash

from controlplane.core.errors import LinkFailed, UpdateAborted

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 10.0
"""How long the sender's address may take to answer."""
JOIN_SECONDS = 45.0
"""How long the others may take to come; longer than the sender waits, so that the sender says first who is missing."""
CHECKSUM_BYTES = 8
PROBE_BYTES = 1 << 20
MAX_LEFT = 64
"""Ids of links that were left, kept so that none of them is joined again."""


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """This engine's place in a link; see Link in weight_update.proto."""

    link_id: str
    rendezvous: str
    size: int
    position: int
    term: int
    """The writer's."""


class ReceiverLink:
    """One link. `join` and `receive` block, in threads; `leave` may come from any other at any time."""

    def __init__(self, place: LinkPlace, engine_id: str) -> None:
        self.place = place
        self._engine_id = engine_id
        self._group: Any = None
        self._left = threading.Event()
        self._guard = threading.Lock()
        self._in_use = False
        self.joined = False

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def join(self) -> None:
        """Meet, connect, check the probe; nothing to do where that was done. Raises LinkFailed, UpdateAborted."""
        self._in_use = True
        if self.joined:
            return
        from controlplane import collectives  # torch: only where a link is used

        store, host = self._reach()
        try:
            store.set(f"here/{self.place.position}", self._engine_id)
            others = [f"here/{i}" for i in range(1, self.place.size)]
            if collectives.wait_for_keys(store, others, JOIN_SECONDS, self._check):
                raise self._failed("join", f"not all {self.place.size} members came within {JOIN_SECONDS} s")
            group = collectives.Group(store, self.place.position, self.place.size, host=host)
        except RuntimeError as error:
            raise self._failed("join", collectives.first_line(error)) from error
        self._keep(group)
        self._probe()
        self.joined = True
        log.info("link_joined", link_id=self.place.link_id, position=self.place.position, size=self.place.size)

    def receive(self, target: memoryview, stage: str = "bytes") -> None:
        """Wait for the sender's next bytes, which fill `target`. Raises LinkFailed, UpdateAborted."""
        import torch

        from controlplane import collectives

        work = None
        try:
            with self._guard:
                self._check()
                work = self._group.broadcast(torch.frombuffer(target, dtype=torch.uint8))
            collectives.end(work, self._check)
        except RuntimeError as error:
            self._check()  # what is cut by ourselves fails too
            raise self._failed(stage, collectives.first_line(error)) from error
        finally:
            del target, work  # an error's traceback must not hold a version's memory

    def all_came(self) -> None:
        """The update needs nothing more of the link: it is as it was before."""
        self._in_use = False

    def leave(self) -> None:
        """Close it, unless nothing is under way in it. Idempotent."""
        if self._in_use:
            self.close()

    def close(self) -> None:
        """Close its connections, which also ends what the others wait for. Idempotent."""
        self._left.set()
        with self._guard:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _reach(self) -> tuple[Any, str]:
        """The sender's store, under the link's own keys, and the address by which this host is connected with it."""
        from controlplane import collectives

        host, _, port = self.place.rendezvous.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as trial:
                own = str(trial.getsockname()[0])
            store = collectives.open_store(host, int(port), CONNECT_SECONDS)
        except (OSError, ValueError, RuntimeError) as error:
            cause = f"no answer at {self.place.rendezvous}: {collectives.first_line(error)}"
            raise self._failed("connect", cause) from error
        return collectives.prefixed(self.place.link_id, store), own

    def _keep(self, group: Any) -> None:
        with self._guard:
            if not self._left.is_set():
                self._group = group
                return
        group.close()
        raise UpdateAborted(update_id="", cause="the link was left while it was joined")

    def _probe(self) -> None:
        data = bytearray(PROBE_BYTES + CHECKSUM_BYTES)
        self.receive(memoryview(data), "join")
        payload, checksum = data[:PROBE_BYTES], bytes(data[PROBE_BYTES:])
        if xxhash.xxh3_64_digest(payload) != checksum:
            raise self._failed("probe", "other bytes came than were sent")

    def _check(self) -> None:
        """Raises UpdateAborted: the link was left."""
        if self._left.is_set():
            raise UpdateAborted(update_id="", cause="the link was left meanwhile")

    def _failed(self, stage: str, cause: str) -> LinkFailed:
        self.close()
        return LinkFailed(engine_id=self._engine_id, transport="broadcast", stage=stage, cause=cause)


class EngineLinks:
    """The link of one life of an engine."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._link: ReceiverLink | None = None
        self._gone: list[str] = []

    def take(self, place: LinkPlace) -> ReceiverLink:
        """The link that an update names; any other one is left. It is still to be joined.

        Raises:
            LinkFailed: it was left before.
        """
        if self._link is not None and self._link.place.link_id == place.link_id and not self._link.left:
            return self._link
        self.close()
        if place.link_id in self._gone:
            raise LinkFailed(
                engine_id=self._engine_id, transport="broadcast", stage="join", cause="this link was left before"
            )
        self._gone = [*self._gone[1 - MAX_LEFT :], place.link_id]
        self._link = ReceiverLink(place, self._engine_id)
        return self._link

    def heard(self, term: int) -> None:
        """A later term was given: what an earlier writer's link holds is freed (G7)."""
        if self._link is not None and self._link.place.term < term:
            self.close()

    def close(self) -> None:
        """Leave whatever there is."""
        if self._link is not None:
            self._link.close()
            self._link = None
