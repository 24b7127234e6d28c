"""How far behind the tokens were that a model's engines made, over all lives of theirs that this coordinator heard of.

Promises that a life which ended still counts, that a report which comes twice counts once, and bounded memory. What an
engine made after its last report and before its death is nobody's to count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from controlplane.core.lag import LAG_BINS
from weightplane.v1 import operator_pb2

MAX_ENGINES = 16384
"""Whose last report is remembered: more than a fleet has, gone ones among them."""

View = operator_pb2.FleetView


class TokenLags:
    """Sums by model. Not for two threads at once."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[str, list[int]]] = OrderedDict()
        """By engine: its incarnation, and what that one had made."""
        self._sums: dict[str, list[int]] = {}

    def see(self, view: View) -> None:
        """Count what is new in `view`, and write the sums into it."""
        for engine in view.engines:
            status = engine.status
            if status.tokens_by_lag:
                made = _bins(status.tokens_by_lag)
                self._count(status.model, status.engine.engine_id, status.engine.incarnation, made)
        self.show(view)

    def show(self, view: View) -> None:
        """Write the sums into a view that is nobody's next one."""
        for model, bins in sorted(self._sums.items()):
            view.token_lags.add(model=model, tokens_by_lag=bins)

    def _count(self, model: str, engine_id: str, incarnation: str, made: list[int]) -> None:
        life, before = self._last.pop(engine_id, (incarnation, [0] * LAG_BINS))
        before = before if life == incarnation else [0] * LAG_BINS
        sums = self._sums.setdefault(model, [0] * LAG_BINS)
        for i in range(LAG_BINS):
            sums[i] += max(0, made[i] - before[i])
        self._last[engine_id] = (incarnation, [max(*pair) for pair in zip(made, before, strict=True)])
        if len(self._last) > MAX_ENGINES:
            self._last.popitem(last=False)


def _bins(counts: Iterable[int]) -> list[int]:
    """As many as are counted here; what an engine tells of greater lags is among the last."""
    values = list(counts)
    head = values[: LAG_BINS - 1] + [0] * (LAG_BINS - 1 - len(values))
    return [*head, sum(values[LAG_BINS - 1 :])]
