"""Where a push's time goes on this rank: measured while the agent makes spans, and told to it at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from controlplane.core.errors import WeightplaneError
from weightplane.local.v1 import rank_pb2


class Times:
    """Of one push."""

    def __init__(self, plan: rank_pb2.PushPlan) -> None:
        self.on = bool(plan.traced)
        self.byte_count = 0
        self._update_id = plan.update_id
        self._began = time.time_ns()
        self._stretches: list[rank_pb2.PushStretch] = []
        self._source_seconds = 0.0

    @contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        """The block is one."""
        start = time.time_ns()
        try:
            yield
        finally:
            if self.on:
                self._stretches.append(_stretch(name, start))

    def source(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; how long they took to come is counted."""
        return self._counted(tensors) if self.on else tensors

    def _counted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            asked = time.monotonic()
            tensor = next(tensors, None)
            self._source_seconds += time.monotonic() - asked
            if tensor is None:
                return
            yield tensor

    def told(self, error: Exception | None) -> rank_pb2.PushTimes:
        """It is over."""
        reason = error.reason if isinstance(error, WeightplaneError) else type(error).__name__ if error else ""
        return rank_pb2.PushTimes(
            update_id=self._update_id,
            whole=_stretch("", self._began),
            stretches=self._stretches,
            byte_count=self.byte_count,
            source_seconds=self._source_seconds,
            error_reason=reason,
        )


def _stretch(name: str, start: int) -> rank_pb2.PushStretch:
    return rank_pb2.PushStretch(name=name, start_unix_nanos=start, end_unix_nanos=time.time_ns())
