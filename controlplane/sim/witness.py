"""Watches a simulated world from outside and raises `Violation` at the first step that breaks the contract.

It knows the truth (which bytes each version is, what each engine really holds, what is on which disk, which
reports were delivered) and compares what is claimed with it. Nothing in the cores is asked whether it is right.
"""

from __future__ import annotations

from controlplane.sim.witness_base import Violation
from controlplane.sim.witness_engines import EngineWitness
from controlplane.sim.witness_fleet import FleetWitness

__all__ = ["Violation", "Witness"]


class Witness(EngineWitness, FleetWitness):
    """The contract, seen from outside: of engines, and of the coordinator."""
