"""What an engine agent answers rollout code: pins, several samples, scores, aborts; over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core import errors as e
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.errors import from_rpc_error
from engine_agent.memory.model import expert_of, score_of
from engine_agent.services import rollout_service
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN
from tests.support.refusals import refusal
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2, lifecycle_pb2, lifecycle_pb2_grpc, rollout_pb2, rollout_pb2_grpc, version_pb2

PROMPT = [1, 2, 3, 4]
PATIENCE = int(PATIENCE_SECONDS)


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, memory={"seconds_per_token": 0.001}) as running:
        yield running


async def stub(fleet: CaseFleet) -> Any:
    return rollout_pb2_grpc.RolloutStub(fleet.channel((await fleet.engine("e0")).endpoint))


def ask(max_tokens: int, pin: rollout_pb2.Pin | None = None, **fields: Any) -> rollout_pb2.GenerateRequest:
    request = rollout_pb2.GenerateRequest(
        run_id=RUN,
        model="policy",
        prompt_token_ids=PROMPT,
        sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens, **fields),
        pin=pin,
    )
    request.wait.FromSeconds(PATIENCE)
    return request


def score(pin: rollout_pb2.Pin | None = None, tokens: list[int] | None = None) -> rollout_pb2.ScoreRequest:
    request = rollout_pb2.ScoreRequest(run_id=RUN, model="policy", token_ids=tokens or PROMPT, pin=pin)
    request.wait.FromSeconds(PATIENCE)
    return request


async def collect(call: Any) -> dict[int, tuple[list[int], rollout_pb2.Finish]]:
    """By sample: tokens and finish. Raises the typed error."""
    found: dict[int, tuple[list[int], rollout_pb2.Finish]] = {}
    try:
        async for response in call:
            tokens, _ = found.setdefault(response.index, ([], rollout_pb2.Finish()))
            tokens += response.token_ids
            found[response.index] = (tokens, response.finish)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return found


async def test_n_samples_of_one_prompt_come_with_their_index_and_their_spans(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    found = await collect((await stub(fleet)).Generate(ask(5, n=3), timeout=PATIENCE))
    assert sorted(found) == [0, 1, 2]
    for tokens, finish in found.values():
        assert len(tokens) == 5
        assert [(s.version.number, s.start, s.end) for s in finish.spans] == [(1, 0, 5)]
    await eventually(lambda: runs(fleet, 0))


async def runs(fleet: CaseFleet, count: int) -> bool:
    return (await fleet.status("e0")).live_requests == count


async def test_a_caller_that_goes_away_leaves_no_sample_of_its_own_running(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    call = (await stub(fleet)).Generate(ask(4000, n=4), timeout=PATIENCE)
    await call.read()
    call.cancel()
    await eventually(lambda: runs(fleet, 0))


async def test_a_deadline_reaches_the_engine(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    with pytest.raises(e.WeightplaneError):
        await collect((await stub(fleet)).Generate(ask(4000), timeout=0.2))
    await eventually(lambda: runs(fleet, 0))


async def counts(fleet: CaseFleet, live: int, waiting: int) -> bool:
    """As its agent says, and as the coordinator heard it."""
    said = await fleet.status("e0"), (await fleet.engine("e0")).status
    return {(status.live_requests, status.waiting_requests) for status in said} == {(live, waiting)}


async def test_requests_that_wait_outside_the_gate_are_counted_until_they_enter_or_go_away(
    fleet: CaseFleet, hands: Hands
) -> None:
    hands["e0"].limit_samples(0)
    waiting = ask(2)
    waiting.wait.FromSeconds(PATIENCE)
    calls = [(await stub(fleet)).Generate(waiting, timeout=PATIENCE) for _ in range(3)]
    answers = [asyncio.ensure_future(collect(call)) for call in calls]
    await eventually(lambda: counts(fleet, live=0, waiting=3))
    calls[0].cancel()
    await eventually(lambda: counts(fleet, live=0, waiting=2))
    await fleet.deliver(Weights())
    await eventually(lambda: counts(fleet, live=2, waiting=0))
    hands["e0"].limit_samples(None)
    await asyncio.gather(*answers, return_exceptions=True)
    await eventually(lambda: counts(fleet, live=0, waiting=0))


async def test_an_engine_that_raises_what_nobody_planned_for_keeps_no_caller_waiting(
    fleet: CaseFleet, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.deliver(Weights())

    async def broken(*_: Any) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(type(hands["e0"].engine), "_step", broken)
    with pytest.raises(e.WeightplaneError, match="INTERNAL: internal error"):
        await collect((await stub(fleet)).Generate(ask(2), timeout=PATIENCE))
    await eventually(lambda: counts(fleet, live=0, waiting=0))


async def test_requests_beyond_the_engines_places_count_as_waiting(tmp_path: Path, hands: Hands) -> None:
    async with case_fleet(tmp_path, memory={"max_requests": 2}) as fleet:
        await fleet.deliver(Weights())
        hands["e0"].limit_samples(0)
        answers = [
            asyncio.ensure_future(collect((await stub(fleet)).Generate(ask(2), timeout=PATIENCE))) for _ in range(5)
        ]
        await eventually(lambda: counts(fleet, live=5, waiting=3))
        hands["e0"].limit_samples(None)
        await asyncio.gather(*answers)
        await eventually(lambda: counts(fleet, live=0, waiting=0))


SAYS_MORE = {"expert_layers": 3, "says_masks": True}


async def test_samples_come_with_experts_and_masks_from_engines_that_say_them_and_engines_say_that_they_do(
    tmp_path: Path, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_service, "ROUTED_PART_BYTES", 64)
    async with case_fleet(tmp_path, memory=SAYS_MORE) as fleet, RolloutClient(fleet.address, run_id=RUN) as rollouts:
        await fleet.deliver(Weights())
        sample = await rollouts.generate(PROMPT, SamplingSettings(max_tokens=30))
        assert sample.sampling_masks == tuple((token,) for token in sample.tokens)
        routed = sample.routed_experts
        assert routed is not None
        assert (routed.first_token, routed.tokens) == (0, len(PROMPT) + 29)
        for place in range(routed.tokens):
            assert routed.of(place) == tuple((expert_of(place, layer),) for layer in range(3))
        says = {"processed_logprobs", "routed_experts", "sampling_mask"}
        assert set((await fleet.engine("e0")).capabilities) >= says
        assert set((await get_status(fleet)).capabilities) >= says


async def get_status(fleet: CaseFleet) -> lifecycle_pb2.GetStatusResponse:
    channel = fleet.channel((await fleet.engine("e0")).endpoint)
    asked = lifecycle_pb2.GetStatusRequest(run_id=RUN)
    answer = await lifecycle_pb2_grpc.LifecycleStub(channel).GetStatus(asked, timeout=PATIENCE)
    assert isinstance(answer, lifecycle_pb2.GetStatusResponse)
    return answer


async def test_an_engine_that_says_neither_leaves_both_out_and_its_logprobs_are_of_what_was_drawn_from(
    fleet: CaseFleet, hands: Hands
) -> None:
    await fleet.deliver(Weights())
    async with RolloutClient(fleet.address, run_id=RUN) as rollouts:
        sample = await rollouts.generate(PROMPT, SamplingSettings(max_tokens=3))
    assert (sample.sampling_masks, sample.routed_experts) == ((), None)
    said = set((await get_status(fleet)).capabilities)
    assert "processed_logprobs" in said
    assert not said & {"routed_experts", "sampling_mask"}


async def test_a_pin_of_lag_is_judged_in_commits_and_not_in_numbers(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    begun = await fleet.begin()  # a number that is burned
    give_up = fleet_pb2.AbortUpdateRequest(run_id=RUN, update_id=begun.update_id, term=fleet.term)
    await fleet.fleet.AbortUpdate(give_up, timeout=PATIENCE)
    await fleet.deliver(Weights())
    found = await collect((await stub(fleet)).Generate(ask(2, rollout_pb2.Pin(max_lag=0)), timeout=PATIENCE))
    assert found[0][1].spans[0].version.number == 3


async def test_an_exact_pin_on_another_version_is_refused_with_both(fleet: CaseFleet, hands: Hands) -> None:
    state = await fleet.deliver(Weights())
    other = version_pb2.WeightVersion(term=state.version.term, number=7)
    request = ask(2, rollout_pb2.Pin(exact_version=other))
    request.wait.FromMilliseconds(300)
    with pytest.raises(e.VersionUnavailable, match=rf"exactly {state.version.term}\.7, the engine applied"):
        await collect((await stub(fleet)).Generate(request, timeout=PATIENCE))


async def test_inv11_an_install_ends_a_sample_of_an_exact_version_with_the_tokens_it_has(
    fleet: CaseFleet, hands: Hands
) -> None:
    first = await fleet.deliver(Weights())
    service = await stub(fleet)
    pinned = asyncio.ensure_future(
        collect(service.Generate(ask(4000, rollout_pb2.Pin(exact_version=first.version)), timeout=PATIENCE))
    )
    free = service.Generate(ask(4000), timeout=PATIENCE)
    await free.read()
    await eventually(lambda: runs(fleet, 2))
    await fleet.deliver(Weights())
    tokens, finish = (await pinned)[0]
    assert finish.reason == rollout_pb2.FINISH_REASON_VERSION_CHANGED
    assert [(s.version.number, s.start, s.end) for s in finish.spans] == [(1, 0, len(tokens))]
    free.cancel()
    await eventually(lambda: runs(fleet, 0))


async def test_a_score_has_one_number_for_each_token_but_the_first_and_one_version(
    fleet: CaseFleet, hands: Hands
) -> None:
    await fleet.deliver(Weights())
    answer = await (await stub(fleet)).Score(score(), timeout=PATIENCE)
    engine = hands["e0"].engine
    assert engine is not None
    weights = engine._weights
    assert list(answer.logprobs) == pytest.approx([score_of(weights, PROMPT, i) for i in (1, 2, 3)])
    assert answer.version.number == 1


@pytest.mark.parametrize(("tokens", "problem"), [([1], "2 to 4095"), ([1, 256], "outside of the vocabulary")])
async def test_what_cannot_be_scored_is_refused_before_it_enters(
    fleet: CaseFleet, hands: Hands, tokens: list[int], problem: str
) -> None:
    await fleet.deliver(Weights())
    error = await refusal((await stub(fleet)).Score(score(tokens=tokens), timeout=PATIENCE))
    assert isinstance(error, e.InvalidRequest)
    assert problem in str(error)


@pytest.mark.parametrize("left_out", [0, 1])
async def test_a_missing_logprob_is_an_error_and_never_a_number(
    fleet: CaseFleet, hands: Hands, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.deliver(Weights())
    wrong = [(), (-1.0, float("nan"), -1.0)][left_out]
    monkeypatch.setattr(type(hands["e0"].engine), "_scores", lambda *_: wrong)
    error = await refusal((await stub(fleet)).Score(score(), timeout=PATIENCE))
    assert isinstance(error, e.ScoreIncomplete)
    assert (error.expected, error.got) == (3, [0, 2][left_out])


async def test_a_score_over_an_install_is_refused_whole(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    hands["e0"].limit_samples(0)
    running = asyncio.ensure_future((await stub(fleet)).Score(score(), timeout=PATIENCE))
    await eventually(lambda: runs(fleet, 1))
    await fleet.deliver(Weights())
    assert isinstance(await refusal(running), e.VersionChanged)


async def test_an_aborted_score_is_refused(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    hands["e0"].limit_samples(0)
    asked = score()
    asked.request_id = "mine"
    service = await stub(fleet)
    running = asyncio.ensure_future(service.Score(asked, timeout=PATIENCE))
    await eventually(lambda: runs(fleet, 1))
    named = rollout_pb2.AbortRequest(run_id=RUN, model="policy", request_ids=["mine", "nobody's"])
    assert list((await service.Abort(named, timeout=PATIENCE)).request_ids) == ["mine"]
    assert isinstance(await refusal(running), e.RequestAborted)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"multi_modal_data": {"image": "x"}}, "no images, sound or video"),
        ({"temperature": 1.0}, "a field of its own"),
        ({"stream_interval": 8}, "a field of its own"),
        ({"best_of": 2}, "no such field"),
    ],
)
async def test_a_sampling_field_that_the_engine_does_not_have_is_refused_by_name(
    fleet: CaseFleet, hands: Hands, extra: dict[str, Any], problem: str
) -> None:
    await fleet.deliver(Weights())
    request = ask(2)
    request.sampling.extra.update(extra)
    with pytest.raises(e.InvalidRequest, match=f"sampling.extra.{next(iter(extra))}.*{problem}"):
        await collect((await stub(fleet)).Generate(request, timeout=PATIENCE))
