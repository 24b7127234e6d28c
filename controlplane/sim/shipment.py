"""What one push of a simulated trainer brings."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.layout import Layout
from controlplane.core.pauses import PausePolicy
from controlplane.sim.coordinator import Begun


@dataclass(frozen=True, slots=True)
class Shipment:
    """A version with its data, to every engine of its plan."""

    begun: Begun
    layout: Layout
    content: int
    """The weights."""
    pause: PausePolicy | None
    """What becomes of the requests in the engines."""
