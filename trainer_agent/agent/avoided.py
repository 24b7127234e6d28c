"""Ways that did not work, as long as this trainer agent lives: the coordinator plans others.

Promises: a way that cannot work (the engine does not reach the sender, or gets other bytes) is given up at once; one
that broke, or where somebody did not come, at the second time in a row, since the first may have been an accident. What
is noted ends with the engine's incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from controlplane.core.errors import IpcNotPossible, LinkFailed
from controlplane.core.plan import Transport
from controlplane.rpc.metrics import transport_label
from controlplane.rpc.plan_codec import TRANSPORTS
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

HOPELESS = frozenset({"connect", "probe"})
"""Stages of a link that fail again wherever they failed once."""
STRIKES = 2
MAX_CAUSE_LENGTH = 1024
Key = tuple[str, weight_update_pb2.Transport.ValueType]


class Avoided:
    """Notes failures, by engine and transport."""

    def __init__(self) -> None:
        self._noted: dict[Key, fleet_pb2.AvoidedTransport] = {}
        self._strikes: dict[Key, set[str]] = {}
        """The updates in which it broke."""

    def note(self, error: LinkFailed | IpcNotPossible, update_id: str, plan: Iterable[fleet_pb2.Assignment]) -> None:
        """Something failed in an update with this plan; both ends may say so."""
        transport, hopeless = Transport.CUDA_IPC, True
        if isinstance(error, LinkFailed):
            transport, hopeless = Transport(error.transport), error.stage in HOPELESS
        value = TRANSPORTS[transport]
        for engine_id in error.engine_id.split(", "):
            key = (engine_id, value)
            strikes = self._strikes.setdefault(key, set())
            strikes.add(update_id)
            engine = next((a.engine for a in plan if a.engine.engine_id == engine_id), None)
            if engine is not None and (hopeless or len(strikes) >= STRIKES):
                self._avoid(key, engine, str(error))

    def worked(self, plan: Iterable[fleet_pb2.Assignment]) -> None:
        """An update by this plan was committed: what broke before was an accident."""
        for a in plan:
            self._strikes.pop((a.engine.engine_id, a.transport), None)

    def entries(self) -> list[fleet_pb2.AvoidedTransport]:
        """For BeginUpdate."""
        return list(self._noted.values())

    def lives(self, engines: Iterable[version_pb2.EngineRef]) -> None:
        """Engines as they are planned now: what is known of earlier incarnations is over."""
        for engine in engines:
            for key, noted in list(self._noted.items()):
                if noted.engine.engine_id == engine.engine_id and noted.engine.incarnation != engine.incarnation:
                    del self._noted[key]
                    self._strikes.pop(key, None)

    def _avoid(self, key: Key, engine: version_pb2.EngineRef, cause: str) -> None:
        log.warning("transport_avoided", engine_id=engine.engine_id, transport=transport_label(key[1]), cause=cause)
        self._noted[key] = fleet_pb2.AvoidedTransport(engine=engine, transport=key[1], cause=cause[:MAX_CAUSE_LENGTH])
