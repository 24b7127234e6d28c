"""The trainer agent's decisions without I/O: who is in the set, which plans can be followed, which failures pass."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import pytest

from controlplane.core import errors as e
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.devices import host_id
from controlplane.processes import start_time
from controlplane.rpc.codec import layout_to_parts
from tests.support.update_states import FAILED, state
from trainer_agent.agent import outcome
from trainer_agent.agent.lastlife import FILE_NAME, LastLife
from trainer_agent.agent.load import load_of
from trainer_agent.agent.plans import check_plan, for_rank, push_plan
from trainer_agent.agent.ranks import RankConnection
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.chunking import ALIGNMENT_BYTES, plan_segment
from trainer_agent.rank.gather import shared_slots
from trainer_agent.transports import SHARED_MEMORY
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

LAYOUT = Layout((TensorSpec("a", DType.F32, (2,)),))
MODEL = Layout(
    (
        TensorSpec("model.embed.weight", DType.F32, (2,)),
        TensorSpec("model.layers.0.q.weight", DType.F32, (10, 10)),
        TensorSpec("model.layers.1.q.weight", DType.F32, (10, 10)),
        TensorSpec("model.layers.1.experts.0.weight", DType.BF16, (20, 10)),
        TensorSpec("model.norm.weight", DType.BF16, (1,)),
        TensorSpec("lm_head.weight", DType.BF16, (1,)),
    )
)
"""Its second layer is the larger one: its expert belongs to it."""


class FakeConnection:
    """As much of a connection as a set looks at."""

    def __init__(self, rank: int, **changed: object) -> None:
        values: dict[str, object] = {
            "rank": rank,
            "world_size": 2,
            "model": "policy",
            "host_id": "h",
            "device_uuid": f"CPU-{rank}",
            "layout_digest": LAYOUT.digest,
        }
        self.join = rank_pb2.Join(**(values | changed))  # type: ignore[arg-type]
        self.rank = rank


def connection(rank: int, **changed: object) -> RankConnection:
    return cast(RankConnection, FakeConnection(rank, **changed))


def complete_set(*ranks: RankConnection) -> RankSet:
    made = RankSet(ranks[0].join, "policy")
    for rank in ranks:
        made.add(rank)
    for part in layout_to_parts(LAYOUT):
        made.add_part(rank_pb2.LayoutPartMessage(index=part.index, count=part.count, tensors=part.tensors))
    return made


# ---- the set ----


def test_a_set_is_complete_with_every_rank_and_the_layout() -> None:
    ranks = RankSet(connection(0).join, "policy")
    ranks.add(connection(0))
    assert (ranks.complete, ranks.missing) == (False, [1])
    assert complete_set(connection(0), connection(1)).complete


def test_a_hello_says_how_much_will_be_sent_from_declared_shapes() -> None:
    assert load_of(MODEL, 512) == fleet_pb2.Load(
        tensor_count=6, byte_count=8 + 3 * 400 + 4, chunk_bytes=512, largest_module_bytes=800, format="plain"
    )
    padding = plan_segment(MODEL, 512).byte_count - load_of(MODEL, 512).byte_count
    assert 0 <= padding < ALIGNMENT_BYTES * len(MODEL.tensors), "a rank's segment holds no more than it said"
    hello = complete_set(connection(0), connection(1)).hello("run", "trainer", 512)
    assert hello.load == fleet_pb2.Load(
        tensor_count=1, byte_count=8, chunk_bytes=512, largest_module_bytes=8, format="plain"
    )
    assert weight_update_pb2.TRANSPORT_SHARED_MEMORY in hello.transports
    assert weight_update_pb2.TRANSPORT_INLINE in hello.transports


@pytest.mark.parametrize(
    ("rank", "changed", "field"),
    [(1, {"world_size": 3}, "world_size"), (1, {"model": "critic"}, "model"), (0, {}, "rank"), (2, {}, "rank")],
)
def test_a_rank_of_another_set_is_refused(rank: int, changed: dict[str, object], field: str) -> None:
    ranks = RankSet(connection(0).join, "policy")
    ranks.add(connection(0))
    with pytest.raises(e.FrameInvalid) as raised:
        ranks.add(connection(rank, **changed))
    assert raised.value.field == field


def test_ranks_that_state_different_layouts_are_named() -> None:
    ranks = complete_set(connection(0), connection(1, layout_digest=b"x" * 32))
    error = ranks.disagreement()
    assert error is not None
    assert "rank 1: 787878787878" in str(error)
    assert complete_set(connection(0), connection(1)).disagreement() is None


def test_progress_grows_only_when_a_step_or_phase_moves() -> None:
    ranks = complete_set(connection(0), connection(1))
    for rank, step, phase in [(0, 1, "train"), (0, 1, "train"), (1, 1, "train"), (0, 1, "push"), (0, 2, "push")]:
        ranks.moved(rank, step, phase)
    assert ranks.progress == 4
    ranks.term = 7
    status = ranks.status()
    assert (status.term, status.step, status.phase) == (7, 1, "train")


def test_the_first_rank_that_is_gone_names_the_end_of_the_set() -> None:
    members = [connection(0), connection(1)]
    ranks = complete_set(*members)
    assert ranks.remove(members[1], "killed")
    assert not ranks.remove(members[1], "again")
    assert ranks.remove(members[0], "left")
    assert ranks.ended
    assert ranks.lost is not None
    assert ranks.lost.peer == "rank 1"


# ---- plans ----


def assignment(engine_id: str, ranks: list[int], leader: int, devices: int | None = None) -> fleet_pb2.Assignment:
    uuids = [f"CPU-{r}" for r in ranks[:devices]]
    engine = version_pb2.EngineRef(engine_id=engine_id, incarnation="i")
    return fleet_pb2.Assignment(engine=engine, ranks=ranks, leader=leader, device_uuids=uuids, transport=SHARED_MEMORY)


@pytest.mark.parametrize(
    ("ranks", "leader", "devices"),
    [([], 0, None), ([1, 0], 1, None), ([0, 1], 1, None), ([0, 2], 0, None), ([0, 0], 0, None), ([0, 1], 0, 1)],
)
def test_a_plan_whose_leader_is_not_the_lowest_of_known_ranks_is_refused(
    ranks: list[int], leader: int, devices: int | None
) -> None:
    with pytest.raises(e.SlotMismatch):
        check_plan(fleet_pb2.Plan(assignments=[assignment("e", ranks, leader, devices)]), world_size=2)


def test_each_rank_gets_its_part_and_everybody_the_shared_slots_in_one_order() -> None:
    plan = fleet_pb2.Plan(
        revision=4,
        digest=b"d" * 32,
        assignments=[assignment("e2", [1, 2], 1), assignment("e0", [0], 0), assignment("e1", [1, 2], 1)],
    )
    whole = push_plan(fleet_pb2.BeginUpdateResponse(update_id="u", plan=plan), 1 << 20, keep_whole=False)
    parts = [for_rank(whole, rank, sequence=9) for rank in range(3)]
    assert [[a.engine.engine_id for a in p.assignments] for p in parts] == [["e0"], ["e2", "e1"], ["e2", "e1"]]
    assert {p.sequence for p in parts} == {9}
    orders = [[(s.engine_id, s.ranks) for s in shared_slots(p)] for p in parts]
    assert orders == [[("e1", (1, 2))]] * 3


# ---- outcomes ----


def test_a_failed_update_names_every_engines_outcome_and_words() -> None:
    stream_errors: dict[str, e.WeightplaneError] = {"e1": e.UnknownTensor(names=["x"])}
    error = outcome.update_failed(state(FAILED, e0="CHECKSUM_MISMATCH", e1=""), "because", stream_errors)
    assert error.version == "1.5"
    assert "e0 ABORTED (CHECKSUM_MISMATCH: why)" in error.outcomes
    assert "e1 ABORTED (UNKNOWN_TENSOR: the engine's model has no tensor of these names: x)" in error.outcomes


def test_of_a_large_fleet_those_with_an_error_are_named_first_and_the_rest_is_counted() -> None:
    engines = {f"e{i}": "CHECKSUM_MISMATCH" if i == 150 else "" for i in range(200)}
    error = outcome.update_failed(state(FAILED, **engines), "because", {})
    assert error.outcomes.startswith("e150 ABORTED (CHECKSUM_MISMATCH: why); e0 ABORTED; e1 ABORTED; e2 ABORTED; ")
    assert error.outcomes.endswith(" and 195 more")


def test_only_a_version_that_the_fleet_serves_is_a_result_without_error() -> None:
    committed = outcome.decided(state(fleet_pb2.UPDATE_PHASE_DEGRADED), released=True)
    assert committed is not None
    assert not committed.error_reason
    for phase in (FAILED, fleet_pb2.UPDATE_PHASE_GO, fleet_pb2.UPDATE_PHASE_PREPARING):
        assert outcome.decided(state(phase), released=True) is None


# ---- the last life ----


def test_the_last_life_is_proven_dead_only_when_all_of_it_is(tmp_path: Path) -> None:
    life = LastLife(tmp_path)
    assert life.ended_incarnation() == ""
    life.begin("one", [os.getpid()])
    assert LastLife(tmp_path).ended_incarnation() == ""
    note = {"incarnation": "one", "processes": [[os.getpid(), 1], [2**22 + 5, 7]], "host_id": host_id()}
    (tmp_path / FILE_NAME).write_text(json.dumps(note))
    assert LastLife(tmp_path).ended_incarnation() == "one"


def test_inv7_a_life_on_another_host_is_not_proven_dead_from_here(tmp_path: Path) -> None:
    """Its directory lies on storage that hosts share: process ids say nothing of a host that cannot be seen."""
    note = {"incarnation": "one", "processes": [[2**22 + 5, 7]], "host_id": "another"}
    (tmp_path / FILE_NAME).write_text(json.dumps(note))
    assert LastLife(tmp_path).ended_incarnation() == ""


def test_a_note_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert LastLife(tmp_path).ended_incarnation() == ""


def test_a_reused_process_id_is_another_life() -> None:
    at = start_time(os.getpid())
    assert at is not None
    assert start_time(2**22 + 5) is None


# ---- settings ----


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"coordinator": ""}, "coordinator"),
        ({"trainer_id": "a b"}, "trainer_id"),
        ({"nproc_per_node": 0}, "nproc_per_node"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"chunk_bytes": 10}, "chunk_bytes"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"checkpoint_keep": 0}, "checkpoint_keep"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changed: dict[str, object], field: str) -> None:
    values: dict[str, object] = {"coordinator": "localhost:1"}
    with pytest.raises(e.InvalidRequest) as raised:
        TrainerSettings(**(values | changed))  # type: ignore[arg-type]
    assert raised.value.field == field
