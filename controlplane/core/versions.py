"""Names and numbers that identify things: one type for each, so that a swapped argument fails the type checker.

Nothing here does I/O. A `WeightVersion` is the only thing in the system that may say which weights
an engine holds; *unset* is `None`, never a special number (V11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RunId = NewType("RunId", str)
"""One training run. Every call names it, so that two runs on one network never mix (WRONG_RUN)."""
ModelName = NewType("ModelName", str)
"""A named set of weights in a run, such as "policy"."""
EngineId = NewType("EngineId", str)
Incarnation = NewType("Incarnation", str)
"""One life of the process that holds an engine's weights. A restart is a new incarnation, unset."""
TrainerId = NewType("TrainerId", str)
UpdateId = NewType("UpdateId", str)
"""One attempt to bring one version to the engines."""
DeviceUuid = NewType("DeviceUuid", str)
Term = NewType("Term", int)
"""Fencing token: number of the trainer's lease on a model, or of the coordinator's life. Only grows."""
Rank = NewType("Rank", int)


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """What a model's weights are: the term of the writer and the coordinator's number.

    The number is given by the coordinator, one counter per run, durable, only growing; it is
    compared alone, because two terms never share a number. `term` rides along for fencing.
    """

    number: int
    term: Term

    def __post_init__(self) -> None:
        if self.number < 0 or self.term < 0:
            raise ValueError(f"a version's term and number are not negative: {self.term}, {self.number}")

    @property
    def label(self) -> str:
        """The decimal number, where one word is wanted (vLLM's label, headers, samples)."""
        return str(self.number)

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


NO_TERM = Term(0)
"""Below every term: none was given or seen."""


@dataclass(frozen=True, slots=True, order=True)
class DeviceTurn:
    """A trainer's place among all takings and givings of devices: its lease's term, and which of its own this is.

    Ordered: whatever reaches an engine after a later one is of no account any more.
    """

    term: Term
    number: int


NO_TURN = DeviceTurn(NO_TERM, 0)
"""Below every turn."""
FROZEN = WeightVersion(0, NO_TERM)
"""The version of a model that is served as it was loaded: no writer made it, and no number comes before it."""
