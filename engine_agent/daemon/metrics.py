"""What an engine agent knows of its engine, as metrics: true also while nobody hears this agent (INV-10)."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from controlplane.core.engine_state import WeightsKind
from engine_agent.life.engine_life import EngineLifeHolder

FAMILIES = {
    "agent_applied_number": "Number of the version that this engine holds; -1 is unset.",
    "agent_gate_open": "1 while tokens may leave this engine.",
    "agent_poisoned": "1 while this engine's weights are a mixture.",
    "agent_incarnation": "Number of the engine's incarnation: it grows by one with each start.",
    "agent_live_requests": "Requests in this engine.",
    "agent_waiting_requests": "Requests that wait outside its gate.",
}
"""Name, less its prefix: what it means."""


class AgentMetrics(Collector):
    """Of the present life. Called from the thread that answers: states are whole, and never changed in place."""

    def __init__(self, holder: EngineLifeHolder) -> None:
        self._holder = holder

    def collect(self) -> Iterable[Metric]:
        life = self._holder.life
        state = life.core.state
        values = {
            "agent_applied_number": -1 if state.applied is None else state.applied.number,
            "agent_gate_open": life.core.gate_open,
            "agent_poisoned": state.weights_kind is WeightsKind.POISONED,
            "agent_incarnation": life.number,
            "agent_live_requests": state.live_requests,
            "agent_waiting_requests": life.counts.waiting,
        }
        for name, text in FAMILIES.items():
            yield GaugeMetricFamily(f"weightplane_{name}", text, value=float(values[name]))

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(f"weightplane_{name}", text) for name, text in FAMILIES.items()]
