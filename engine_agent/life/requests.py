"""Live requests: which version made which token (INV-11), and what may be handed out when.

Each request has a pump that takes tokens from the engine as they come, so that a slow reader never keeps the engine
from standing still. A border is drawn at a token count when generation has stopped; tokens after it wait until the
gate opens and are then attributed to the version that it opened with. On poison they are dropped and the
request ends `abort` with the spans it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import structlog

from controlplane.core.errors import SpanMismatch, WeightplaneError
from controlplane.core.sample_spans import ABORTED, POISONED, VERSION_CHANGED, Span, extend
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion
from engine_agent.engine import Engine, GenerationDelta, LiveRequests

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one version, ready to be handed out. The last part has `final`."""

    version: WeightVersion
    delta: GenerationDelta
    spans: tuple[Span, ...] = ()
    """On the last part: the whole sample's."""


@dataclass
class _Request:
    request_id: str
    name: str
    """The caller's."""
    version: WeightVersion
    spans: list[Span] = field(default_factory=list)
    seen: int = 0
    """Tokens that came from the engine."""
    behind_border: bool = False
    """The gate shut: what comes from now on belongs to the next version."""
    waiting: list[GenerationDelta] = field(default_factory=list)
    exact: bool = False
    """Of one version or of none: another one ends it."""
    ended: bool = False
    """Its last part is made: nothing follows."""
    out: asyncio.Queue[Part | BaseException] = field(default_factory=asyncio.Queue)
    """Bounded by the request's max_tokens."""
    pump: asyncio.Task[None] | None = None


class Parts:
    """The parts of one live request, as an iterator. Whoever has it comes to its end or closes it, which aborts it.

    Iterating raises EngineDied, SpanMismatch, InvalidRequest, and whatever else the engine raised.
    """

    def __init__(self, request: _Request, forget: Callable[[_Request], None]) -> None:
        self._request = request
        self._forget = forget
        self._over = False

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Part:
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._request.out.get()
        except BaseException:
            await self.aclose()
            raise
        if isinstance(item, BaseException):
            await self.aclose()
            raise item
        if item.delta.finish_reason is not None:
            await self.aclose()
        return item

    async def aclose(self) -> None:
        """Idempotent."""
        self._over = True
        self._forget(self._request)


class Requests:
    """The live requests of one engine incarnation."""

    def __init__(
        self,
        engine: Engine,
        counted: Callable[[int], None],
        disagreed: Callable[[str], None],
        made: Callable[[WeightVersion, int], None] = lambda version, count: None,
    ) -> None:
        """`counted` is told how many requests there are, at each change; `disagreed` when an account is wrong (INV-11);
        `made` how many tokens were attributed to which version."""
        self._engine = engine
        self._made = made
        self._counted = counted
        self._disagreed = disagreed
        self._live: dict[str, _Request] = {}
        self._shut = False
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def names(self) -> list[str]:
        """What their callers call those that are here."""
        return [request.name for request in self._live.values()]

    async def none_left(self) -> None:
        """Wait until there is none."""
        await self._none.wait()

    def run(
        self,
        request_id: str,
        version: WeightVersion,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        name: str = "",
        *,
        exact: bool = False,
    ) -> Parts:
        """Generate under `version`. `request_id` is used once, `name` is the caller's. It is in from this call on: a
        border is drawn around it, or it is not.

        `exact`: another version ends it, as `version_changed`.
        """
        deltas = partial(self._engine.generate, request_id, prompt, sampling)
        return self.follow(request_id, version, deltas, name, exact=exact)

    def follow(
        self,
        request_id: str,
        version: WeightVersion,
        deltas: Callable[[], AsyncGenerator[GenerationDelta, None]],
        name: str = "",
        *,
        exact: bool = False,
    ) -> Parts:
        """The same for a request whose deltas come by a way of their own, such as the engine's own words. The engine
        knows it by `request_id` too."""
        request = _Request(request_id, name or request_id, version, behind_border=self._shut, exact=exact)
        self._live[request_id] = request
        self._none.clear()
        request.pump = asyncio.create_task(self._pump(request, deltas))
        request.pump.add_done_callback(lambda pump: _tell(request, pump))
        self._counted(len(self._live))
        return Parts(request, self._forget)

    def _forget(self, request: _Request) -> None:
        if self._live.pop(request.request_id, None) is None:
            return
        assert request.pump is not None  # it ran from the start
        request.pump.cancel()
        if not self._live:
            self._none.set()
        self._counted(len(self._live))

    # ---- the gate's side ----

    def draw_border(self, live: LiveRequests) -> None:
        """Generation stands still: tokens so far are the old version's, for each request."""
        self._shut = True
        for request in self._live.values():
            expected = live.token_counts.get(request.request_id, 0)
            if not request.behind_border and not request.ended and request.seen != expected:
                self._disagreed(f"{request.request_id}: {request.seen} tokens were seen, the engine gave {expected}")
            request.behind_border = True

    def release(self, version: WeightVersion) -> None:
        """The gate opens with `version`: what waited is its, and so is what comes."""
        self._shut = False
        for request in self._live.values():
            request.behind_border = False
            if request.exact and request.version != version and not request.ended:
                request.waiting.clear()
                self._finish(request, GenerationDelta((), (), finish_reason=VERSION_CHANGED))
            request.version = version
            waiting, request.waiting = request.waiting, []
            for delta in waiting:
                self._attribute(request, delta)

    def abort_all(self) -> None:
        """Poisoned: what waited is dropped, and each request ends with the spans that it has (R4)."""
        self.abort(why=POISONED)

    def abort(self, names: Collection[str] | None = None, *, why: str = ABORTED) -> list[str]:
        """End those that their callers named so, or all: each with the spans that it has (R4). The names of those that
        were here, one for each. `why` is their stop reason, a word of `controlplane.core.sample_spans`."""
        ended = [r for r in self._live.values() if not r.ended and (names is None or r.name in names)]
        for request in ended:
            request.waiting.clear()
            self._finish(request, GenerationDelta((), (), finish_reason="abort", stop_reason=why))
        return [request.name for request in ended]

    def fail_all(self, error: WeightplaneError) -> None:
        """The engine is gone: nobody waits for tokens that cannot come."""
        for request in self._live.values():
            request.out.put_nowait(error)

    # ---- one request ----

    async def _pump(self, request: _Request, come: Callable[[], AsyncGenerator[GenerationDelta, None]]) -> None:
        try:
            async with aclosing(come()) as deltas:
                async for delta in deltas:
                    request.seen += len(delta.token_ids)
                    if request.ended:
                        continue  # its consumer has been told the end; it stops the engine's work in a moment
                    if request.behind_border:
                        request.waiting.append(delta)
                    else:
                        self._attribute(request, delta)
        except WeightplaneError as error:
            request.ended = True
            request.out.put_nowait(error)

    def _attribute(self, request: _Request, delta: GenerationDelta) -> None:
        count = len(delta.token_ids)
        if count:
            extend(request.spans, request.version, count)
            self._made(request.version, count)
        if delta.finish_reason is None:
            request.out.put_nowait(Part(request.version, delta))
            return
        ours = [(s.version.label, s.start, s.end) for s in request.spans]
        if ours != list(delta.engine_spans):
            error = SpanMismatch(request_id=request.request_id, ours=str(ours), engines=str(list(delta.engine_spans)))
            self._disagreed(str(error))
            request.out.put_nowait(error)
            return
        self._finish(request, delta)

    def _finish(self, request: _Request, delta: GenerationDelta) -> None:
        request.ended = True
        request.out.put_nowait(Part(request.version, delta, tuple(request.spans)))


def _tell(request: _Request, pump: asyncio.Task[None]) -> None:
    """An error that nobody planned for is the reader's too: nobody waits for a pump that has ended."""
    error = None if pump.cancelled() else pump.exception()
    if error is not None:
        request.out.put_nowait(error)
