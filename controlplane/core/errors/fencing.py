"""Who may write or decide, and who may not now."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class StaleTerm(Refused):
    """The writer was fenced: a later term was given. It must end (exit code FENCED), never retry (INV-7)."""

    reason = "STALE_TERM"
    template = "term {got} of {model} is fenced: the present term is {current}"
    model: str
    got: int
    current: int


@dataclass(eq=False)
class StaleTurn(Refused):
    """A sleep or a wake that came too late: the same trainer went on to take or to give since. Nobody waits for it."""

    reason = "STALE_TURN"
    template = "turn {got} of {owner} with the devices of {engine_id} is over: turn {current} came after it"
    engine_id: str
    owner: str
    got: int
    current: int


@dataclass(eq=False)
class LeaseHeld(Refused):
    reason = "LEASE_HELD"
    template = (
        "trainer {holder} (incarnation {incarnation}) holds term {term} of {model} for {remaining_seconds} s more; "
        "wait, or start with --takeover"
    )
    model: str
    holder: str
    incarnation: str
    term: int
    remaining_seconds: float


@dataclass(eq=False)
class NotWelcomed(Refused):
    """INV-7: before the coordinator's welcome the agent does not know the terms, so it takes no update."""

    reason = "NOT_WELCOMED"
    template = "{engine_id} has not been welcomed by a coordinator yet"
    engine_id: str


@dataclass(eq=False)
class CoordinatorRecovering(Refused):
    reason = "COORDINATOR_RECOVERING"
    template = "the coordinator (term {term}) restarted and still waits for reports of: {engines}"
    term: int
    engines: list[str]


@dataclass(eq=False)
class LedgerRegressed(Refused):
    """Agents know numbers or terms that this ledger never gave: it is an older copy. A person must accept it."""

    reason = "LEDGER_REGRESSED"
    template = (
        "the ledger knows {what} {known}, and {who} has seen {seen}: it is an older copy; "
        "put the newer one back, or accept this one (weightplane ledger accept)"
    )
    what: str
    known: int
    seen: int
    who: str


@dataclass(eq=False)
class DevicesTaken(Refused):
    """Only who put an engine to sleep wakes it: its devices are in use."""

    reason = "DEVICES_TAKEN"
    template = "{engine_id} was put to sleep by {owner}, who holds its devices"
    engine_id: str
    owner: str
