"""Weights that are not one set of plain numbers: 8-bit floats with their scales, and a draft model beside the model.
A rank pushes them over real gRPC to in-memory engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from controlplane import failpoints
from controlplane.core.errors import FormatMismatch, UpdateFailed
from controlplane.core.layout import FP8_BLOCK, DType
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemoryEngine, MemorySettings, weights_of
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import ThreadRank, tokens_of
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from trainer_agent.rank.report import PushReport
from trainer_agent.source import WeightSource
from trainer_agent.sources.iterable import IterableSource
from trainer_agent.sources.with_draft import WithDraft

Tensors = dict[str, torch.Tensor]


def fp8_of(step: int) -> Tensors:
    """A weight in 8-bit floats, the scales of its blocks, and a norm that is not quantised."""
    weight = (torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32) % 13 + step).to(torch.float8_e4m3fn)
    return {"q.weight": weight, "q.weight_scale_inv": torch.full((4, 2), 0.5 + step), "norm.weight": torch.ones(32)}


FP8_ENGINE = MemorySettings(
    tensors={n: tuple(t.shape) for n, t in fp8_of(0).items()},
    dtypes={"q.weight": DType.F8_E4M3},
    weights_format=FP8_BLOCK,
)


def model_of(step: int) -> Tensors:
    return {"embed": torch.full((8, 4), float(step)), "layer": torch.full((5,), 1.0 + step)}


def draft_of(step: int) -> Tensors:
    """One name of it is the model's, with another shape."""
    return {"layer": torch.full((2, 3), 2.0 + step), "fc": torch.full((4,), 3.0 + step)}


DRAFT_ENGINE = MemorySettings(
    tensors={n: tuple(t.shape) for n, t in model_of(0).items()},
    draft_tensors={"embed": (8, 4)} | {n: tuple(t.shape) for n, t in draft_of(0).items()},
)


class Step:
    """What the trainer has trained, for its sources."""

    def __init__(self) -> None:
        self.number = 0

    def source(self, tensors: Callable[[int], Tensors], **how: str) -> IterableSource:
        return IterableSource(
            IterableSource(None, lambda: tensors(0).items()).metadata(),
            lambda: tensors(self.number).items(),
            **how,  # type: ignore[arg-type]
        )

    def with_draft(self) -> WithDraft:
        return WithDraft(self.source(model_of), self.source(draft_of), shared=["embed"])


@dataclass
class Both:
    """Engines, and a rank that pushes to them."""

    fleet: LocalFleet
    rank: ThreadRank
    step: Step

    async def push(self, step: int) -> PushReport:
        self.step.number = step
        return await asyncio.to_thread(self.rank.rank.push, step)

    async def speaks(self, engine_id: str, tensors: Tensors) -> bool:
        tokens, _, _ = await self.fleet.generate(engine_id, 4)
        return tokens == tokens_of({n: t.view(torch.uint8) for n, t in tensors.items()}, 4)


@asynccontextmanager
async def both_sides(
    directory: Path, source: Callable[[Step], WeightSource], engines: Mapping[str, MemorySettings]
) -> AsyncIterator[Both]:
    step = Step()
    async with fleet_for_toys(directory, engines=0) as fleet:
        for engine_id, memory in engines.items():
            state = directory / "engines"
            settings = EngineSettings(engine_id, fleet.address, RUN, state_dir=state, backend="memory", memory=memory)
            fleet._start(engine_id, run_engine, settings)
        await fleet.wait_for_engines(len(engines))
        async with toy_trainer(fleet.address) as trainer:
            rank = await ThreadRank.join(trainer.directory / "ranks.sock", source(step))  # type: ignore[arg-type]
            try:
                yield Both(fleet, rank, step)
            finally:
                await rank.close()


# ---- formats ----------------------------------------------------------------------------------------------------


def eight_bit(step: Step) -> WeightSource:
    return step.source(fp8_of, weights_format=FP8_BLOCK)


async def test_m3_an_engine_of_their_format_takes_8_bit_floats_and_their_scales_bit_for_bit(tmp_path: Path) -> None:
    async with both_sides(tmp_path, eight_bit, {"blocks": FP8_ENGINE}) as both:
        for number in (1, 2, 3):
            assert (await both.push(number)).outcomes == {"blocks": "APPLIED"}
            assert await both.speaks("blocks", fp8_of(number))


async def test_an_engine_of_another_format_is_told_beforehand_and_no_number_is_used(tmp_path: Path) -> None:
    plain = replace(FP8_ENGINE, weights_format="plain")
    async with both_sides(tmp_path, eight_bit, {"blocks": FP8_ENGINE, "plain": plain}) as both:
        assert "format:fp8-block" in (await both.fleet.engine("blocks")).capabilities
        with pytest.raises(FormatMismatch, match=r"in format plain .plain., the layout is in fp8-block"):
            await both.push(1)
        assert [await both.fleet.applied(e) for e in ("blocks", "plain")] == [None, None]
        await both.fleet.stop("plain")
        assert (await both.push(1)).version.number == 1


async def test_an_engine_refuses_another_format_itself_and_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose agent does not say which it takes."""
    monkeypatch.setattr("engine_agent.life.engine_life.TAKES_FORMAT", "silent:")
    plain = replace(FP8_ENGINE, weights_format="plain")
    async with both_sides(tmp_path, eight_bit, {"blocks": FP8_ENGINE, "plain": plain}) as both:
        with pytest.raises(UpdateFailed, match=r"plain ABORTED .FORMAT_MISMATCH: .* in format plain.* in fp8-block"):
            await both.push(1)
        assert [await both.fleet.applied(e) for e in ("blocks", "plain")] == [None, None]


async def test_an_engine_of_8_bit_floats_refuses_the_same_bytes_as_plain_ones(tmp_path: Path) -> None:
    async with both_sides(tmp_path, lambda step: step.source(fp8_of), {"blocks": FP8_ENGINE}) as both:
        with pytest.raises(FormatMismatch, match=r"in format fp8-block.* in plain"):
            await both.push(1)
        assert await both.fleet.applied("blocks") is None


# ---- targets ----------------------------------------------------------------------------------------------------


def digest_of(tensors: Tensors) -> bytes:
    return weights_of({n: hashlib.sha256(t.numpy().tobytes()).digest() for n, t in tensors.items()})


def drafted(step: int) -> bytes:
    """The draft of a step: its own tensors, and the embedding that it shares with the model."""
    return digest_of(draft_of(step) | {"embed": model_of(step)["embed"]})


async def test_model_and_draft_come_with_one_update_and_one_tensor_is_both(
    tmp_path: Path, engines: list[MemoryEngine]
) -> None:
    async with both_sides(tmp_path, Step.with_draft, {"e0": DRAFT_ENGINE}) as both:
        for number in (1, 2, 3):
            assert (await both.push(number)).outcomes == {"e0": "APPLIED"}
            assert await both.speaks("e0", model_of(number))
            assert engines[0].draft_weights == drafted(number)


@pytest.mark.parametrize("after", [1, 3], ids=["in_the_model", "in_the_draft"])
async def test_inv4_an_install_that_failed_publishes_neither_and_its_repetition_heals_both(
    tmp_path: Path, engines: list[MemoryEngine], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    async with both_sides(tmp_path, Step.with_draft, {"e0": DRAFT_ENGINE}) as both:
        await both.push(1)
        (tmp_path / "worker.install").write_text(f"raise after={after}")
        report = await both.push(2)
        assert report.version.number == 3  # number 2 was left half done, and given up
        assert await both.speaks("e0", model_of(2))
        assert engines[0].draft_weights == drafted(2)


async def test_a_draft_for_an_engine_that_has_none_is_refused(tmp_path: Path) -> None:
    without = replace(DRAFT_ENGINE, draft_tensors={})
    async with both_sides(tmp_path, Step.with_draft, {"e0": without}) as both:
        with pytest.raises(UpdateFailed, match=r"UNKNOWN_TENSOR: .*draft:embed"):
            await both.push(1)


async def test_an_update_without_the_draft_leaves_it_as_it_is(tmp_path: Path, engines: list[MemoryEngine]) -> None:
    async with both_sides(tmp_path, lambda step: step.source(model_of), {"e0": DRAFT_ENGINE}) as both:
        before = engines[0].draft_weights
        assert (await both.push(1)).outcomes == {"e0": "APPLIED"}
        assert await both.speaks("e0", model_of(1))
        assert engines[0].draft_weights == before
