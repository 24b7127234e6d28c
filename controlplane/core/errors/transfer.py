"""Frames and bytes that are not what they should be, and devices that do not match."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class FrameInvalid(Refused):
    """A message broke a rule that its proto declares."""

    reason = "INVALID_MESSAGE"
    template = "{message}.{field}: {problem}"
    message: str
    field: str
    problem: str


@dataclass(eq=False)
class FrameOutOfOrder(Refused):
    reason = "FRAME_OUT_OF_ORDER"
    template = "expected {expected}, got {got}"
    expected: str
    got: str


@dataclass(eq=False)
class LimitExceeded(Refused):
    reason = "LIMIT_EXCEEDED"
    template = "{what}: the limit is {limit}, asked for {got}"
    what: str
    limit: int
    got: int


@dataclass(eq=False)
class ChecksumMismatch(Refused):
    reason = "CHECKSUM_MISMATCH"
    template = "{name}: the bytes received have checksum {got}, the sender stated {expected}"
    name: str
    expected: str
    got: str


@dataclass(eq=False)
class ByteCountMismatch(Refused):
    reason = "BYTE_COUNT_MISMATCH"
    template = "{what}: expected {expected}, got {got}"
    what: str
    expected: int
    got: int


@dataclass(eq=False)
class SegmentUnreadable(Refused):
    reason = "SEGMENT_UNREADABLE"
    template = "shared-memory segment {segment} cannot be read here: {cause}"
    segment: str
    cause: str


@dataclass(eq=False)
class CheckpointUnreadable(Refused):
    reason = "CHECKPOINT_UNREADABLE"
    template = "checkpoint {name} cannot be read here: {cause}"
    name: str
    cause: str


@dataclass(eq=False)
class CheckpointUnknown(Refused):
    reason = "CHECKPOINT_UNKNOWN"
    template = "no checkpoint of number {number} of model {model} is known here"
    model: str
    number: int


@dataclass(eq=False)
class CheckpointInUse(Refused):
    reason = "CHECKPOINT_IN_USE"
    template = "the checkpoint of number {number} of model {model} stays: {engines} stay at that version"
    model: str
    number: int
    engines: list[str]


@dataclass(eq=False)
class SlotMismatch(Refused):
    reason = "SLOT_MISMATCH"
    template = "the ranks of engine {engine_id}'s slot disagree on {what}: {ranks}"
    engine_id: str
    what: str
    ranks: str


@dataclass(eq=False)
class EngineMisfit(Refused):
    """Some of an engine's devices belong to trainer ranks, but not all: no slot can feed it."""

    reason = "ENGINE_MISFIT"
    template = "{engine_id}: {held} of its {total} devices are held by trainer ranks; missing: {missing}"
    engine_id: str
    held: int
    total: int
    missing: list[str]


@dataclass(eq=False)
class DeviceHandlesMissing(Refused):
    reason = "DEVICE_HANDLES_MISSING"
    template = "no buffer for these devices of {engine_id}: {missing}"
    engine_id: str
    missing: list[str]
