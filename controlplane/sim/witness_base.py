"""What both halves of the witness share: the truth about contents, and how a violation is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core.errors import WeightplaneError
from controlplane.core.versions import ModelName, WeightVersion
from controlplane.sim.coverage import Coverage
from controlplane.sim.kernel import Kernel
from controlplane.sim.settings import digest_of

if TYPE_CHECKING:
    from controlplane.sim.agent import Agent


class Violation(AssertionError):
    """The contract was broken. Not one of the system's errors: nobody may handle it."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Truth:
    """Which bytes each version of each model is."""

    def __init__(self, kernel: Kernel, coverage: Coverage, lease_ttl: float) -> None:
        self.coverage = coverage
        self.truth: dict[tuple[ModelName, WeightVersion], bytes] = {}
        self.ledger_restored = False
        """An older copy of the ledger was put back, and nobody accepted it yet."""
        self._owners: dict[WeightVersion, ModelName] = {}
        self._frozen: list[Agent] = []
        self._kernel = kernel
        self._ttl = lease_ttl

    def check(self, good: bool, invariant: str, text: object) -> None:
        if not good:
            raise Violation(invariant, f"at {self._kernel.now:.3f} s: {text}")

    def refused(self, error: WeightplaneError) -> None:
        self.coverage.reasons[error.reason] += 1

    def met(self, agent: Agent) -> None:
        """An engine of a frozen model: the first that says what it loaded says what the model is."""
        if agent.content is not None:
            self._frozen.append(agent)

    def loaded(self, model: ModelName, digest: bytes) -> bool:
        """Whether some engine of a frozen model really loaded that."""
        return any(
            a.spec.name == model and a.content is not None and digest_of(a.content) == digest for a in self._frozen
        )

    def wrote(self, model: ModelName, version: WeightVersion, digest: bytes) -> None:
        """Somebody is about to send these bytes as this version."""
        known = self.truth.setdefault((model, version), digest)
        self.check(known == digest, "INV-6", f"{version} of {model} would be two contents")
        owner = self._owners.setdefault(version, model)
        self.check(owner == model, "versions", f"{version} of {model} is one of {owner} too")
