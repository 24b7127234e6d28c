"""Segments that stay mapped between updates: always the sender's own bytes, and never longer than they have a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_agent import kept_maps
from engine_agent.kept_maps import KeptMaps, MappedFile
from engine_agent.vllm.mapping import MappedChunks
from tests.support.eventually import eventually

SIZE = 3 * 4096 + 100


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"weightplane-test-{os.getpid()}-kept"
    path.write_bytes(bytes([1]) * SIZE)
    yield path
    path.unlink(missing_ok=True)


def write(path: Path, value: int) -> None:
    """As a sender does: the same file, other bytes."""
    with path.open("r+b") as file:
        file.write(bytes([value]) * SIZE)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def mappings(path: Path) -> int:
    return sum(line.split()[-1:] == [str(path)] for line in Path("/proc/self/maps").read_text().splitlines())


def first(kept: KeptMaps, path: Path) -> int:
    """What a worker reads of an update that lies there."""
    chunks = MappedChunks([(str(path), 0, SIZE)], kept)
    value = int(chunks.tensor(torch.uint8, (SIZE,), 0, 0)[0])
    chunks.close()
    return value


def test_a_segment_is_mapped_once_and_each_update_reads_what_its_sender_wrote(segment: Path) -> None:
    kept = KeptMaps(private=True)
    for value in (1, 2, 3):
        write(segment, value)
        assert first(kept, segment) == value
        assert mappings(segment) == 1
    kept.close()
    assert mappings(segment) == 0


@pytest.mark.parametrize("where", [0, 4096, SIZE - 1])
def test_a_mapping_that_a_loader_wrote_into_does_not_hide_the_next_bytes(segment: Path, where: int) -> None:
    """INV-1: what is installed next are the bytes of that version."""
    kept = KeptMaps(private=True)
    chunks = MappedChunks([(str(segment), 0, SIZE)], kept)
    chunks.tensor(torch.uint8, (SIZE,), 0, 0)[where] = 9
    chunks.close()
    write(segment, 2)
    chunks = MappedChunks([(str(segment), 0, SIZE)], kept)
    assert set(chunks.tensor(torch.uint8, (SIZE,), 0, 0).tolist()) == {2}


def test_where_the_kernel_does_not_say_what_was_written_nothing_is_kept(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> bytes:
        raise PermissionError

    kept = KeptMaps(private=True)
    monkeypatch.setattr("os.pread", refuse)
    assert first(kept, segment) == 1
    assert mappings(segment) == 0


async def test_a_segment_without_a_name_is_let_go(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead trainer's weights do not fill the host's memory until the next push."""
    monkeypatch.setattr(kept_maps, "GONE_SECONDS", 0.05)
    kept = KeptMaps(private=True)
    assert first(kept, segment) == 1
    segment.unlink()
    await eventually(lambda: mappings(Path(f"{segment} (deleted)")) == 0 and "(deleted)" not in of(segment))
    kept.close()


def of(segment: Path) -> str:
    return "".join(line for line in Path("/proc/self/maps").read_text().splitlines() if segment.name in line)


def test_another_file_of_the_same_name_is_another_file(segment: Path) -> None:
    kept = KeptMaps(private=True)
    assert first(kept, segment) == 1
    segment.unlink()
    segment.write_bytes(bytes([5]) * SIZE)
    assert first(kept, segment) == 5
    kept.close()


def test_a_file_that_grew_is_mapped_anew(segment: Path) -> None:
    kept = KeptMaps()
    kept.give_back([kept.take(opened(segment))])
    os.truncate(segment, 2 * SIZE)
    file = kept.take(opened(segment))
    assert file.size == 2 * SIZE
    file.close()


def test_only_the_files_of_the_last_update_are_kept_and_no_descriptor_is_lost(segment: Path) -> None:
    before, kept = len(os.listdir("/proc/self/fd")), KeptMaps()
    other = segment.with_name(f"{segment.name}-other")
    other.write_bytes(bytes(SIZE))
    try:
        kept.give_back([kept.take(opened(segment)), kept.take(opened(segment))])  # of two devices
        kept.give_back([kept.take(opened(other))])
        assert (mappings(segment), mappings(other)) == (0, 1)
        late: MappedFile = kept.take(opened(other))
        kept.close()
        kept.give_back([late])
    finally:
        other.unlink()
    assert len(os.listdir("/proc/self/fd")) <= before
