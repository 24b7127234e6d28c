"""The page in a real browser: what people see of a fleet, in both themes, by keyboard, and live.

`WEIGHTPLANE_UPDATE_IMAGES=1 pytest …` makes the pictures in docs/images anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.core.access import Role
from controlplane.rpc.latest import Latest
from controlplane.rpc.security import HttpGuard, TlsSettings
from controlplane.web import serve_page
from tests.support import scripted_fleet
from tests.support.certificates import token_for
from tests.support.eventually import eventually
from weightplane.v1 import operator_pb2

selenium = pytest.importorskip("selenium")
from tests.support.chromium import MISSING, chromium, is_here  # noqa: E402 - it imports selenium

pytestmark = pytest.mark.skipif(not is_here(), reason=MISSING)

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
STATES: dict[str, Callable[[], operator_pb2.FleetView]] = {
    "healthy": scripted_fleet.healthy,
    "updating": scripted_fleet.updating,
    "poisoned": scripted_fleet.poisoned,
    "recovering": scripted_fleet.recovering,
    "two-hundred": scripted_fleet.two_hundred,
}
SEEN = {
    "healthy": ["6 of 6", "1.10 committed", "tokens that engines made", "shared memory"],
    "updating": ["1.6 go", "4 installing", "unset", "stands still"],
    "poisoned": ["3 of 6", "1 poisoned", "1 unknown", "CANARY_FAILED", "operator (ann)", "last said: serving"],
    "recovering": ["waits for its engines' reports", "Not heard yet: engine-2, engine-3", "coordinator term 2"],
    "two-hundred": ["195 of 200", "1.5 preparing", "and 172 engines that were faster", "1 draining"],
}
WIDTH = 1360
GROUND = "return getComputedStyle(document.body).backgroundColor"
DARK = "rgb(21, 23, 26)"
Fleet = Latest[operator_pb2.FleetView]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@asynccontextmanager
async def shown(browser: Any, view: operator_pb2.FleetView) -> AsyncIterator[Fleet]:
    """The page of a fleet, drawn. Afterwards: nothing was wrong in the browser's eyes."""
    fleet: Fleet = Latest(view)
    async with serve_page("127.0.0.1:0", fleet) as url:
        wish_for(browser, "light")
        browser.get_log("browser")
        await asyncio.to_thread(browser.get, url)
        await eventually(lambda: script(browser, "return document.body.dataset.shown") == "yes")
        yield fleet
        assert browser.get_log("browser") == []
        await asyncio.to_thread(browser.get, "about:blank")


def wish_for(browser: Any, theme: str) -> None:
    """What the system says that people want."""
    wish = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})


def script(browser: Any, code: str, *values: object) -> Any:
    return browser.execute_script(code, *values)


def text(browser: Any) -> str:
    return str(script(browser, "return document.body.innerText"))


def keep_picture(browser: Any, name: str, directory: Path) -> None:
    browser.set_window_size(WIDTH, 900)
    height = script(browser, "return document.querySelector('main').getBoundingClientRect().bottom + scrollY")
    browser.set_window_size(WIDTH, int(height) + 90)
    directory.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(directory / f"{name}.png"))


@pytest.mark.parametrize("state", STATES)
async def test_a_state_is_drawn_in_both_themes(browser: Any, tmp_path: Path, state: str) -> None:
    async with shown(browser, STATES[state]()):
        seen = text(browser)
        assert [words for words in SEEN[state] if words not in seen] == []
        assert script(browser, GROUND) != DARK
        kept = bool(os.environ.get("WEIGHTPLANE_UPDATE_IMAGES"))
        await asyncio.to_thread(keep_picture, browser, f"page-{state}-light", IMAGES if kept else tmp_path)
        wish_for(browser, "dark")
        assert script(browser, GROUND) == DARK
        if state == "healthy":
            await asyncio.to_thread(keep_picture, browser, f"page-{state}-dark", IMAGES if kept else tmp_path)


async def test_a_change_is_shown_without_reload_and_the_focus_stays(browser: Any) -> None:
    view = scripted_fleet.healthy()
    async with shown(browser, view) as fleet:
        script(browser, "window.kept = document.querySelector('#engine-engine-2')")
        script(browser, "document.querySelector('#find').focus()")
        later = operator_pb2.FleetView()
        later.CopyFrom(view)
        later.engines[2].known = False
        event = operator_pb2.FleetEvent(name="engine_unknown", subject="engine-2", text="silent", alarming=True)
        event.time.CopyFrom(Timestamp(seconds=view.time.seconds + 1))
        later.events.insert(0, event)
        fleet.set(later)
        row = "document.querySelector('#engine-engine-2')"
        await eventually(lambda: script(browser, f"return {row}.dataset.state") == "unknown")
        assert script(browser, f"return {row} === window.kept")
        assert script(browser, "return document.activeElement.id") == "find"
        assert script(browser, "return document.querySelector('#announce').textContent") == "engine-2: silent"
        assert "last said: serving" in text(browser)


async def test_the_theme_that_a_person_chose_stays(browser: Any) -> None:
    async with shown(browser, scripted_fleet.recovering()):
        script(browser, "document.querySelector('#theme').click()")
        await asyncio.to_thread(browser.refresh)
        await eventually(lambda: script(browser, "return document.body.dataset.shown") == "yes")
        assert script(browser, "return document.querySelector('#theme').getAttribute('aria-pressed')") == "true"
        assert script(browser, GROUND) == DARK
        script(browser, "localStorage.clear()")


async def test_the_page_is_used_by_keyboard_alone(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    async with shown(browser, scripted_fleet.poisoned()):

        def press(*keys: str) -> str:
            ActionChains(browser).send_keys(*keys).perform()
            return str(script(browser, "return document.activeElement.textContent || document.activeElement.id"))

        assert press(Keys.TAB) == "Skip to the engines"
        press(Keys.ENTER)
        assert press(Keys.TAB) == "find"
        press("engine-2")
        assert script(browser, "return document.querySelectorAll('#engine-rows tr').length") == 1
        while press(Keys.TAB) != "1.6":
            pass
        press(Keys.ENTER)
        assert "Version 1.6" in script(browser, "return document.querySelector('#timeline-title').textContent")


async def test_assistive_technology_is_told_what_everything_is(browser: Any) -> None:
    async with shown(browser, scripted_fleet.poisoned()):
        headers = "return [...document.querySelectorAll('th')].filter(t => !['row','col'].includes(t.scope)).length"
        assert script(browser, headers) == 0
        unnamed = (
            "return [...document.querySelectorAll('table')].filter(t => !t.caption && !t.closest('[aria-labelledby]'))"
            ".length + [...document.querySelectorAll('a,button,input')].filter(e => !e.textContent.trim() && "
            "!e.getAttribute('aria-label') && !e.closest('label')).length"
        )
        assert script(browser, unnamed) == 0
        assert script(browser, "return document.querySelector('#announce').getAttribute('aria-live')") == "polite"
        assert script(browser, "return document.documentElement.lang") == "en"
        assert script(browser, "return document.querySelectorAll('h1').length") == 1
        lanes = "return [...document.querySelectorAll('.lanes li')].map(l => l.innerText || l.textContent).join()"
        assert "stood still" in script(browser, lanes)


async def test_a_coordinator_that_is_gone_is_said_and_its_last_word_stays(browser: Any) -> None:
    fleet: Fleet = Latest(scripted_fleet.healthy())
    async with serve_page("127.0.0.1:0", fleet) as url:
        await asyncio.to_thread(browser.get, url)
        await eventually(lambda: script(browser, "return document.body.dataset.shown") == "yes")
    await eventually(lambda: "this is what it said last" in text(browser))
    assert "engine-5" in text(browser)
    await asyncio.to_thread(browser.get, "about:blank")
    browser.get_log("browser")


async def test_a_page_that_asks_takes_a_token_typed_by_hand_and_says_why_it_refuses_another(
    browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By

    tokens = tmp_path / "tokens.toml"
    token = token_for(tokens, Role.VIEWER)
    fleet: Fleet = Latest(scripted_fleet.healthy())

    def typed(text: str) -> None:
        browser.find_element(By.ID, "token").send_keys(text + "\n")

    async with serve_page("127.0.0.1:0", fleet, HttpGuard(TlsSettings(tokens=tokens))) as url:
        await asyncio.to_thread(browser.get, url)
        await eventually(lambda: "one bearer token is expected" in text(browser))
        assert "engine-5" not in text(browser)
        await asyncio.to_thread(typed, "wpt_wrong")
        await eventually(lambda: "the token is not known here" in text(browser))
        await asyncio.to_thread(typed, token)
        await eventually(lambda: script(browser, "return document.body.dataset.shown") == "yes")
        assert "engine-5" in text(browser)
        assert script(browser, "return document.querySelector('#ask').hidden")
        assert token not in script(browser, "return document.documentElement.outerHTML + location.href")
    await asyncio.to_thread(browser.get, "about:blank")
    browser.get_log("browser")
