"""What a trainer agent knows of its trainer, as metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainer_agent.agent.rankset import RankSet

FAMILIES = {
    "trainer_agent_ranks": "Ranks of this trainer that are connected.",
    "trainer_agent_term": "The term of its lease; 0: it holds none.",
    "trainer_agent_holds_devices": "1 while engines on its devices sleep for it.",
}
"""Name, less its prefix: what it means."""


class Trainer(Protocol):
    """Whoever has the ranks."""

    @property
    def ranks(self) -> RankSet | None:
        """The present life of the set of ranks."""


class TrainerMetrics(Collector):
    """Of the present set of ranks; nothing while there is none."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def collect(self) -> Iterable[Metric]:
        ranks = self._trainer.ranks
        values = {
            "trainer_agent_ranks": 0 if ranks is None else len(ranks.members),
            "trainer_agent_term": 0 if ranks is None else ranks.term,
            "trainer_agent_holds_devices": ranks is not None and ranks.holds_devices,
        }
        for name, text in FAMILIES.items():
            yield GaugeMetricFamily(f"weightplane_{name}", text, value=float(values[name]))

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(f"weightplane_{name}", text) for name, text in FAMILIES.items()]
