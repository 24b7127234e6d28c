"""Links: connections over which a leader broadcasts its chunks to engine agents, seen from the leader.

A link is made before the first byte of an update: the leader listens, the engines are told where by the open frames of
their streams, everybody meets under the link's own id, connects, and the leader sends a probe of known bytes. It lives
while the engines' incarnations and its fate are unchanged and nothing failed in it, over any number of updates; it is
gone with a replan, a failed push and the rank. Each new one has an id of its own, so that nobody meets a member of an
old one (G6).

Promises: no more than two chunks are on their way; their memory is free only when their operations are over (INV-12);
every wait has a deadline. Refuses nothing; what does not work is LINK_FAILED, with the engines and the cause.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import xxhash

from controlplane import collectives
from controlplane.collectives import Between, first_line
from controlplane.core.errors import LinkFailed
from controlplane.sockets import Sockets
from trainer_agent.forks import let_go_in_children
from trainer_agent.parts import Part
from trainer_agent.rank.memory import RING_CHUNKS
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import weight_update_pb2

log = structlog.get_logger(__name__)

JOIN_SECONDS = 30.0
"""Longest wait for the engines to come; they are told where at the same moment. Below what an engine waits for others,
so that the sender says first who is missing."""
PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What a link depends on: if any of it changes it is another one."""

    name: str
    engines: tuple[tuple[str, str], ...]
    """Ids and incarnations."""
    fate: weight_update_pb2.LinkFate.ValueType
    host: str


class SenderLink:
    """One link. Its members: this rank at position 0, then the engines in the plan's order."""

    def __init__(self, key: LinkKey) -> None:
        """Listen, on a port that the system chooses. Raises LinkFailed: the address is none of this host's."""
        self.key = key
        self.link_id = secrets.token_hex(16)
        self.connected = False
        self.error: LinkFailed | None = None
        """Why it is of no use any more."""
        self._group: collectives.Group | None = None
        self._pending: deque[tuple[int, Any]] = deque()
        """Chunks on their way, and their operations."""
        self._store, port = self._listen()
        self._store_sockets = Sockets([(key.host, port)], [(key.host, port)])
        let_go_in_children(self._store_sockets)
        self.rendezvous = f"{key.host}:{port}"
        self._deadline = time.monotonic() + JOIN_SECONDS

    @property
    def engine_ids(self) -> list[str]:
        return [engine_id for engine_id, _ in self.key.engines]

    @property
    def busy(self) -> bool:
        """Some operation may still read memory of ours."""
        return any(not work.is_completed() for _, work in self._pending)

    def made(self) -> rank_pb2.LinkMade:
        """What the engines are told."""
        return rank_pb2.LinkMade(
            link=self.key.name, link_id=self.link_id, rendezvous=self.rendezvous, engine_ids=self.engine_ids
        )

    def met(self) -> bool:
        """Whether everybody has come. Raises LinkFailed, with those who did not come in time."""
        missing = [e for i, e in enumerate(self.engine_ids, 1) if not self._store.check([f"here/{i}"])]
        if missing and time.monotonic() > self._deadline:
            raise self._failed("join", f"not there after {JOIN_SECONDS} s", missing)
        return not missing

    def connect(self, between: Between) -> None:
        """Everybody has come: connect, and probe. Raises LinkFailed."""
        try:
            self._group = collectives.Group(self._store, 0, 1 + len(self.key.engines), host=self.key.host)
            let_go_in_children(self._group.sockets)
            work = self._group.broadcast(probe(os.urandom(PROBE_BYTES)))
            self._pending.append((-1, work))
            collectives.end(work, between)
            self._pending.clear()
        except RuntimeError as error:
            raise self._failed("join", first_line(error)) from error
        self.connected = True
        log.info("link_made", link=self.key.name, link_id=self.link_id, engines=self.engine_ids)

    def send(self, index: int, data: torch.Tensor, between: Between) -> None:
        """Put a chunk on its way; waits until the one before the last has arrived. Raises LinkFailed."""
        self.wait_sent(index - RING_CHUNKS, between)
        try:
            self._pending.append((index, self._open_group.broadcast(data)))
        except RuntimeError as error:
            raise self._failed("bytes", first_line(error)) from error

    def wait_sent(self, index: int, between: Between) -> None:
        """Return when chunk `index` and all before it have arrived. Raises LinkFailed."""
        while self._pending and self._pending[0][0] <= index:
            try:
                collectives.end(self._pending[0][1], between)
            except RuntimeError as error:
                raise self._failed("bytes", first_line(error)) from error
            self._pending.popleft()

    def wait_still(self, index: int, between: Between) -> None:
        """Return when nothing reads the memory of chunk `index` any more, whether it arrived or not (INV-12)."""
        for number, work in self._pending:
            if number <= index:
                with suppress(RuntimeError):
                    collectives.end(work, between)

    def close(self) -> None:
        """Close every connection, which ends what is on its way."""
        group, self._group, self._store = self._group, None, None
        self._pending.clear()
        if group is not None:
            group.close()

    @property
    def _open_group(self) -> collectives.Group:
        assert self._group is not None, "chunks are sent when it was connected"
        return self._group

    def _failed(self, stage: str, cause: str, engines: Sequence[str] = ()) -> LinkFailed:
        names = ", ".join(engines or self.engine_ids)
        self.error = LinkFailed(engine_id=names, transport="broadcast", stage=stage, cause=cause)
        return self.error

    def _listen(self) -> tuple[Any, int]:
        """Bound here, and only at that address: the store would listen on every one."""
        try:
            listener = socket.create_server((self.key.host, 0))
        except OSError as error:
            raise self._failed("join", f"cannot listen at {self.key.host}: {error.strerror or error}") from error
        port: int = listener.getsockname()[1]
        store = collectives.serve_store(self.key.host, listener.detach(), port)
        return collectives.prefixed(self.link_id, store), port


class Links:
    """All links that one rank leads."""

    def __init__(self) -> None:
        self._links: dict[str, SenderLink] = {}

    def prepare(self, parts: Sequence[Part], host: str) -> None:
        """Have a link for each broadcast part; close those that the plan has no more, or that failed."""
        keys = {p.link: LinkKey(p.link, p.engines, p.fate, host) for p in parts if p.traits.by_link}
        for name, link in list(self._links.items()):
            if keys.get(name) != link.key or link.error is not None:
                self._links.pop(name).close()
        for name, key in keys.items():
            if name not in self._links:
                self._links[name] = SenderLink(key)

    def of(self, part: Part) -> SenderLink:
        return self._links[part.link]

    def meet(self, between: Between) -> None:
        """Connect the new ones, in the order in which their engines come. A link that fails keeps its error."""
        waiting = [link for link in self._links.values() if not link.connected]
        while waiting:
            between()
            for link in list(waiting):
                with suppress(LinkFailed):
                    if not link.met():
                        continue
                    link.connect(between)
                waiting.remove(link)
            time.sleep(collectives.POLL_SECONDS)

    @property
    def busy(self) -> bool:
        """Some operation may still read memory of ours."""
        return any(link.busy for link in self._links.values())

    def close(self) -> None:
        """Close all."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def __len__(self) -> int:
        return len(self._links)


def probe(data: bytes) -> torch.Tensor:
    """The bytes, and their XXH3_64 behind them."""
    return torch.frombuffer(bytearray(data + xxhash.xxh3_64_digest(data)), dtype=torch.uint8)
