"""The page's server: what it answers, to whom, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google.protobuf.json_format import MessageToDict

from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.rpc.latest import Latest
from controlplane.web import serve_page
from controlplane.web.server import MAX_WATCHERS
from controlplane.web.state import OUTCOMES_SHOWN, UPDATES_SHOWN, PageState
from tests.support import scripted_fleet
from tests.support.eventually import eventually
from weightplane.v1 import operator_pb2

LIMIT = aiohttp.ClientTimeout(total=20)
Fleet = Latest[operator_pb2.FleetView]


@asynccontextmanager
async def page(view: operator_pb2.FleetView | None = None) -> AsyncIterator[tuple[str, Fleet, aiohttp.ClientSession]]:
    """Its address, what it shows, and a client."""
    fleet: Fleet = Latest(view or operator_pb2.FleetView(run_id="run-a"))
    async with serve_page("127.0.0.1:0", fleet) as url, aiohttp.ClientSession(timeout=LIMIT) as client:
        yield url, fleet, client


async def next_state(response: aiohttp.ClientResponse) -> dict[str, Any]:
    while True:
        line = (await response.content.readuntil(b"\n")).decode().strip()
        if line.startswith("data: "):
            state: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return state


def run(run_id: str) -> operator_pb2.FleetView:
    return operator_pb2.FleetView(run_id=run_id)


async def test_the_fleet_is_told_in_the_words_of_the_contract() -> None:
    view = scripted_fleet.poisoned()
    async with page(view) as (url, _, client):
        got = await (await client.get(f"{url}api/fleet")).json()
    whole = MessageToDict(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for engine in whole["engines"]:
        engine["status"]["conditions"] = []
        engine["status"].pop("canary", None)
    assert got == whole | {"checkpoints": [], "updates": whole["updates"][:UPDATES_SHOWN]}


async def test_each_change_comes_without_asking_and_those_that_passed_are_left_out() -> None:
    async with page(run("a")) as (url, fleet, client), client.get(f"{url}api/watch") as watched:
        assert (await next_state(watched))["run_id"] == "a"
        for name in ("b", "c", "d"):
            fleet.set(run(name))
        assert (await next_state(watched))["run_id"] == "d"


async def test_nothing_can_be_changed_here() -> None:
    async with page() as (url, _, client):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("", "api/fleet", "api/watch", "assets/page.js"):
                assert (await client.request(method, url + path)).status == 405


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with page() as (url, _, client):
        response = await client.get(url)
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        text = await response.text()
        assert "http:" not in text
        assert "https:" not in text
        assert (await client.get(f"{url}assets/page.js")).content_type == "text/javascript"


@pytest.mark.parametrize(
    "path", ["assets/none.js", "assets/..%2fserver.py", "assets/../server.py", "server.py", "api/"]
)
async def test_another_path_of_the_page_is_not_found(path: str) -> None:
    async with page() as (url, _, client):
        assert (await client.get(url + path)).status == 404


async def test_another_sites_name_for_this_host_gets_nothing() -> None:
    """A page of somewhere else could have its own name point at 127.0.0.1, and read the fleet in the browser."""
    async with page() as (url, _, client):
        assert (await client.get(f"{url}api/fleet", headers={"Host": "evil.example"})).status == 421
        assert (await client.get(f"{url}api/fleet", headers={"Host": "localhost:7080"})).status == 200


async def test_watchers_are_bounded_and_one_that_leaves_makes_room() -> None:
    async with page() as (url, _, client):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=LIMIT, connector=connector) as many:
            open_ones = [await many.get(f"{url}api/watch") for _ in range(MAX_WATCHERS)]
            refused = await many.get(f"{url}api/watch")
            assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
            open_ones[0].close()

            async def there_is_room() -> bool:
                async with client.get(f"{url}api/watch") as again:
                    return again.status == 200

            await eventually(there_is_room)


async def test_the_server_ends_though_pages_are_open() -> None:
    async with aiohttp.ClientSession(timeout=LIMIT) as client:
        async with serve_page("127.0.0.1:0", Latest(run("a"))) as url:
            watched = await client.get(f"{url}api/watch")
            await next_state(watched)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 20


@pytest.mark.parametrize("listen", ["0.0.0.0:7080", "10.0.0.7:7080", "[::]:7080", "fleet.example:7080"])
def test_a_network_gets_no_page_without_tls_unless_it_is_said_to_be_insecure(listen: str) -> None:
    with pytest.raises(ValueError, match="web_listen: other hosts reach"):
        CoordinatorSettings(web_listen=listen)
    with pytest.raises(ValueError, match="takes tokens from other hosts"):
        CoordinatorSettings(web_listen=listen, web_tokens=Path("tokens.toml"), insecure=True)
    CoordinatorSettings(web_listen=listen, insecure=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:7080", "[::1]:0", "localhost:7080", "127.8.9.1:1"])
def test_loopback_needs_no_leave(listen: str) -> None:
    CoordinatorSettings(web_listen=listen)


@pytest.mark.parametrize("listen", ["7080", ":7080", "127.0.0.1:", "127.0.0.1:http"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|is no port"):
        CoordinatorSettings(web_listen=listen)


def test_a_large_fleets_page_stays_small() -> None:
    view = scripted_fleet.two_hundred()
    shown = json.loads(PageState().render(view))["updates"]
    assert sum(len(u["engines"]) for u in shown) <= OUTCOMES_SHOWN
    assert [u["update_id"] for u in shown] == [u.update_id for u in view.updates[: len(shown)]]
    assert 1 < len(shown) < len(view.updates)


def test_what_was_decided_is_made_once_and_what_is_open_each_time() -> None:
    state = PageState()
    first = json.loads(state.render(scripted_fleet.updating()))
    moved = scripted_fleet.updating()
    assert moved.updates[0].phase != moved.updates[1].phase
    for update in moved.updates:
        update.cause = "new"
    again = json.loads(state.render(moved))
    assert [u["cause"] for u in again["updates"]] == ["new", *(u["cause"] for u in first["updates"][1:])]
