"""A rank's words with its agent about devices that it shares with engines. Collective, as a push is."""

from __future__ import annotations

from controlplane.core.errors import InvalidRequest
from trainer_agent import wire
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.pushes import ANSWER_GRACE_SECONDS
from weightplane.local.v1 import rank_pb2

LEVELS = (1, 2)
"""Of sleep: weights are kept aside in host memory, or dropped."""


class SharedDevices:
    """Not for use by several threads."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._sequence = 0
        self.held = False
        """Engines on the ranks' devices sleep for this trainer."""

    def take(self, level: int, patience: Patience) -> None:
        """Raises InvalidRequest, SlotMismatch, DeadlineExceeded, and what engines refuse with."""
        if level not in LEVELS:
            raise InvalidRequest(field="level", problem=f"1 (weights are kept aside) or 2 (dropped), not {level!r}")
        self.held = True  # also where it fails: some engines may sleep by then
        self._ask(rank_pb2.DevicesAsked(take=True, level=level), "take_devices", patience)

    def give(self, patience: Patience) -> dict[str, str]:
        """The engines that woke poisoned, with the cause. Raises SlotMismatch, DeadlineExceeded."""
        done = self._ask(rank_pb2.DevicesAsked(take=False), "give_devices", patience)
        self.held = False
        return dict(done.poisoned)

    def _ask(self, asked: rank_pb2.DevicesAsked, phase: str, patience: Patience) -> rank_pb2.DevicesDone:
        self._sequence += 1
        asked.sequence = self._sequence
        asked.timeout_seconds = max(patience.left - ANSWER_GRACE_SECONDS, 0.0)
        self._link.send(rank_pb2.RankRequest(devices=asked), patience)
        while True:
            message = self._link.receive(patience, phase, "every rank, and engines on their devices")
            if message.HasField("devices_done") and message.devices_done.sequence == self._sequence:
                break
        done = message.devices_done
        if done.error_reason:
            raise wire.typed_error(done.error_reason, done.error_metadata, done.error_message)
        return done
