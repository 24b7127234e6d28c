"""The agent's end of a rank's socket, by hand."""

from __future__ import annotations

import socket
from pathlib import Path

from controlplane.core.errors import StaleTerm
from trainer_agent import wire
from trainer_agent.rank.link import Patience, RankLink
from weightplane.local.v1 import rank_pb2


class Agent:
    """The other end, by hand."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.link = RankLink(path, Patience(5))
        self.connection, _ = self._listener.accept()

    def say(self, **message: object) -> None:
        self.connection.sendall(wire.encode(rank_pb2.RankResponse(**message)))  # type: ignore[arg-type]

    def close(self) -> None:
        self.link.close()
        self.connection.close()
        self._listener.close()


def fence() -> rank_pb2.SessionError:
    error = StaleTerm(model="policy", got=1, current=2)
    return rank_pb2.SessionError(reason=error.reason, message=str(error), fenced=True, metadata=error.metadata())
