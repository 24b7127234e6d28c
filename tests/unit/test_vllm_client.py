"""vLLM's four calls over a push: what they carry, in which order, and what they refuse. No fleet: a rank that notes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from controlplane.core.errors import InvalidRequest, LayoutInvalid, UpdateAborted, UpdateFailed, WeightplaneError
from controlplane.core.versions import Term, WeightVersion
from trainer_agent.adapters.vllm_client import WeightplaneSyncClient
from trainer_agent.adapters.vllm_source import whole_source
from trainer_agent.rank import PushReport, TrainerRank
from trainer_agent.source import ParamMeta

WEIGHTS = {"embed": torch.arange(6.0).view(3, 2), "norm": torch.ones(2), "head": torch.zeros(3, 2)}


class Theirs:
    """A source as vLLM has them. It reuses one buffer for all it yields, as nobody forbids it to."""

    def __init__(self, weights: dict[str, torch.Tensor], held: Sequence[str] | None = None) -> None:
        self.weights = weights
        self._held = held

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights.items()]

    def held_names(self) -> Sequence[str] | None:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(16)
        for name, tensor in self.weights.items():
            yield name, room[: tensor.numel()].view(tensor.shape).copy_(tensor)


class NotingRank:
    """In place of a TrainerRank: reads its source, and says what the fleet would."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.pushed: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.error: WeightplaneError | None = None
        self.closed = False

    def push(self, step: int) -> PushReport:
        self.pushed.append((step, {name: tensor.clone() for name, tensor in self.source}))
        if self.error:
            raise self.error
        return PushReport(WeightVersion(40 + len(self.pushed), Term(1)), step, "COMMITTED")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[NotingRank]:
    made: list[NotingRank] = []

    def join(coordinator: str | None, *, source: Any, **how: Any) -> NotingRank:
        made.append(NotingRank(source))
        return made[-1]

    monkeypatch.setattr(TrainerRank, "join", join)
    return made


def started(client: WeightplaneSyncClient, theirs: Theirs) -> None:
    client.watch(theirs)
    client.init_weight_transfer_engine({"packed": True})
    client.start_weight_update()


def info_of(weights: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    stated = {
        "names": list(weights),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
        "shapes": [list(t.shape) for t in weights.values()],
        "tensors": list(weights.values()),
    }
    return stated | changes


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(want) and all(torch.equal(got[n], want[n]) for n in want)


# ---- what they carry ----------------------------------------------------------------------------


def test_three_updates_in_any_number_of_parts_are_three_whole_pushes(ranks: list[NotingRank]) -> None:
    client, weights = WeightplaneSyncClient("nowhere:1"), dict(WEIGHTS)
    started(client, Theirs(weights))
    for update in range(1, 4):
        client.start_weight_update()
        now = {name: tensor + update for name, tensor in weights.items()}
        for part in (["head"], ["embed", "norm"]):
            client.update_weights(info_of({name: now[name] for name in part}))
        assert len(ranks[0].pushed) == update - 1, "nothing leaves before finish"
        client.finish_weight_update()
        assert client.report is not None
        assert (client.report.version.number, client.report.step) == (40 + update, update)
        assert equal(ranks[0].pushed[-1][1], now)


def test_memory_of_what_was_handed_over_may_be_written_again_at_once(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    mine = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    client.update_weights(info_of(mine))
    for tensor in mine.values():
        tensor.fill_(float("nan"))
    client.finish_weight_update()
    assert equal(ranks[0].pushed[0][1], WEIGHTS)


def test_a_watched_source_gives_what_update_info_does_not_bring(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    source = client.watch(Theirs(WEIGHTS))
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    handles = {key: value for key, value in info_of(WEIGHTS).items() if key != "tensors"} | {"ipc_handles": [{}] * 3}
    assert [name for name, _ in source] == list(WEIGHTS)
    client.update_weights(handles)
    client.finish_weight_update()
    assert equal(ranks[0].pushed[0][1], WEIGHTS)
    client.start_weight_update()
    with pytest.raises(LayoutInvalid, match="nor from the watched source: embed"):
        client.update_weights(handles)


def test_a_second_start_begins_anew(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of({name: t + 1 for name, t in WEIGHTS.items()}))
    client.start_weight_update()
    client.update_weights(info_of(WEIGHTS))
    client.finish_weight_update()
    assert equal(ranks[0].pushed[0][1], WEIGHTS)


def test_after_a_push_that_failed_everything_is_handed_over_again(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of(WEIGHTS))
    ranks[0].error = UpdateFailed(update_id="u", version="1.9", cause="no", outcomes="e0 FAILED")
    with pytest.raises(UpdateFailed):
        client.finish_weight_update()
    assert client.report is None
    with pytest.raises(InvalidRequest, match="no update was started"):
        client.finish_weight_update()


# ---- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["7", "step-7", ""])
def test_a_label_is_no_version_and_is_refused_before_anything_is_sent(ranks: list[NotingRank], label: str) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of(WEIGHTS))
    with pytest.raises(InvalidRequest, match=r"weight_version.*given by the coordinator"):
        client.finish_weight_update(weight_version=label)
    assert ranks[0].pushed == []
    client.finish_weight_update()
    assert len(ranks[0].pushed) == 1


def test_a_label_may_be_asked_to_be_the_trainers_step(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1", label_is_step=True)
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of(WEIGHTS))
    with pytest.raises(InvalidRequest, match="'step-7' is no step"):
        client.finish_weight_update("step-7")
    client.finish_weight_update("700")
    assert client.report is not None
    assert (client.report.version.number, client.report.step) == (41, 700)


# ---- refusals -----------------------------------------------------------------------------------


def test_m2_an_update_that_lacks_tensors_is_refused_with_their_names_and_may_be_completed(
    ranks: list[NotingRank],
) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of({"embed": WEIGHTS["embed"]}))
    with pytest.raises(LayoutInvalid, match="norm, head"):
        client.finish_weight_update()
    assert ranks[0].pushed == []
    client.update_weights(info_of({name: WEIGHTS[name] for name in ("norm", "head")}))
    client.finish_weight_update()
    assert equal(ranks[0].pushed[0][1], WEIGHTS)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"names": ["other"], "tensors": [torch.ones(2)], "dtype_names": ["float32"], "shapes": [[2]]}, "no such tensor"),
    (info_of({"norm": torch.ones(3)}), "the source states"),
    (info_of({"norm": torch.ones(2)}, shapes=[[3]]), "the source states"),
    (info_of({"norm": torch.ones(2, dtype=torch.float16)}), "the source states"),
    (info_of({"norm": torch.ones(2)}, dtype_names=["float16"]), "the source states"),
    (info_of({"embed": WEIGHTS["embed"]}), "twice"),
    (info_of({"norm": torch.ones(2)}, shapes=[]), "equally long"),
    ({"names": ["norm"], "tensors": [torch.ones(2)]}, "equally long"),
]


@pytest.mark.parametrize(("info", "problem"), WRONG)
def test_v5_after_a_part_that_was_refused_the_update_cannot_be_finished(
    ranks: list[NotingRank], info: dict[str, Any], problem: str
) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    client.update_weights(info_of({"embed": WEIGHTS["embed"]}))
    with pytest.raises((LayoutInvalid, InvalidRequest), match=problem):
        client.update_weights(info)
    with pytest.raises(UpdateAborted, match=problem):
        client.finish_weight_update()
    assert ranks[0].pushed == []
    client.start_weight_update()
    client.update_weights(info_of(WEIGHTS))
    client.finish_weight_update()
    assert len(ranks[0].pushed) == 1


def test_bytes_that_travel_beside_the_client_are_refused_before_they_are_waited_for(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    client.watch(Theirs(WEIGHTS))
    with pytest.raises(InvalidRequest, match="master_address, master_port"):
        client.init_weight_transfer_engine({"master_address": "here", "master_port": 1, "packed": True})
    assert ranks == []


def test_several_ranks_are_sent_to_the_engine_that_pushes_on_all_of_them(
    ranks: list[NotingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    client = WeightplaneSyncClient("nowhere:1")
    client.watch(Theirs(WEIGHTS))
    with pytest.raises(InvalidRequest, match=r'2 ranks push together.*"weightplane"'):
        client.init_weight_transfer_engine({})
    assert ranks == []


CALLS: list[Callable[[WeightplaneSyncClient], object]] = [
    lambda client: client.init_weight_transfer_engine({}),
    lambda client: client.start_weight_update(),
    lambda client: client.update_weights({}),
    lambda client: client.finish_weight_update(),
    lambda client: client.push(),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_out_of_order_are_refused(ranks: list[NotingRank], call: Callable[[Any], object]) -> None:
    with pytest.raises(InvalidRequest):
        call(WeightplaneSyncClient("nowhere:1"))


def test_payloads_by_worker_are_refused(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    with pytest.raises(InvalidRequest, match="by worker rank"):
        client.update_weights([info_of(WEIGHTS)])


def test_an_update_that_was_not_started_takes_nothing(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    client.watch(Theirs(WEIGHTS))
    client.init_weight_transfer_engine({})
    with pytest.raises(InvalidRequest, match="no update was started"):
        client.update_weights(info_of(WEIGHTS))


def test_one_client_joins_once_and_leaves(ranks: list[NotingRank]) -> None:
    client = WeightplaneSyncClient("nowhere:1")
    started(client, Theirs(WEIGHTS))
    with pytest.raises(InvalidRequest, match="make one for each engine"):
        client.init_weight_transfer_engine({})
    client.shutdown_weight_transfer_engine()
    assert ranks[0].closed


def test_a_source_that_holds_a_part_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(LayoutInvalid, match="norm, head"):
        whole_source(Theirs(WEIGHTS, held=["embed"]))
    source = whole_source(Theirs(WEIGHTS, held=list(WEIGHTS)), ties=[("tied", "embed")])
    assert source.ties() == (("tied", "embed"),)


# ---- vLLM's own code ----------------------------------------------------------------------------


@pytest.mark.real
def test_the_client_has_every_method_of_vllms_protocol_with_the_same_parameters() -> None:
    base: Any = pytest.importorskip("vllm.distributed.weight_transfer.base")
    assert isinstance(WeightplaneSyncClient("nowhere:1"), base.VLLMWeightSyncClient)
    theirs = {n: f for n, f in vars(base.VLLMWeightSyncClient).items() if inspect.isfunction(f) and n[0] != "_"}
    assert set(theirs) == {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    }
    for name, function in theirs.items():
        ours = getattr(WeightplaneSyncClient, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(function).parameters), name


@pytest.mark.real
def test_vllms_stock_ipc_engine_pushes_what_its_source_yields(
    ranks: list[NotingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code, but for the export to CUDA, which this machine may not have: nobody looks at those handles."""
    stock: Any = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    factory: Any = pytest.importorskip("vllm.distributed.weight_transfer.factory")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"uuid": "u"}))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(stock, "reduce_tensor", lambda tensor: (None, ("a handle",)))
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    client = WeightplaneSyncClient("nowhere:1")
    engine = factory.WeightTransferTrainerFactory.trainer_init(
        stock.IPCTrainerInitInfo(rank=0), client=client, source=client.watch(Theirs(weights))
    )
    for step in range(1, 4):
        weights["norm"] += 1
        engine.send_weights()
        assert ranks[0].pushed[-1][0] == step
        assert equal(ranks[0].pushed[-1][1], weights)


@pytest.mark.real
def test_vllms_factory_makes_our_engine_and_refuses_another_client(ranks: list[NotingRank]) -> None:
    pytest.importorskip("vllm.distributed.weight_transfer.factory")
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from trainer_agent.adapters.vllm_engine import WeightplaneTrainerInitInfo, register

    register()
    register()
    client, source = WeightplaneSyncClient("nowhere:1"), Theirs(WEIGHTS)
    make = WeightTransferTrainerFactory.trainer_init
    for init_info, other, theirs, problem in (
        (WeightplaneTrainerInitInfo(rank=0), HTTPVLLMWeightSyncClient("http://x"), source, "beside their agents"),
        (WeightplaneTrainerInitInfo(rank=0), client, None, "a push needs one"),
        (WeightplaneTrainerInitInfo(rank=1), client, source, "this process is rank 0 of 1, not 1"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            make(init_info, client=other, source=theirs)
    assert ranks == []
    engine = make(WeightplaneTrainerInitInfo(rank=0, ties=[("tied", "embed")]), client=client, source=source)
    engine.send_weights()
    engine.send_weights(70)
    assert [(step, equal(got, WEIGHTS)) for step, got in ranks[0].pushed] == [(1, True), (70, True)]
    assert ranks[0].source.ties() == (("tied", "embed"),)
    assert engine.report.version.number == 42
    engine.shutdown()
    assert ranks[0].closed
