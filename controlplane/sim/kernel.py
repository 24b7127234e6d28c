"""Virtual time, processes and the connections between them.

Promises: one seed gives one history. Streams are ordered and reliable until they break, each way for itself, as
gRPC's are; what travels on different streams overtakes. A process that is stopped does nothing until it goes on, then
all that came meanwhile; one that crashed never does what it had planned. Refuses to run in an unplanned order: there
is no clock, thread or randomness but the kernel's.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from controlplane.core.errors import PeerLost, WeightplaneError

Action = Callable[[], None]
DELAY_SECONDS = (0.001, 0.05)
"""Shortest and usual longest way of a message."""
SLOW_SECONDS = 1.0
SLOW_CHANCE = 0.03
"""Some messages take much longer, so that streams overtake each other."""
KEEPALIVE_SECONDS = 2.0
"""After a partition each end notices within this time."""


class Crashed(Exception):
    """The process died in the middle of what it did."""


class Kernel:
    """The heap of what is to come."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Process, int, Action]] = []
        self._sequence = 0
        self._apart: set[tuple[str, str]] = set()

    def schedule(self, delay: float, process: Process, life: int, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, process, life, action))

    def step(self) -> bool:
        """The next thing that happens. False: nothing is left to happen."""
        while self._heap:
            self.now, _, process, life, action = heapq.heappop(self._heap)
            if process.life != life or not process.up:
                continue
            if process.paused:
                process.backlog.append((life, action))
                continue
            self.events += 1
            with suppress(Crashed):
                action()
            return True
        return False

    def delay(self) -> float:
        slow = self.rng.random() < SLOW_CHANCE
        return self.rng.uniform(DELAY_SECONDS[0], SLOW_SECONDS if slow else DELAY_SECONDS[1])

    # ---- partitions ----

    def part(self, a: Process, b: Process) -> None:
        """Nothing passes between the two any more; both notice in their own time."""
        self._apart.add(_pair(a, b))
        for stream in [s for s in a.streams if b in (s.client, s.server)]:
            stream.cut()

    def heal(self, a: Process, b: Process) -> None:
        self._apart.discard(_pair(a, b))

    def heal_all(self) -> None:
        self._apart.clear()

    def apart(self, a: Process, b: Process) -> bool:
        return _pair(a, b) in self._apart


def _pair(a: Process, b: Process) -> tuple[str, str]:
    return (a.name, b.name) if a.name < b.name else (b.name, a.name)


class Process(ABC):
    """Something that can be stopped and killed. Subclasses say in `boot` what a new life begins with."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.life = 0
        self.up = False
        self.paused = False
        self.backlog: list[tuple[int, Action]] = []
        self.streams: dict[Stream, None] = {}
        self.on_death: Action = _nothing

    def start(self) -> None:
        self.life += 1
        self.up, self.paused = True, False
        self.backlog.clear()
        self.boot()

    @abstractmethod
    def boot(self) -> None:
        """A new life begins; nothing of an older one is left but what is on a disk."""

    def after(self, delay: float, action: Action) -> None:
        """Do it later, if this life still goes on then."""
        self.kernel.schedule(delay, self, self.life, action)

    def crash(self) -> None:
        """kill -9. Peers hear of it; what was under way to them may still arrive."""
        self.up = False
        self.backlog.clear()
        for stream in list(self.streams):
            stream.cut()
        self.streams.clear()
        self.on_death()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: everything that came meanwhile happens now, in the order in which it came."""
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for life, action in backlog:
            self.kernel.schedule(0.0, self, life, action)


class _Way:
    """One direction of a stream."""

    def __init__(self, receiver: Process) -> None:
        self.receiver = receiver
        self.life = receiver.life
        self.arrives_at = 0.0
        self.open = True

    def send(self, action: Action, extra: float = 0.0) -> None:
        kernel = self.receiver.kernel
        self.arrives_at = max(self.arrives_at, kernel.now + kernel.delay() + extra)
        kernel.schedule(self.arrives_at - kernel.now, self.receiver, self.life, lambda: action() if self.open else None)


class Stream:
    """A connection between two processes, or one call."""

    def __init__(self, client: Process, server: Process) -> None:
        self.client, self.server = client, server
        self.broken = False
        self.on_server_end: Action = _nothing
        self.on_client_end: Callable[[WeightplaneError], None] = _nothing_of
        self._up, self._down = _Way(server), _Way(client)
        client.streams[self] = server.streams[self] = None

    def to_server(self, action: Action) -> None:
        if not self.broken:
            self._up.send(action)

    def to_client(self, action: Action) -> None:
        if not self.broken:
            self._down.send(action)

    def refuse(self, error: WeightplaneError) -> None:
        """The server ends it with an error; what it said before arrives first."""
        if self.broken:
            return
        self._forget()
        self._up.open = False
        self._down.send(lambda: self.on_client_end(error))

    def cancel(self) -> None:
        """The client goes; it hears nothing more."""
        if self.broken:
            return
        self._forget()
        self._down.open = False
        self._up.send(self.on_server_end)

    def cut(self) -> None:
        """The connection breaks: each end notices for itself, and what was under way is lost or just arrives."""
        if self.broken:
            return
        self._forget()
        kernel = self.client.kernel
        apart = kernel.apart(self.client, self.server)
        for way, tell in ((self._up, self.on_server_end), (self._down, self._lost)):
            if kernel.rng.random() < 0.5:
                way.open = False
                way = _Way(way.receiver)
            way.send(tell, kernel.rng.uniform(0.0, KEEPALIVE_SECONDS) if apart else 0.0)

    def _lost(self) -> None:
        self.on_client_end(PeerLost(peer=self.server.name, cause="the connection broke"))

    def _forget(self) -> None:
        self.broken = True
        self.client.streams.pop(self, None)
        self.server.streams.pop(self, None)


def connect(client: Process, server: Process) -> Stream | None:
    """A connection, or None: nobody listens there, or nothing passes."""
    if not server.up or client.kernel.apart(client, server):
        return None
    return Stream(client, server)


def _nothing() -> None:
    pass


def _nothing_of(error: WeightplaneError) -> None:
    pass
