"""The local protocol between ranks and their trainer agent: frames of `weightplane.local.v1`, and errors in them.

Each message is preceded by its length. No gRPC: both the rank and the agent use this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from controlplane.core.errors import Failed, LimitExceeded, WeightplaneError, error_classes

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
    of_the_tree = (c for c in error_classes() if c.__module__ == WeightplaneError.__module__)
    cls = next((c for c in of_the_tree if c.reason == reason), None)
    if cls is None:
        return AgentError(code=metadata.get("code", reason), text=metadata.get("text", text))
    fields = dataclasses.fields(cls)
    return cls(**{f.name: _parsed(str(f.type), metadata.get(f.name, "")) for f in fields})


def _parsed(kind: str, text: str) -> object:
    if kind == "int":
        return int(text or "0")
    if kind == "float":
        return float(text or "0")
    if kind == "bool":
        return text == "True"
    if kind.startswith("list"):
        return [t for t in text.split(", ") if t]
    if kind.startswith("tuple"):
        return tuple(int(t) for t in text.strip("()").split(",") if t.strip())
    return text
