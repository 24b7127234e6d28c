"""What those are told who watch an update or the routes: the newest state of each, set when it changes.

Called by the hub, between two events (INV-9). A phase, and the first engine that takes requests under a version, are
told at once; all else waits for `publish`, together with what came close to it.
"""

from __future__ import annotations

from controlplane.coordinator import views
from controlplane.core.fleet import FleetCore
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, UpdateId, WeightVersion
from controlplane.rpc.codec import version_from_proto
from controlplane.rpc.latest import Latest
from weightplane.v1 import fleet_pb2


class Topics:
    """One for each update that the core remembers, and for each way in which somebody asked for routes."""

    def __init__(self, core: FleetCore, clock_shift: float) -> None:
        self._core = core
        self._clock_shift = clock_shift
        self._updates: dict[UpdateId, Latest[fleet_pb2.UpdateState]] = {}
        self._moved: set[UpdateId] = set()
        """Updates of which an engine reported something that is not shown yet."""
        self._routes: dict[tuple[ModelName, bool], Latest[fleet_pb2.WatchRoutesResponse]] = {}
        """By model, and whether engines that stay at a version are among them."""
        self._routed: dict[tuple[ModelName, bool], frozenset[WeightVersion]] = {}
        """Versions under which clients were told of an engine."""
        for update in core.updates.values():
            self._publish_update(update)

    def update(self, update_id: UpdateId) -> Latest[fleet_pb2.UpdateState] | None:
        return self._updates.get(update_id)

    def routes(self, model: ModelName, *, kept: bool) -> Latest[fleet_pb2.WatchRoutesResponse]:
        if (model, kept) not in self._routes:
            self._routes[model, kept] = Latest(views.routes(self._core, model, 0, kept=kept))
            self._publish_routes(model, kept=kept)
        return self._routes[model, kept]

    def update_changed(self, update: UpdateTransaction) -> None:
        """A phase is told at once, for it permits commit frames or ends the update; what one engine of many reported
        comes with the next `publish`: a state names all engines, and one for each report of each is the fleet's
        square."""
        topic = self._updates.get(update.update_id)
        if topic is None or topic.value.phase != views.PHASES[update.phase]:
            self._publish_update(update)
        else:
            self._moved.add(update.update_id)

    def gate_opened(self, session: int) -> None:
        """Told once for each version: of a large fleet the other engines come together."""
        record = self._core.of_session(session)
        if record is None or not self._core.routable(record):
            return
        stays = self._core.kept_at(record) is not None
        for (model, kept), versions in self._routed.items():
            if model == record.state.model and record.state.applied not in versions and (kept or not stays):
                self._publish_routes(model, kept=kept)

    def publish(self) -> None:
        """Everything that changed."""
        for update_id in self._moved & self._core.updates.keys():
            self._publish_update(self._core.updates[update_id])
        self._moved.clear()
        for model, kept in self._routes:
            self._publish_routes(model, kept=kept)

    def _publish_routes(self, model: ModelName, *, kept: bool) -> None:
        topic = self._routes[model, kept]
        new = views.routes(self._core, model, topic.value.revision + 1, kept=kept)
        if list(new.routes) != list(topic.value.routes) or list(new.served) != list(topic.value.served):
            topic.set(new)
        self._routed[model, kept] = frozenset(version_from_proto(r.applied) for r in new.routes)

    def _publish_update(self, update: UpdateTransaction) -> None:
        state = views.update_state(update, self._clock_shift)
        topic = self._updates.get(update.update_id)
        if topic is None:
            self._updates[update.update_id] = Latest(state)
        elif topic.value != state:
            topic.set(state)
        for gone in self._updates.keys() - self._core.updates.keys():
            del self._updates[gone]
