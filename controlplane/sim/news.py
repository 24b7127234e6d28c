"""What the coordinator tells a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.fleet_book import Doubt
from controlplane.core.versions import EngineId, ModelName, Term, WeightVersion


@dataclass(frozen=True, slots=True)
class ModelNews:
    name: ModelName
    term: Term
    served: tuple[WeightVersion, ...]


@dataclass(frozen=True, slots=True)
class FleetNews:
    """What a session is told."""

    coordinator_term: Term
    models: tuple[ModelNews, ...]
    doubts: Mapping[EngineId, Doubt]

    def model(self, name: ModelName) -> ModelNews | None:
        return next((m for m in self.models if m.name == name), None)
