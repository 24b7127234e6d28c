"""What generation gives: tokens that know which version made them. Pure values and the check of the spans (INV-11).

A `Sample` is only ever made by `Assembly.finish`, which refuses spans that do not cover the tokens exactly, so
whoever holds a sample can trust its spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.errors import SpanMismatch
from controlplane.core.pins import ANY, Pin
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sample_spans import VERSION_CHANGED, Span, extend
from controlplane.core.versions import EngineId, WeightVersion

SPANS_KEY = "weightplane_spans"
_SLIME_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted", VERSION_CHANGED: "aborted"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sample ended."""

    finish_reason: str
    """`stop`, `length` or `abort`, as vLLM names them; `version_changed`."""
    stop_reason: str
    spans: tuple[Span, ...]
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample, all made by one version. The last one has `ending`, and may hold no token."""

    engine_id: EngineId
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: WeightVersion | None
    """None only when there are no tokens."""
    ending: Ending | None = None
    sampling_masks: tuple[tuple[int, ...], ...] = ()
    """One per token, from engines that say what they drew from."""
    routed_experts: RoutedExperts | None = None
    """The next part of them; before the ending."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A whole sample. Its spans cover its tokens exactly, in order."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, one per token, under the distribution it was drawn from. Empty where they were not asked for."""
    spans: tuple[Span, ...]
    finish_reason: str
    """`stop`, `length`, `abort`, `version_changed`. One that was cut has the tokens that it got, and their spans."""
    stop_reason: str
    engine_id: EngineId
    prompt_tokens: int
    cached_prompt_tokens: int
    sampling_masks: tuple[tuple[int, ...], ...] = ()
    """One per token: what it was drawn from. Empty unless every engine that made tokens says so."""
    routed_experts: RoutedExperts | None = None
    """Of the tokens of prompt and sample. None unless the engine says so, and for a sample of more than one part: what
    an engine says of tokens that another one made is of its own weights."""

    def loss_mask(self, *versions: WeightVersion) -> tuple[bool, ...]:
        """One for each token: whether one of these versions made it."""
        return tuple(span.version in versions for span in self.spans for _ in range(span.start, span.end))

    def to_slime(self, prompt_token_ids: Sequence[int], mask: Sequence[bool] | None = None) -> dict[str, Any]:
        """The same in slime's and vime's words: fields of their `Sample`, as its `from_dict` takes them.

        `weight_versions` has the decimal number of each span's version, as text. The spans themselves, with terms,
        are in `metadata` under `SPANS_KEY`: [number, term, start, end], counted from the response's first token.
        `mask`: which tokens count (`Admitted.mask`); None: all. Without logprobs `rollout_log_probs` is None.
        """
        counts = [True] * len(self.tokens) if mask is None else mask
        if len(counts) != len(self.tokens):
            raise ValueError(f"a mask of {len(counts)} for {len(self.tokens)} tokens")
        return {
            "tokens": [*prompt_token_ids, *self.tokens],
            "response_length": len(self.tokens),
            "loss_mask": [int(each) for each in counts],
            "rollout_log_probs": list(self.logprobs) if self.logprobs or not self.tokens else None,
            "weight_versions": [str(span.version.number) for span in self.spans],
            "status": _SLIME_STATUS[self.finish_reason],
            "metadata": {SPANS_KEY: [[s.version.number, s.version.term, s.start, s.end] for s in self.spans]},
        }


@dataclass(frozen=True, slots=True)
class Scores:
    """How probable given tokens are to one version."""

    logprobs: tuple[float | None, ...]
    """Natural log, at temperature 1; entry i belongs to token i. The first token has none."""
    version: WeightVersion
    engine_id: EngineId


@dataclass(slots=True)
class Assembly:
    """A sample while its deltas come in, from one engine or from several in turn (`begin_part`). Raises SpanMismatch as
    soon as deltas and spans disagree."""

    request_id: str
    pin: Pin = ANY
    with_logprobs: bool = True
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    last: Delta | None = None
    prompt_tokens: int | None = None
    """Of the first part: those of later parts have its tokens in their prompt."""
    cached_prompt_tokens: int = 0
    sampling_masks: list[tuple[int, ...]] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    _parts: int = 1
    _part: list[Span] = field(default_factory=list)

    def begin_part(self) -> None:
        """Another engine goes on from the tokens so far: what it says of spans counts from here."""
        self._part, self.last = [], None
        self._parts, self.routed_experts = self._parts + 1, None

    def add(self, delta: Delta) -> None:
        """Take one delta; the last one of a part is judged against all of that part."""
        self.last = delta
        if delta.tokens:
            self._extend(delta)
        if delta.routed_experts is not None:
            self._route(delta.routed_experts)
        if delta.ending is None:
            return
        if tuple(self._part) != delta.ending.spans:
            raise self._mismatch(_text(self._part), _text(delta.ending.spans))
        if self.prompt_tokens is None:
            self.prompt_tokens = delta.ending.prompt_tokens
            self.cached_prompt_tokens = delta.ending.cached_prompt_tokens

    def finish(self) -> Sample:
        """The sample, once its last delta was added."""
        if self.last is None or self.last.ending is None:
            raise self._mismatch(_text(self.spans), "none: the stream ended without a finish")
        ending = self.last.ending
        return Sample(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            engine_id=self.last.engine_id,
            prompt_tokens=ending.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            sampling_masks=tuple(self.sampling_masks) if len(self.sampling_masks) == len(self.tokens) else (),
            routed_experts=self.routed_experts if self._parts == 1 else None,
        )

    def _route(self, part: RoutedExperts) -> None:
        try:
            self.routed_experts = part if self.routed_experts is None else self.routed_experts.followed_by(part)
        except ValueError as error:
            raise self._mismatch("routed experts in order", str(error)) from error

    def _extend(self, delta: Delta) -> None:
        count = len(delta.tokens)
        if delta.version is None:
            raise self._mismatch(f"none for {count} tokens", "none")
        if self.with_logprobs and len(delta.logprobs) != count:
            raise self._mismatch(f"{count} tokens", f"{len(delta.logprobs)} logprobs")
        if not self.pin.allows_by_number(delta.version):
            raise self._mismatch(str(self.pin), str(delta.version))
        extend(self.spans, delta.version, count)
        extend(self._part, delta.version, count)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.sampling_masks += delta.sampling_masks

    def _mismatch(self, ours: str, engines: str) -> SpanMismatch:
        return SpanMismatch(request_id=self.request_id, ours=ours, engines=engines)


def _text(spans: list[Span] | tuple[Span, ...]) -> str:
    return ", ".join(f"{s.version}[{s.start}:{s.end}]" for s in spans) or "none"
