"""The local protocol between ranks and their trainer agent: frames of `weightplane.local.v1`, and errors in them.

Each message is preceded by its length. No gRPC: both the rank and the agent use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from controlplane.core.errors import Failed, LimitExceeded, WeightplaneError, rebuild

HEADER_BYTES = 4
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Layout parts are 1 MiB and a chunk has at most 4,096 records; anything larger is no message of ours."""
RANK_SOCKET_VARIABLE = "WEIGHTPLANE_RANK_SOCKET"
COORDINATOR_VARIABLE = "WEIGHTPLANE_COORDINATOR"
RUN_ID_VARIABLE = "WEIGHTPLANE_RUN_ID"
RESTART_COUNT_VARIABLE = "WEIGHTPLANE_RESTART_COUNT"


@dataclass(eq=False)
class AgentError(Failed):
    """An error that reached the trainer agent and is none of the tree's, such as a broken connection."""

    reason = "REMOTE"
    template = "{code}: {text}"
    code: str
    text: str


def encode(message: Message) -> bytes:
    """A frame.

    Raises:
        LimitExceeded: the message is too large for one.
    """
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise LimitExceeded(what="bytes of a local frame", limit=MAX_FRAME_BYTES, got=len(body))
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Length of the message after `header`.

    Raises:
        LimitExceeded: no peer of ours sends that much.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise LimitExceeded(what="bytes of a local frame", limit=MAX_FRAME_BYTES, got=length)
    return length


def typed_error(reason: str, metadata: Mapping[str, str], text: str) -> WeightplaneError:
    """The error of the tree that `reason` names, with its attributes; AgentError for any other."""
    unknown = AgentError(code=metadata.get("code", reason), text=metadata.get("text", text))
    return rebuild(reason, metadata) or unknown
