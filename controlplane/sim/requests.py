"""Live generation requests at an engine agent: who made which token, by the rules of `engine_agent.life.requests`."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import Life as LifeWord
from controlplane.core.engine_state import Poisoned
from controlplane.core.versions import WeightVersion
from controlplane.sim.kernel import Stream
from controlplane.sim.life import Life
from controlplane.sim.surroundings import Surroundings

TOKEN_SECONDS = (0.05, 0.3)
WAIT_SECONDS = 2.0
EXACT_CHANCE = 0.2


@dataclass(eq=False)
class _Request:
    stream: Stream
    version: WeightVersion
    left: int
    name: str
    exact: bool
    """All of it is of one version; an install ends it."""
    behind_border: bool = False
    waiting: list[bytes] = field(default_factory=list)
    """Contents that made tokens which nobody was given yet."""
    ended: bool = False


@dataclass(eq=False)
class _Waiter:
    stream: Stream
    tokens: int
    wanted: int | None


class Requests:
    """Those of one incarnation."""

    def __init__(self, life: Life, around: Surroundings) -> None:
        self._life = life
        self._around = around
        self._live: list[_Request] = []
        self._waiters: list[_Waiter] = []
        self._made = 0

    def generate(self, stream: Stream, tokens: int, wanted: int | None) -> None:
        """A client asks. It waits outside the gate until the gate is open and its pin is met, for a time."""
        waiter = _Waiter(stream, tokens, wanted)
        self._waiters.append(waiter)
        self._life.after(WAIT_SECONDS, lambda: self._give_up(waiter))
        self.look_again()

    def look_again(self) -> None:
        state = self._life.core.state
        for waiter in list(self._waiters):
            if state.life in (LifeWord.STOPPING, LifeWord.DEAD):
                self._refuse(waiter, e.EngineNotReady(engine_id=state.engine_id, holds=state.life.value))
            elif isinstance(state.weights, Poisoned) and not state.installing:
                self._refuse(waiter, e.EnginePoisoned(engine_id=state.engine_id, cause=state.weights.cause))
            elif self._life.open and state.applied is not None and state.applied.number >= (waiter.wanted or 0):
                self._waiters.remove(waiter)
                self._made += 1
                exact = self._around.kernel.rng.random() < EXACT_CHANCE
                request = _Request(waiter.stream, state.applied, waiter.tokens, f"r{self._made}", exact)
                request.stream.on_server_end = lambda request=request: self._drop(request)  # type: ignore[misc]
                self._live.append(request)
                self._count()
                self._next_token(request)

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter not in self._waiters:
            return
        state = self._life.core.state
        applied = state.applied
        if waiter.wanted is not None and (applied is None or applied.number < waiter.wanted):
            error: e.WeightplaneError = e.VersionUnavailable(wanted=str(waiter.wanted), applied=str(applied))
        else:
            error = e.EngineNotReady(engine_id=state.engine_id, holds=", ".join(sorted(map(str, state.holds))))
        self._refuse(waiter, error)

    def _refuse(self, waiter: _Waiter, error: e.WeightplaneError) -> None:
        self._waiters.remove(waiter)
        self._around.witness.refused(error)
        waiter.stream.refuse(error)

    # ---- tokens ----

    def _next_token(self, request: _Request) -> None:
        self._life.after(self._around.kernel.rng.uniform(*TOKEN_SECONDS), lambda: self._token(request))

    def _token(self, request: _Request) -> None:
        if request.ended:
            return
        if self._life.engine.running and not self._life.engine.stalled:
            request.left -= 1
            if request.behind_border:
                request.waiting.append(self._life.engine.content)
            else:
                self._around.witness.token(self._life, request.version, self._life.engine.content)
            self._around.witness.made_token(self._life)
        if request.left > 0:
            self._next_token(request)
        else:
            self._finish(request)

    def draw_border(self) -> None:
        """Generation stands still: tokens so far are the old version's (INV-11)."""
        for request in self._live:
            request.behind_border = True

    def release(self, version: WeightVersion) -> None:
        """The gate opens with `version`: what waited is its, and so is what comes."""
        for request in list(self._live):
            if request.exact and request.version != version:
                self._cut(request)
                continue
            request.behind_border, request.version = False, version
            for content in request.waiting:
                self._around.witness.token(self._life, version, content)
            request.waiting.clear()

    def _cut(self, request: _Request) -> None:
        error = e.VersionChanged(request_id=request.name)
        self._around.witness.refused(error)
        request.stream.refuse(error)
        self._drop(request)

    def abort_all(self) -> None:
        """Poisoned: what waited is dropped, and each sample ends with what it has."""
        for request in list(self._live):
            request.waiting.clear()
            self._finish(request)

    @property
    def some(self) -> bool:
        return bool(self._live)

    def disagree(self) -> None:
        """INV-11: a sample that ends shows that its spans are not the engine's own."""
        for request in self._live[:1]:
            error = e.SpanMismatch(request_id=request.name, ours=str(request.version), engines="otherwise")
            self._around.witness.refused(error)
            request.stream.refuse(error)
            self._drop(request)
        self._life.apply(ee.SpansDisagreed("the engine says otherwise"))

    def end_all(self) -> None:
        gone = e.EngineDied(engine_id=self._life.agent.name, cause="the engine's processes are gone")
        for request in list(self._live):
            request.stream.refuse(gone)
            self._drop(request)
        for waiter in list(self._waiters):
            self._refuse(waiter, gone)

    def _finish(self, request: _Request) -> None:
        request.stream.refuse(e.PeerLost(peer="the engine", cause="the sample is complete"))
        self._drop(request)

    def _drop(self, request: _Request) -> None:
        request.ended = True
        if request in self._live:
            self._live.remove(request)
            self._count()

    def _count(self) -> None:
        self._life.apply(ee.RequestsCounted(len(self._live), len(self._waiters)))
