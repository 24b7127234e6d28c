"""Memory that a version came into may be the next one's, once it was installed; not a moment sooner, nor otherwise."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.engine_state import EngineState
from controlplane.core.errors import InstallFailed
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.life.engine_life import EngineLife, LifeSettings
from engine_agent.life.remembered import Memory
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer
from engine_agent.receivers.spare import ROOM, Spare, available_bytes
from engine_agent.receivers.staging import Staging

LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
OTHER = Layout((TensorSpec("w", DType.F32, (400,)),))
DATA = [os.urandom(16) for _ in range(3)]


def file_of(staging: Staging) -> int:
    """Which file it is."""
    return os.stat(staging.staged("1").chunks[""][0].path).st_ino


def left() -> set[int]:
    """Files of stagings that this process holds."""
    found = (p for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
    return {p.stat().st_ino for p in found if "weightplane-staging" in os.readlink(p)}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = left()
    yield
    assert left() == before


def ended(staging: Staging, *, installed: bool) -> int:
    """Its file, after it was let go of."""
    number = file_of(staging)
    staging.installed = installed
    staging.close()
    return number


def test_inv_12_the_memory_of_an_installed_version_is_the_next_ones_and_that_of_no_other() -> None:
    spare = Spare(wanted=True)
    first = ended(Staging(LAYOUT, spare=spare), installed=True)
    second = Staging(LAYOUT, spare=spare)
    assert file_of(second) == first
    assert left(), "it is not two at once"
    assert ended(second, installed=False) == first
    assert not left(), "somebody may still read it"
    spare.close()


def test_nothing_is_kept_unless_it_is_wanted() -> None:
    spare = Spare(wanted=False)
    ended(Staging(LAYOUT, spare=spare), installed=True)
    ended(Staging(LAYOUT), installed=True)
    assert not left()


def test_where_the_settings_say_nothing_memory_is_kept_while_there_is_plenty_beside_it() -> None:
    measured = Staging(LAYOUT)
    measured.close()
    left_over = [measured.size * ROOM]
    spare = Spare(wanted=None, available=lambda: left_over[0])
    first = ended(Staging(LAYOUT, spare=spare), installed=True)
    second = Staging(LAYOUT, spare=spare)
    assert file_of(second) == first
    left_over[0] -= 1
    ended(second, installed=True)
    assert not left()


def test_memory_of_another_size_is_let_go_of_and_so_is_what_comes_after_the_end() -> None:
    spare = Spare(wanted=True)
    ended(Staging(LAYOUT, spare=spare), installed=True)
    late = Staging(OTHER, spare=spare)
    assert len(left()) == 1
    spare.close()
    ended(late, installed=True)
    assert not left()


def test_the_kernel_says_what_is_available_and_a_control_groups_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = available_bytes()
    assert 0 < whole < 1 << 50
    monkeypatch.setattr("engine_agent.receivers.spare.CGROUPS", tmp_path)
    for name, text in (("memory.max", "1000\n"), ("memory.current", "900\n")):
        (tmp_path / name).write_text(text)
    assert available_bytes() == 100


# ---- in a life ----------------------------------------------------------------------------------


async def started(tmp_path: Path) -> EngineLife:
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
    engine = MemoryEngine(MemorySettings(), "e0")
    life = EngineLife(state, engine, Memory(tmp_path / "e0.json", "run", "policy"), LifeSettings(keep_staging=True))
    await life.start()
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset()))
    return life


async def installed(life: EngineLife, number: int) -> int:
    """One update, as the service does it. Its file; raises InstallFailed."""
    data, version, update = DATA[number - 1], WeightVersion(number, Term(1)), UpdateId(f"u{number}")
    head = (RunId("run"), ModelName("policy"), Incarnation("i"), update, Term(1), version, LAYOUT.digest, 1, 16)
    accept = next(x for x in life.apply(events.Opened(number, *head)) if isinstance(x, fx.Accept))
    if accept.layout_needed:
        life.apply(events.LayoutArrived(number, LAYOUT))
    staging = Staging(LAYOUT, spare=life.spare)
    receiver, inode = InlineReceiver(staging), file_of(staging)
    life.streams.keep(number, receiver)
    checksum = xxhash.xxh3_64_digest(data)
    record = Record(0, 0, 0, 16, checksum)
    life.apply(events.ChunkArrived(number, version, 0, [record], 16))
    receiver.place([record], [Buffer("", inline=data)])
    receiver.check(0, checksum)
    life.apply(events.BytesVerified(number))
    effects = life.apply(events.CommitArrived(number, version, 1, 16, content_digest([checksum])))
    life.installs.start(next(x for x in effects if isinstance(x, fx.StartInstall)))
    await asyncio.wait_for(life.installs.outcome(update), 60)
    await asyncio.sleep(0)
    return inode


async def test_inv_12_an_install_that_fails_leaves_its_memory_to_whoever_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    life = await started(tmp_path)
    first = await installed(life, 1)
    (tmp_path / "worker.install").write_text("raise")
    with pytest.raises(InstallFailed):
        await installed(life, 2)
    await asyncio.sleep(0)
    assert not left(), f"the file {first} is not kept for a third version"
    (tmp_path / "worker.install").unlink(missing_ok=True)
    await installed(life, 3)
    assert len(left()) == 1
    await life.end("done")
    assert not left()


async def test_one_version_after_the_other_comes_into_the_same_memory(tmp_path: Path) -> None:
    life = await started(tmp_path)
    assert await installed(life, 1) == await installed(life, 2)
    await life.end("done")
