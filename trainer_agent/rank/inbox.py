"""What the agent says to a rank during one push: its end, and whose bytes have been read.

Promises: the end of the push is noticed in every wait; what belongs to an earlier push is dropped.
"""

from __future__ import annotations

from trainer_agent.rank.link import Patience, RankLink
from weightplane.local.v1 import rank_pb2

ANSWERS = ("push_plan", "push_result", "chunk_released")


class PushEnded(Exception):
    """The agent ended the push while this rank still worked on it."""

    def __init__(self, result: rank_pb2.PushResult) -> None:
        super().__init__(result.error_message)
        self.result = result


class Inbox:
    """The agent's messages of one push."""

    def __init__(self, link: RankLink, sequence: int, patience: Patience) -> None:
        self._link = link
        self._sequence = sequence
        self._patience = patience
        self.released = -1
        """Every chunk up to this one was read by the agent."""

    def check(self) -> None:
        """Take what is here. Raises PushEnded if the agent has ended this push."""
        while (message := self._link.poll()) is not None:
            self._take(message, None)

    def answer(self, kind: str, waited_for: str) -> rank_pb2.RankResponse:
        """The next message of `kind`.

        Raises:
            PushEnded: it is the result, and something else was asked for. DeadlineExceeded.
        """
        while True:
            message = self._link.receive(self._patience, "push", waited_for)
            if self._take(message, kind) == kind:
                return message

    def wait_released(self, index: int) -> None:
        """Return when the agent has read chunk `index` (INV-12). Raises PushEnded, DeadlineExceeded."""
        while self.released < index:
            self.answer("chunk_released", f"the agent to have read chunk {index}")

    def _take(self, message: rank_pb2.RankResponse, kind: str | None) -> str:
        """What it is, if it belongs to this push. Raises PushEnded, unless the result is what was asked for."""
        got = str(message.WhichOneof("message"))
        if got not in ANSWERS or getattr(message, got).sequence != self._sequence:
            return ""
        if got == "chunk_released":
            self.released = max(self.released, message.chunk_released.index)
        if got == "push_result" and kind != got:
            raise PushEnded(message.push_result)
        return got
