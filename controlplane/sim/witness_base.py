"""What both halves of the witness share: the truth about contents, and how a violation is raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from controlplane.core.errors import WeightplaneError
from controlplane.core.fleet import FleetCore
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.versions import ModelName, WeightVersion
from controlplane.sim.coverage import Coverage
from controlplane.sim.disks import LedgerDisk
from controlplane.sim.kernel import Kernel
from controlplane.sim.life import AgentProcess
from controlplane.sim.settings import digest_of


class Violation(AssertionError):
    """The contract was broken. Not one of the system's errors: nobody may handle it."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Watched(Protocol):
    """What the witness looks at of a coordinator."""

    @property
    def core(self) -> FleetCore: ...
    @property
    def ledger(self) -> LedgerDisk: ...
    @property
    def sessions(self) -> Mapping[int, object]: ...
    @property
    def life(self) -> int: ...


class Truth:
    """Which bytes each version of each model is."""

    disk: LedgerDisk
    """The coordinator's, from its first life on."""

    def __init__(self, kernel: Kernel, coverage: Coverage, lease_ttl: float, policy: UpdatePolicy) -> None:
        self.coverage = coverage
        self.truth: dict[tuple[ModelName, WeightVersion], bytes] = {}
        self.ledger_restored = False
        """An older copy of the ledger was put back, and nobody accepted it yet."""
        self._owners: dict[WeightVersion, ModelName] = {}
        self._agents: list[AgentProcess] = []
        self._kernel = kernel
        self._ttl = lease_ttl
        self._policy = policy

    def check(self, good: bool, invariant: str, text: object) -> None:
        if not good:
            raise Violation(invariant, f"at {self._kernel.now:.3f} s: {text}")

    def refused(self, error: WeightplaneError) -> None:
        self.coverage.reasons[error.reason] += 1

    def met(self, agent: AgentProcess) -> None:
        """It is one of the world's."""
        self._agents.append(agent)

    def loaded(self, model: ModelName, digest: bytes) -> bool:
        """Whether some engine of a frozen model really loaded that."""
        return any(
            a.spec.name == model and a.content is not None and digest_of(a.content) == digest for a in self._agents
        )

    def wrote(self, model: ModelName, version: WeightVersion, digest: bytes) -> None:
        """Somebody is about to send these bytes as this version."""
        known = self.truth.setdefault((model, version), digest)
        self.check(known == digest, "INV-6", f"{version} of {model} would be two contents")
        owner = self._owners.setdefault(version, model)
        self.check(owner == model, "versions", f"{version} of {model} is one of {owner} too")
