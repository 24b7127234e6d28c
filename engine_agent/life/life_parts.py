"""What one life of an engine is made of, as its gate, its installs and its sleep have it in hand.

They are given this, and never the life: what they found out goes back as an event, or as what they return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_effects import Effect
from controlplane.core.engine_events import Event
from controlplane.core.engine_state import EngineState
from controlplane.rpc.latest import Latest
from engine_agent.engine import Engine
from engine_agent.life.requests import Requests
from engine_agent.life.tasks import LifeTasks


@dataclass(frozen=True, slots=True)
class LifeParts:
    """The same objects as long as the life lasts."""

    core: EngineCore
    """What is decided; read here, and changed by `apply` alone."""
    apply: Callable[[Event], list[Effect]]
    """As `EngineLife.apply`."""
    state: Latest[EngineState]
    """The core's, for those who wait for a change."""
    engine: Engine
    requests: Requests
    tasks: LifeTasks
    lock: asyncio.Lock
    """Whoever starts or stops the engine's scheduler has it."""
