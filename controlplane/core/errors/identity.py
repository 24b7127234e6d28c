"""Who is meant, and is not there."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class WrongRun(Refused):
    reason = "WRONG_RUN"
    template = "this is run {expected}, the call is for run {got}"
    expected: str
    got: str


@dataclass(eq=False)
class WrongModel(Refused):
    reason = "WRONG_MODEL"
    template = "this engine serves model {expected}, the call is for {got}"
    expected: str
    got: str


@dataclass(eq=False)
class WrongIncarnation(Refused):
    reason = "WRONG_INCARNATION"
    template = "{engine_id} lives as incarnation {expected}, the call is for {got}"
    engine_id: str
    expected: str
    got: str


@dataclass(eq=False)
class UnknownEngine(Refused):
    reason = "UNKNOWN_ENGINE"
    template = "no such engine here: {engine_id}"
    engine_id: str


@dataclass(eq=False)
class UnknownUpdate(Refused):
    reason = "UNKNOWN_UPDATE"
    template = "no update {update_id} is known here"
    update_id: str


@dataclass(eq=False)
class IncompatibleNode(Refused):
    """A hello that names a protocol or settings that cannot work together with this coordinator."""

    reason = "INCOMPATIBLE_NODE"
    template = "{what}: expected {expected}, got {got}"
    what: str
    expected: str
    got: str
