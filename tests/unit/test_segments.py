"""Segments: reserved, locked, reused only when free (INV-12), swept when their owner died."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.core.errors import LimitExceeded
from trainer_agent import segments
from trainer_agent.segments import DIRECTORY, SegmentPool

RUN = f"unit-{os.getpid()}"


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    made = SegmentPool(RUN, 3)
    yield made
    made.close()


def present() -> list[Path]:
    return [p for p in DIRECTORY.iterdir() if RUN in p.name]


def test_a_segment_is_reserved_whole_private_and_named_by_run_and_rank(pool: SegmentPool) -> None:
    segment = pool.acquire(1_000_000)
    status = (DIRECTORY / segment.name).stat()
    assert segment.name.startswith(f"weightplane-{RUN}-")
    assert segment.name.endswith("-r3-0")
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 1_000_000
    segment.memory[:3] = b"abc"
    assert (DIRECTORY / segment.name).read_bytes()[:3] == b"abc"


def test_a_segment_is_used_again_once_nobody_reads_it(pool: SegmentPool) -> None:
    first = pool.acquire(100)
    pool.settle(released=True)
    assert pool.acquire(100) is first


def test_a_segment_is_given_up_at_once_when_somebody_may_still_read_it(pool: SegmentPool) -> None:
    first = pool.acquire(100)
    pool.settle(released=False)
    assert present() == []
    assert pool.acquire(100).name != first.name


def test_a_segment_is_given_up_when_the_last_push_never_settled(pool: SegmentPool) -> None:
    first = pool.acquire(100)
    second = pool.acquire(100)
    assert second.name != first.name
    assert [p.name for p in present()] == [second.name]


def test_a_larger_layout_gets_a_larger_segment(pool: SegmentPool) -> None:
    first = pool.acquire(100)
    pool.settle(released=True)
    assert pool.acquire(first.byte_count + 1).byte_count > first.byte_count


def test_a_reader_keeps_what_it_mapped_after_the_segment_was_given_up(pool: SegmentPool) -> None:
    segment = pool.acquire(100)
    segment.memory[:2] = b"hi"
    with (DIRECTORY / segment.name).open("rb") as reader:
        pool.settle(released=False)
        assert reader.read(2) == b"hi"


def test_a_full_directory_is_an_error_with_both_sizes_and_leaves_nothing(pool: SegmentPool) -> None:
    with pytest.raises(LimitExceeded, match=r"/dev/shm") as raised:
        pool.acquire(1 << 50)
    assert raised.value.got == 1 << 50
    assert 0 < raised.value.limit < 1 << 50
    assert present() == []


def test_names_stay_inside_the_contract_whatever_the_run_is_called() -> None:
    pool = SegmentPool("a/b c" + "x" * 300, 1)
    segment = pool.acquire(10)
    assert len(segment.name) <= 200
    assert "/" not in segment.name
    pool.close()


def test_a_sweep_takes_only_what_has_no_owner(pool: SegmentPool) -> None:
    mine = pool.acquire(100)
    foreign = DIRECTORY / f"weightplane-{RUN}-something-else"
    foreign.touch()
    dead = _leave_a_segment_behind()
    swept = segments.sweep()
    assert dead in swept
    assert mine.name not in swept
    assert {p.name for p in present()} == {mine.name, foreign.name}
    foreign.unlink()


def _leave_a_segment_behind() -> str:
    """By a process that is gone without cleaning up."""
    code = (
        "import os; from trainer_agent.segments import SegmentPool;"
        f"print(SegmentPool({RUN!r}, 0).acquire(10).name, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    return done.stdout.strip()


def test_a_forked_child_keeps_neither_the_lock_nor_the_memory(pool: SegmentPool) -> None:
    segment = pool.acquire(1 << 20)
    ready, told = os.pipe()
    go_on, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = any(segment.name in line for line in Path("/proc/self/maps").read_text().splitlines())
        open_files = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
        held = held or any(segment.name in name for name in open_files)
        os.write(told, b"held" if held else b"free")
        os.read(go_on, 1)
        os._exit(0)
    try:
        assert os.read(ready, 4) == b"free"
        segment.memory[0] = 7
        assert segments.sweep() == []
    finally:
        os.write(go, b"x")
        os.waitpid(pid, 0)
