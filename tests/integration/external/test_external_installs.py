"""Installs into a server that the agent did not start: what it sends, and what it makes of the answers. No vLLM here:
the contract suite and tests/e2e/test_external_real.py have the real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.core.errors import EngineDied, InstallFailed, InstallTimedOut
from tests.support.eventually import eventually
from tests.support.external_engine import FINISH, consume, put, shorten
from tests.support.recording_server import RecordingServer


async def test_inv1_an_install_is_checked_then_put_in_then_caches_go_and_the_label_comes_last_and_is_read_back(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.calls.clear()
    await put(engine, "7")
    steps = [body["update_info"]["step"] for body in server.posted("/update_weights")]
    assert steps == ["check", "install"]
    order = ["/start_weight_update", "/update_weights", "/reset_prefix_cache", FINISH]
    assert [p for p in dict.fromkeys(server.paths) if p in order] == order
    assert server.label.startswith("7.")
    first = server.label
    await engine.probe()
    await put(engine, "7")
    assert server.label != first  # a label tells two installs of one version apart


async def test_inv1_the_version_does_not_move_on_500_and_what_was_touched_is_said(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    held = server.label
    server.refuse["/start_weight_update"] = 500
    with pytest.raises(InstallFailed) as failure:
        await put(engine, "8")
    assert not failure.value.touched
    assert server.label == held
    await engine.probe()
    del server.refuse["/start_weight_update"]
    server.results["check"] = {"ok": False, "touched": False, "cause": "no such file", "loaded": 0}
    with pytest.raises(InstallFailed, match="no such file") as failure:
        await put(engine, "8")
    assert not failure.value.touched
    assert server.label == held
    server.results.clear()
    server.refuse[FINISH] = 500
    with pytest.raises(InstallFailed) as failure:
        await put(engine, "8")
    assert failure.value.touched
    assert server.label.startswith("mixture.")
    await engine.probe()
    server.refuse["/update_weight_version"] = 500
    with pytest.raises(EngineDied):  # neither the label nor the way back was taken
        await put(engine, "8")


async def test_inv4_an_install_that_failed_in_a_worker_leaves_a_label_that_is_no_version_and_the_next_one_heals(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    server.results["install"] = {"ok": False, "touched": True, "cause": "it broke", "loaded": 1}
    with pytest.raises(InstallFailed, match="it broke") as failure:
        await put(engine, "8")
    assert failure.value.touched
    assert server.label.startswith("mixture.")
    server.results.clear()
    await put(engine, "9")
    assert server.label.startswith("9.")


async def test_inv4_an_install_without_an_answer_has_no_outcome_and_ends_this_life(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    shorten(engine, install_timeout_seconds=0.5)
    server.hold["/update_weights"] = asyncio.Event()
    with pytest.raises(InstallTimedOut):
        await put(engine, "8")
    with pytest.raises(EngineDied, match="may still be running"):
        await engine.probe()
    server.hold["/update_weights"].set()
    again = await attach()
    assert server.label.startswith("unset.")  # nothing of the life before is known
    await put(again, "8")


async def test_inv4_an_install_that_was_broken_off_ends_this_life(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    server.hold["/update_weights"] = asyncio.Event()
    installing = asyncio.create_task(put(engine, "7"))
    await eventually(lambda: bool(server.posted("/update_weights")))
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    with pytest.raises(EngineDied, match="broken off"):
        await engine.probe()
    server.hold["/update_weights"].set()


@pytest.mark.parametrize("path", ["/update_weights", FINISH])
async def test_inv1_a_connection_that_breaks_in_an_install_ends_this_life(
    server: RecordingServer, attach: Any, path: str
) -> None:
    engine = await attach()
    server.cut.add(path)
    with pytest.raises(EngineDied):
        await put(engine, "8")
    with pytest.raises(EngineDied):
        await consume(engine, "late")


async def test_a_probe_beside_a_label_that_is_being_set_waits_for_its_answer(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.hold[FINISH] = asyncio.Event()
    installing = asyncio.create_task(put(engine, "7"))
    await eventually(lambda: server.label.startswith("7."))
    probing = asyncio.create_task(engine.probe())
    await asyncio.sleep(0.05)
    assert not probing.done()
    server.hold[FINISH].set()
    await asyncio.gather(installing, probing)
