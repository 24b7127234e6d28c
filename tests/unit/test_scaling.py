"""The arithmetic of docs/scaling.md, by hand; and its tables are those that the script computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import scaling
from bench.scaling import DEFAULTS, GB, TB, Constants, Fleet, Model

MODEL = Model("100 GB", 100e9, 1, 10_000)
FLEET = Fleet(engines=10, ranks=4, shards=5, nic_rate=50 * GB)
MEASURED = Constants(inline_rate=0.5 * GB, link_rate=2 * GB, shared_rate=4 * GB, report_seconds=0.001)


def test_a_leader_has_its_share_of_the_engines_and_never_half_of_one() -> None:
    assert [scaling.engines_of_a_leader(replace(FLEET, ranks=ranks)) for ranks in (4, 5, 10, 4_000)] == [3, 2, 1, 1]


def test_what_a_rank_gathers_is_what_it_has_not() -> None:
    assert scaling.gather_seconds(MODEL, FLEET) == pytest.approx(100 / 50 * 4 / 5)
    assert scaling.gather_seconds(MODEL, replace(FLEET, shards=1)) == 0


def test_inline_streams_of_a_node_share_its_agent_and_no_stream_is_faster_than_the_nic() -> None:
    assert scaling.inline_seconds(MODEL, FLEET, MEASURED) == pytest.approx(100 / 0.5 * 20)  # 10 engines, half a node
    slow = replace(FLEET, nic_rate=0.25 * GB)
    assert scaling.inline_seconds(MODEL, slow, MEASURED) == pytest.approx(100 / 0.25 * 20)


def test_a_gloo_root_sends_a_copy_for_each_level_of_its_tree() -> None:
    assert scaling.gloo_seconds(MODEL, FLEET, MEASURED) == pytest.approx(100 / 2 * 2)  # itself and three: two levels
    alone = replace(FLEET, engines=4)
    assert scaling.gloo_seconds(MODEL, alone, MEASURED) == pytest.approx(100 / 2)


def test_sharded_sends_are_bound_by_the_side_with_fewer_nics() -> None:
    assert scaling.sharded_seconds(MODEL, FLEET) == pytest.approx(100 * 10 / (4 * 50))
    many = replace(FLEET, ranks=10_000)
    assert scaling.sharded_seconds(MODEL, many) == pytest.approx(100 / (8 * 50))


def test_the_estimate_agrees_with_what_others_published_of_a_trillion_parameters() -> None:
    """16 s by broadcast over 256 GPUs, 1.3 s from 256 to 128 GPUs by RDMA: docs/scaling.md has the sources."""
    trillion = Model("1T, fp8", 1e12, 1, 1)
    fleet = Fleet(engines=8, ranks=256, shards=64, nic_rate=50 * GB, engine_gpus=16)
    assert 16 <= scaling.line_seconds(trillion, fleet) <= 25
    assert scaling.sharded_seconds(trillion, fleet) == pytest.approx(1.3, abs=0.1)


def test_a_relay_is_late_by_a_chunk_for_each_level_and_sends_as_often_as_it_is_wide() -> None:
    chain = scaling.relay_seconds(100 * GB, engines=11, width=1, rate=50 * GB, chunk_bytes=GB)
    assert chain == pytest.approx(2 + 10 * 1 / 50)
    tree = scaling.relay_seconds(100 * GB, engines=7, width=2, rate=50 * GB, chunk_bytes=GB)
    assert tree == pytest.approx(2 * 2 + 2 * 2 / 50)  # levels of 1, 2 and 4


def test_the_coordinators_load_grows_with_engines_and_reports_and_with_nothing_else() -> None:
    assert scaling.coordinator_share(1_000, MEASURED) == pytest.approx(1.0)
    assert scaling.update_seconds(1_000, MEASURED) == pytest.approx(4.0)


def test_what_runs_measured_takes_the_place_of_the_defaults_and_what_failed_does_not() -> None:
    rows: dict[str, dict[str, Any]] = {
        "inline stream": {"ours": 0.5},
        "broadcast link": {"ours": None},
        "another row": {"ours": 1.0},
    }
    found = scaling.constants_of(rows)
    assert found == replace(DEFAULTS, inline_rate=scaling.SMOLLM2_BYTES / 0.5)
    assert scaling.constants_of({}) == DEFAULTS


@pytest.mark.parametrize(
    ("value", "said"), [(2 * TB, "2 TB"), (269_030_016, "269 MB"), (26_100, "26.1 kB"), (1.25 * GB, "1.25 GB")]
)
def test_amounts_are_said_in_their_largest_unit(value: float, said: str) -> None:
    assert scaling.amount(value) == said


def test_only_the_computed_part_of_the_page_is_written() -> None:
    page = f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n"
    assert scaling.written(page, ["new", ""]) == f"before\n{scaling.BEGIN}\n\nnew\n{scaling.END}\nafter\n"
    with pytest.raises(ValueError, match="there is no"):
        scaling.written("nothing", [])
