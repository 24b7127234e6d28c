"""One request at the door: what the engine client and the HTTP side know of each other.

The API app stands between the two and hands nothing of this through, so the request is found by its context.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field

from controlplane.core.errors import WeightplaneError
from controlplane.core.sample_spans import Span
from controlplane.core.versions import WeightVersion
from controlplane.tracing import UNTRACED, CallTrace
from engine_agent.life.requests import Part, Parts
from engine_agent.life.spans import trace_part

MAX_CHOICES = 1024
"""Samples of one request, over all its prompts."""
MAX_SPANS_TEXT = 4096
"""Longest header; a longer one is left out, and says so."""
LEFT_OUT = "left out: too many"


@dataclass
class Visit:
    """Used on one event loop."""

    waits_until: float
    """Of the loop's clock: how long the gate is waited for."""
    error: WeightplaneError | None = None
    """Why nothing, or nothing more, came from the engine."""
    runs: list[Parts] = field(default_factory=list)
    choices: int = 0
    """Samples asked for so far: the number of the next one."""
    first: WeightVersion | None = None
    """The version that made the first token."""
    tokens: int = 0
    trace: CallTrace = UNTRACED
    """Where its tokens and ends are noted."""
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)

    @property
    def wait_left(self) -> float:
        return max(0.0, self.waits_until - asyncio.get_running_loop().time())

    def note(self, choice: int, part: Part) -> None:
        """A part of one sample, as it is handed on."""
        trace_part(self.trace, part)
        if part.delta.token_ids:
            self.first = self.first or part.version
            self.tokens += len(part.delta.token_ids)
        if part.delta.finish_reason is not None:
            self._spans[choice] = part.spans

    @property
    def only_version(self) -> WeightVersion | None:
        """The version that made every token of samples that are whole; None if there are several."""
        versions = {span.version for spans in self._spans.values() for span in spans}
        return versions.pop() if len(versions) == 1 else None

    @property
    def spans(self) -> str:
        """`NUMBER:START-END` for tokens START ≤ i < END, with commas between spans and semicolons between samples, in
        order. Empty while none is whole."""
        each = [self._spans.get(choice, ()) for choice in range(self.choices)] if self._spans else []
        text = ";".join(",".join(f"{s.version.number}:{s.start}-{s.end}" for s in spans) for spans in each)
        return text if len(text) <= MAX_SPANS_TEXT else LEFT_OUT

    async def leave(self) -> None:
        """However it ended: nothing of it runs on."""
        for run in self.runs:
            await run.aclose()


current: ContextVar[Visit] = ContextVar("weightplane_door_visit")
