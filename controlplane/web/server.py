"""The page's HTTP server: static files, the fleet as JSON, and the fleet at each change as Server-Sent Events.

Promises: nothing here can change anything (GET and HEAD only); bounded watchers, each of whom gets the newest state and
none of those that passed meanwhile; a state is made once for all of them, in a thread, and only while somebody watches.
What tells of the fleet asks who wants to know, where the coordinator's own port does; the page's files tell nothing,
and are everybody's. Where nobody is asked it is served on loopback, or with `insecure`; on loopback it then answers to
no name that is not this host's: a browser's other pages could ask for it so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from controlplane.core.errors import WeightplaneError
from controlplane.rpc.addresses import is_loopback, split_address
from controlplane.rpc.latest import Latest
from controlplane.rpc.metrics import REFUSALS
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security import PLAIN, HttpGuard
from controlplane.rpc.security.http import BEARER_HEADER, status_of
from controlplane.rpc.tasks import to_the_end
from controlplane.web.state import PageState
from weightplane.v1 import operator_pb2

MAX_WATCHERS = 32
"""Open pages; one more is told to come again."""
PAUSE_SECONDS = 0.5
"""Between two states of one watcher: people see no faster."""
SHARE = 0.1
"""Of the time at most, is spent on making states: those of a very large fleet come less often."""
SHUTDOWN_SECONDS = 1.0
MAX_REQUEST_BYTES = 1024
"""Nobody has anything to send."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
ASKED = "/api/"
"""Paths that tell of the fleet."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

Fleet = Latest[operator_pb2.FleetView]


UNASKED = HttpGuard(PLAIN)
"""Of a page on loopback, for everybody on this host."""


@asynccontextmanager
async def serve_page(listen: str, fleet: Fleet, guard: HttpGuard = UNASKED) -> AsyncIterator[str]:
    """Serve while inside. Gives the page's address. With an empty `listen` there is no page, and no address.

    Raises:
        PortUnavailable: with the address.
    """
    if not listen:
        yield ""
        return
    host, port = split_address(listen)
    middlewares = [_under_own_names(any_name=guard.asks or not is_loopback(host)), _asking(guard)]
    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=middlewares)
    page = Page(fleet)
    app.router.add_get("/", page.index)
    app.router.add_get("/assets/{name}", page.asset)
    app.router.add_get("/api/fleet", page.now)
    app.router.add_get("/api/watch", page.watch)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=guard.context())
        try:
            await site.start()
        except OSError as error:
            raise PortUnavailable(f"cannot serve the page on {listen}: {error.strerror or error}") from error
        bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # the library does not tell
        yield f"{guard.scheme}://{f'[{host}]' if ':' in host else host}:{bound}/"
    finally:
        await page.close()
        await runner.cleanup()


def _under_own_names(*, any_name: bool) -> Middleware:
    @web.middleware
    async def names(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if not any_name and name not in LOCAL_NAMES:
            raise web.HTTPMisdirectedRequest(text="this page answers under the names of its own host only\n")
        return await handler(request)

    return names


def _asking(guard: HttpGuard) -> Middleware:
    @web.middleware
    async def asking(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(ASKED):
            try:
                peer = request.get_extra_info("peercert")
                guard.admit(f"page {request.path}", request.headers.getall("Authorization", []), peer)
            except WeightplaneError as error:
                return _refused(error)
        return await handler(request)

    return asking


def _refused(error: WeightplaneError) -> web.Response:
    """With the reason in a header: the page asks for a token where one is wanted."""
    REFUSALS.labels("page", error.reason).inc()
    headers = HEADERS | {"X-Weightplane-Reason": error.reason} | dict([BEARER_HEADER])
    return web.Response(status=status_of(error) or 500, text=f"{error}\n", headers=headers)


class Page:
    """What each path answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._state = PageState()
        self._made: tuple[operator_pb2.FleetView, str] | None = None
        """The latest view that was turned into JSON, and that."""
        self._cost_seconds = 0.0
        """What making that took."""
        self._making = asyncio.Lock()
        self._watchers = 0
        self._closed = asyncio.Event()
        self._assets = {file.name: file.read_bytes() for file in (files("controlplane.web") / "assets").iterdir()}

    async def close(self) -> None:
        """End every watcher's stream; their pages come again by themselves."""
        self._closed.set()

    async def index(self, request: web.Request) -> web.Response:
        return self._file("index.html")

    async def asset(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        kind = TYPES.get(f".{name.rpartition('.')[2]}")
        if name not in self._assets or kind is None:
            raise web.HTTPNotFound(text="there is no such page\n")
        return web.Response(body=self._assets[name], content_type=kind, charset="utf-8", headers=HEADERS)

    async def now(self, request: web.Request) -> web.Response:
        text = await self._json(self._fleet.value)
        return web.Response(text=text, content_type="application/json", headers=HEADERS)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """The fleet now and at each change. Each event is a whole state."""
        if self._watchers >= MAX_WATCHERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n", headers={"Retry-After": "10"})
        self._watchers += 1
        try:
            response = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            with suppress(ConnectionError):
                await self._send_all(response)
            return response
        finally:
            self._watchers -= 1

    async def _send_all(self, response: web.StreamResponse) -> None:
        closed = asyncio.ensure_future(self._closed.wait())
        views = aiter(self._fleet.watch())
        following: asyncio.Future[operator_pb2.FleetView] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(views))
                await asyncio.wait({following, closed}, return_when=asyncio.FIRST_COMPLETED)
                if closed.done():
                    return
                await response.write(f"data: {await self._json(following.result())}\n\n".encode())
                await asyncio.wait({closed}, timeout=max(PAUSE_SECONDS, self._cost_seconds / SHARE))
        finally:
            closed.cancel()
            if following is not None:
                following.cancel()

    async def _json(self, view: operator_pb2.FleetView) -> str:
        """In a thread: the coordinator goes on deciding meanwhile."""
        async with self._making:
            if self._made is None or self._made[0] is not view:
                began = time.monotonic()
                made = await to_the_end(asyncio.to_thread(self._state.render, view))
                self._made, self._cost_seconds = (view, made), time.monotonic() - began
            return self._made[1]
