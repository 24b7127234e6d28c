"""What generation says of a sample, between messages and the core's types: its spans, and how it ended. No gRPC."""

from __future__ import annotations

from controlplane.core.sample_spans import VERSION_CHANGED, Span
from controlplane.rpc.codec import version_from_proto, version_to_proto
from weightplane.v1 import rollout_pb2

_REASONS = {
    rollout_pb2.FINISH_REASON_STOP: "stop",
    rollout_pb2.FINISH_REASON_LENGTH: "length",
    rollout_pb2.FINISH_REASON_ABORT: "abort",
    rollout_pb2.FINISH_REASON_VERSION_CHANGED: VERSION_CHANGED,
}
_VALUES = {word: value for value, word in _REASONS.items()}


def finish_reason_to_proto(word: str) -> rollout_pb2.FinishReason.ValueType:
    """A word that is not known is an abort."""
    return _VALUES.get(word, rollout_pb2.FINISH_REASON_ABORT)


def finish_reason_from_proto(value: rollout_pb2.FinishReason.ValueType) -> str:
    """As vLLM names them; a value that is not known is an abort."""
    return _REASONS.get(value, "abort")


def span_to_proto(span: Span) -> rollout_pb2.VersionSpan:
    return rollout_pb2.VersionSpan(version=version_to_proto(span.version), start=span.start, end=span.end)


def span_from_proto(message: rollout_pb2.VersionSpan) -> Span:
    return Span(version_from_proto(message.version), message.start, message.end)
