"""A rank's memory for deltas: the base moves with a commit only, and what may be read is never written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_agent.rank.feed import Held
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.segments import DIRECTORY, Segment
from weightplane.v1 import version_pb2
from weightplane.v1 import weight_update_pb2 as pb

RUN = f"kept-{os.getpid()}"


@pytest.fixture
def kept() -> Iterator[KeptVersions]:
    versions = KeptVersions(RUN, 0)
    yield versions
    versions.close()
    assert present() == []


def present() -> list[str]:
    return sorted(p.name for p in DIRECTORY.glob(f"weightplane-{RUN}-*"))


def name(number: int) -> pb.Base:
    return pb.Base(version=version_pb2.WeightVersion(term=1, number=number), content_digest=bytes([number]) * 32)


def push(kept: KeptVersions, number: int, *, released: bool = True, committed: bool = True) -> Segment:
    segment = kept.acquire(100)
    segment.memory[0] = number
    kept.settle(released, name(number) if committed else None)
    return segment


def base(kept: KeptVersions) -> tuple[int, int]:
    """The number that it is called, and the one that its bytes say."""
    assert kept.base is not None
    return kept.base.name.version.number, kept.base.segment.memory[0]


def test_inv5_only_what_the_fleet_committed_is_a_base(kept: KeptVersions) -> None:
    push(kept, 1)
    assert base(kept) == (1, 1)
    push(kept, 2, committed=False)
    assert kept.base is None
    push(kept, 3, committed=False, released=False)
    assert kept.base is None
    push(kept, 4)
    assert base(kept) == (4, 4)


def test_two_whole_copies_do_for_any_number_of_pushes(kept: KeptVersions) -> None:
    for number in range(1, 7):
        push(kept, number)
        assert base(kept) == (number, number)
    assert len(present()) == 2


def test_inv12_a_base_that_may_still_be_read_is_kept_and_never_written_again(kept: KeptVersions) -> None:
    doubtful = push(kept, 1, released=False)
    assert base(kept) == (1, 1)
    assert push(kept, 2) is not doubtful
    assert doubtful.name not in present()
    assert push(kept, 3) is not doubtful


def test_inv12_room_for_deltas_is_used_again_only_when_nobody_reads_it(kept: KeptVersions) -> None:
    kept.acquire(100)
    first = kept.place(64)
    kept.settle(True, name(1))
    kept.acquire(100)
    assert kept.place(64) is first
    second = kept.place(64)
    assert second is not first
    kept.settle(False, None)
    assert {first.name, second.name}.isdisjoint(present())


def test_a_rank_that_exported_nothing_of_a_version_has_no_base(kept: KeptVersions) -> None:
    push(kept, 1)
    kept.settle(True, name(2))
    assert kept.base is None


@pytest.mark.parametrize("failed", [False, True])
def test_inv5_the_senders_base_moves_only_when_the_fleet_decided_for_the_version(
    kept: KeptVersions, tmp_path: Path, failed: bool
) -> None:
    held = Held(kept, GatherGroups(0, tmp_path))
    for number in (1, 2):
        kept.acquire(100)
        held.exported = name(number)
        held.settle(released=True, failed=failed and number == 2)
    assert held.base == (None if failed else name(2))
