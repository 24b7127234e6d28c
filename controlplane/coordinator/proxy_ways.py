"""Which engine a proxied call goes to: the rollout client's own choice, fed from the coordinator's record."""

from __future__ import annotations

import asyncio

from controlplane.coordinator.hub import Hub
from controlplane.core import errors as e
from controlplane.core.versions import ModelName
from controlplane.rollout.board import RouteBoard
from controlplane.rollout.choosing import Choosing, Search
from controlplane.rollout.connections import Connections
from controlplane.rollout.policies import BySession
from controlplane.rollout.routing import Route
from controlplane.rollout.wire import routes_from_proto
from controlplane.rpc.channels import SMALL_WINDOWS
from controlplane.rpc.security import PLAIN, TlsSettings


class ProxyWay:
    """The routable engines of one model, followed from the hub (INV-10), and the channels to them."""

    def __init__(self, hub: Hub, model: ModelName, tls: TlsSettings) -> None:
        self.connections = Connections(tls, SMALL_WINDOWS)
        self.board = RouteBoard(self.connections)
        self._hub = hub
        self._model = model
        self._choosing = Choosing(self.board, BySession(), "this coordinator")
        self._follower = asyncio.create_task(self._follow(), name=f"proxy-routes-{model}")

    async def next_route(self, search: Search) -> Route:
        """Raises the last engine's answer, VersionUnavailable, DeadlineExceeded; and, where no engine answered since a
        restart's reports are awaited, CoordinatorRecovering or LedgerRegressed."""
        try:
            chosen = await self._choosing.next_route(search)
        except (e.VersionUnavailable, e.DeadlineExceeded):
            if search.last_error is None:
                self._hub.core.check_recovered()
            raise
        assert chosen is not None, "a caller of the proxy that ends its request leaves"
        return chosen[0]

    async def close(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        await self.connections.close()

    async def _follow(self) -> None:
        async for routes in self._hub.watch_routes("", self._model, kept=True):
            self.board.take(routes_from_proto(routes))


class ProxyWays:
    """One for each model that was asked for."""

    def __init__(self, hub: Hub, tls: TlsSettings = PLAIN) -> None:
        self._hub = hub
        self._tls = tls
        self._ways: dict[ModelName, ProxyWay] = {}

    def of(self, run_id: str, model: str) -> ProxyWay:
        """Raises WrongRun, WrongModel: names that the fleet does not have cost nothing."""
        self._hub.check_run(run_id)
        core, name = self._hub.core, ModelName(model)
        known = core.models.keys() | {record.state.model for record in core.engines.values()}
        if name not in known:
            raise e.WrongModel(expected=", ".join(sorted(known)) or "none yet", got=model)
        if name not in self._ways:
            self._ways[name] = ProxyWay(self._hub, name, self._tls)
        return self._ways[name]

    async def close(self) -> None:
        for way in self._ways.values():
            await way.close()
