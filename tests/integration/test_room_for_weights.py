"""Room for a version may take long to make: the agent goes on meanwhile, and what nobody waits for is given back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine_agent.receivers import Incoming, Receiver, make_receiver
from engine_agent.services import update_attempt
from tests.support.eventually import eventually
from tests.support.local_fleet import local_fleet
from tests.support.writer import Weights


class Slowly:
    """Makes receivers when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go, self.made = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, incoming: Incoming) -> Receiver:
        self.begun.set()
        self.go.wait(60)
        receiver = make_receiver(incoming)
        self.made.set()
        return receiver


def staged() -> list[str]:
    links = (os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
    return [link for link in links if "weightplane-staging" in link]


async def test_an_agent_answers_while_room_is_made_and_gives_room_back_whose_stream_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = Slowly()
    monkeypatch.setattr(update_attempt, "make_receiver", slowly)
    async with local_fleet(tmp_path, engines=1) as fleet:
        stream = fleet.stream(await fleet.begin(), "e0")
        if (await stream.open()).layout_needed:
            await stream.layout()
        await eventually(slowly.begun.is_set)
        assert await fleet.applied("e0") is None, "it answers"
        stream.cut()
        slowly.go.set()
        await eventually(slowly.made.is_set)
        await eventually(lambda: staged() == [])


async def test_chunks_that_come_before_the_room_is_made_are_placed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = Slowly()
    monkeypatch.setattr(update_attempt, "make_receiver", slowly)
    async with local_fleet(tmp_path, engines=1) as fleet:
        begun, weights = await fleet.begin(), Weights()
        stream = fleet.stream(begun, "e0")
        if (await stream.open()).layout_needed:
            await stream.layout()
        await stream.chunk(weights, 0, [0])
        await eventually(slowly.begun.is_set)
        slowly.go.set()
        await stream.chunk(weights, 1, [1])
        while (await stream.read()).WhichOneof("frame") != "ready":
            pass
        await fleet.go(begun.update_id)
        await stream.commit(weights)
        await fleet.decided(begun.update_id)
        assert await fleet.applied("e0") == begun.version.number
