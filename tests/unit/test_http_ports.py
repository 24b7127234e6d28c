"""The page asks as the gRPC ports do: certificates or tokens, and one table of roles."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from controlplane.core.access import ANY, HTTP_POLICY, Principal, Role
from controlplane.rpc.latest import Latest
from controlplane.rpc.metrics import REFUSALS
from controlplane.rpc.security import HttpGuard, TlsSettings
from controlplane.web import serve_page
from controlplane.web import server as page_server
from tests.support.certificates import People, people, token_for
from tests.support.http_calls import RUN, bearer, context_of, status
from weightplane.v1 import operator_pb2


@pytest.fixture
def issue(tmp_path: Path) -> People:
    return people(tmp_path)


@asynccontextmanager
async def page(guard: HttpGuard) -> AsyncIterator[str]:
    fleet: Latest[operator_pb2.FleetView] = Latest(operator_pb2.FleetView(run_id=RUN))
    async with serve_page("127.0.0.1:0", fleet, guard) as url:
        yield url


def test_every_route_that_tells_of_the_fleet_is_in_the_table() -> None:
    source = Path(page_server.__file__).read_text()
    paths = set(re.findall(r'add_get\("(/[^"]*)"', source))
    asked = {f"page {p}" for p in paths if p.startswith(page_server.ASKED)}
    assert paths - {p.removeprefix("page ") for p in asked} == {"/", "/assets/{name}"}
    assert asked == {route for route in HTTP_POLICY if route.startswith("page ")}


@pytest.mark.parametrize("role", list(Role))
async def test_a_token_of_each_role_sees_the_page_as_the_table_says(tmp_path: Path, role: Role) -> None:
    tokens = tmp_path / "tokens.toml"
    token = token_for(tokens, role)
    allowed = role in HTTP_POLICY["page /api/fleet"]
    async with page(HttpGuard(TlsSettings(tokens=tokens), RUN)) as url:
        for path in ("api/fleet", "api/watch"):
            expected = (200, "") if allowed else (403, "PERMISSION_DENIED")
            assert await status(url + path, headers=bearer(token)) == expected


async def test_without_a_token_or_with_a_wrong_one_the_page_says_nothing_of_the_fleet(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    token = token_for(tokens, Role.VIEWER)
    before = REFUSALS.labels("page", "UNAUTHENTICATED")._value.get()
    shown: list[dict[str, str]] = [{}, bearer("wpt_wrong"), bearer(""), {"Authorization": f"Basic {token}"}]
    async with page(HttpGuard(TlsSettings(tokens=tokens), RUN)) as url:
        for headers in shown:
            assert await status(f"{url}api/fleet", headers=headers) == (401, "UNAUTHENTICATED")
        assert (await status(url))[0] == 200, "its files tell nothing"
        for path in ("api/../api/fleet", "api//fleet", "%61pi/fleet", "API/fleet"):
            assert (await status(url + path))[0] in (401, 404), path
    assert REFUSALS.labels("page", "UNAUTHENTICATED")._value.get() >= before + len(shown)


async def test_a_token_of_another_run_sees_nothing(tmp_path: Path) -> None:
    from controlplane.rpc.security.tokens import add_token, new_token

    token, tokens = new_token(), tmp_path / "tokens.toml"
    add_token(tokens, Principal(Role.VIEWER, ANY, "run-b"), token)
    async with page(HttpGuard(TlsSettings(tokens=tokens), RUN)) as url:
        assert await status(f"{url}api/fleet", headers=bearer(token)) == (403, "PERMISSION_DENIED")


async def test_a_page_with_certificates_takes_viewers_and_nobody_without_one(issue: People) -> None:
    async with page(HttpGuard(issue("coordinator"), RUN)) as url:
        assert url.startswith("https://")
        assert (await status(f"{url}api/fleet", ssl=context_of(issue("viewer"))))[0] == 200
        refused = await status(f"{url}api/fleet", ssl=context_of(issue("engine/engine-0")))
        assert refused == (403, "PERMISSION_DENIED")
        with pytest.raises(aiohttp.ClientError):
            await status(f"{url}api/fleet", ssl=context_of(issue("viewer"), shows=False))
        with pytest.raises(aiohttp.ClientError):
            await status(url.replace("https", "http") + "api/fleet")


async def test_a_page_with_its_own_tokens_asks_browsers_for_no_certificate(issue: People, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    token = token_for(tokens, Role.VIEWER)
    async with page(HttpGuard(replace(issue("coordinator"), tokens=tokens), RUN)) as url:
        plain = context_of(issue("viewer"), shows=False)
        assert (await status(f"{url}api/fleet", ssl=plain, headers=bearer(token)))[0] == 200
        assert (await status(f"{url}api/fleet", ssl=plain))[0] == 401


async def test_a_renewed_certificate_is_shown_at_the_next_handshake(issue: People, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    server, renewed = issue("coordinator"), people(tmp_path / "new")
    new = renewed("coordinator")
    async with page(HttpGuard(replace(server, tokens=_tokens(tmp_path)), RUN)) as url:
        assert (await status(url, ssl=context_of(server, shows=False)))[0] == 200
        for old, fresh in ((server.ca, new.ca), (server.cert, new.cert), (server.key, new.key)):
            assert old is not None
            assert fresh is not None
            fresh.replace(old)
        assert (await status(url, ssl=context_of(replace(server), shows=False)))[0] == 200


def _tokens(directory: Path) -> Path:
    token_for(directory / "some.toml", Role.VIEWER)
    return directory / "some.toml"
