"""Where samples become training data: how far behind its policy a sample may be, and what is done with one that is not.

Lag is counted in fleet commits over the spans of a sample (`controlplane.core.lag`): numbers that updates burned do not
inflate it. What is dropped or masked is counted by version, and nothing is let through unseen (R2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from controlplane.core.errors import Refused
from controlplane.core.lag import Commits
from controlplane.core.sample_spans import Span
from controlplane.core.versions import WeightVersion
from controlplane.rollout.sample import Sample

LagPolicy = Literal["drop", "mask", "raise"]


@dataclass(eq=False)
class LagExceeded(Refused):
    """A sample has tokens of a version that is further behind than is allowed."""

    reason = "LAG_EXCEEDED"
    template = "tokens {start} to {end} are of version {version}, {lag} commits behind; at most {max_lag} are allowed"
    version: str
    start: int
    end: int
    lag: int
    max_lag: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sample that may be trained on."""

    sample: Sample
    mask: tuple[bool, ...]
    """One for each token: whether it counts."""
    lags: tuple[int, ...]
    """One for each span: fleet commits behind the learner, when it was admitted."""


@dataclass
class LagGuard:
    """Admits samples whose tokens are at most `max_lag` fleet commits behind `commits`.

    `drop`: a sample with any older token is not admitted. `mask`: it is, and those tokens do not count; if none is left
    it is dropped. `raise`: LagExceeded.
    """

    commits: Commits
    """The fleet's, as far as it is known: `RolloutClient.commits`, which follows the coordinator."""
    max_lag: int
    policy: LagPolicy = "drop"
    admitted: int = 0
    """Samples."""
    dropped: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Samples, by reason (`lag`; `empty`: aborted before its first token; `group`: one of its group was dropped) and
    number of the oldest version in them, which an empty one does not have."""
    masked_tokens: Counter[int] = field(default_factory=Counter)
    """By version number."""
    lags: Counter[int] = field(default_factory=Counter)
    """Tokens admitted, by their lag."""

    def admit(self, sample: Sample, *, pending_commits: int = 0) -> Admitted | None:
        """None: it was dropped, and counted.

        `pending_commits`: pushes of the learner that the fleet has not committed yet. Its weights are ahead of the
        fleet's by so many, and a sample is behind the learner by so many more.
        """
        if not sample.spans:
            self._drop(sample, "empty")
            return None
        lags = self._lags(sample, pending_commits)
        late = [span for span, lag in zip(sample.spans, lags, strict=True) if lag > self.max_lag]
        if late and self.policy == "raise":
            raise self._exceeded(late[0], lags[sample.spans.index(late[0])])
        fresh = len(sample.tokens) - sum(span.end - span.start for span in late)
        if late and (self.policy == "drop" or not fresh):
            self._drop(sample, "lag")
            return None
        self._count(sample, lags, late)
        old = {i for span in late for i in range(span.start, span.end)}
        return Admitted(sample, tuple(i not in old for i in range(len(sample.tokens))), lags)

    def admit_all(self, samples: Iterable[Sample], *, pending_commits: int = 0) -> list[Admitted]:
        """Those that were admitted."""
        admitted = (self.admit(sample, pending_commits=pending_commits) for sample in samples)
        return [each for each in admitted if each is not None]

    def admit_group(self, samples: Sequence[Sample], *, pending_commits: int = 0) -> list[Admitted] | None:
        """All of them or none, where rewards are compared within a group. None: one lagged too far, or is
        empty; all are counted."""
        late = [s for s in samples if self._would_drop(s, pending_commits)]
        if not late:
            return self.admit_all(samples, pending_commits=pending_commits)
        for sample in samples:
            self._drop(sample, ("lag" if sample.spans else "empty") if sample in late else "group")
        return None

    def may_begin(self, version: WeightVersion, *, pending_commits: int = 1) -> bool:
        """Whether work begun now under `version` may still count after `pending_commits` more: else it is not begun."""
        return self.commits.lag(version) + pending_commits <= self.max_lag

    def _lags(self, sample: Sample, pending_commits: int) -> tuple[int, ...]:
        return tuple(self.commits.lag(span.version) + pending_commits for span in sample.spans)

    def _would_drop(self, sample: Sample, pending_commits: int) -> bool:
        lags = self._lags(sample, pending_commits)
        if not lags:
            return True
        if self.policy == "raise":
            return False
        return (max if self.policy == "drop" else min)(lags) > self.max_lag

    def _drop(self, sample: Sample, reason: str) -> None:
        self.dropped[reason, min((span.version.number for span in sample.spans), default=None)] += 1

    def _count(self, sample: Sample, lags: tuple[int, ...], late: list[Span]) -> None:
        self.admitted += 1
        for span, lag in zip(sample.spans, lags, strict=True):
            tokens = span.end - span.start
            if span in late:
                self.masked_tokens[span.version.number] += tokens
            else:
                self.lags[lag] += tokens

    def _exceeded(self, span: Span, lag: int) -> LagExceeded:
        return LagExceeded(version=str(span.version), start=span.start, end=span.end, lag=lag, max_lag=self.max_lag)
