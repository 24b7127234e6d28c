"""When a writer hears that chunks are free (INV-12)."""

from __future__ import annotations

from controlplane.core.versions import Term, WeightVersion
from engine_agent.services.releases import MAX_HELD, Releases

VERSION = WeightVersion(number=4, term=Term(1))


def test_inv12_where_memory_waits_each_release_goes_out_as_soon_as_its_chunk_is_free() -> None:
    releases = Releases(VERSION, hold=False)
    for index in (0, 1, 5):
        releases.free(index)
        assert releases.due
        assert releases.take().chunk_released.index == index
        assert not releases.held


def test_inv12_a_release_that_was_held_back_speaks_for_the_last_free_chunk_and_none_after_it() -> None:
    releases = Releases(VERSION, hold=True)
    for index in range(3):
        releases.free(index)
        assert releases.held
        assert not releases.due
    said = releases.take().chunk_released
    assert (said.version.number, said.index) == (4, 2)
    assert not releases.held


def test_no_release_is_held_back_for_more_chunks_than_the_limit() -> None:
    releases, said = Releases(VERSION, hold=True), []
    for index in range(3 * MAX_HELD + 1):
        releases.free(index)
        if releases.due:
            said.append(releases.take().chunk_released.index)
    assert said == [MAX_HELD - 1, 2 * MAX_HELD - 1, 3 * MAX_HELD - 1]
    assert releases.held
