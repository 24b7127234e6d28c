"""Ranks that do what a test tells them, one order after the other, and answer each: `ObedientRanks`.

The process reads one JSON order a line, and says one JSON line for each: `did`, or `raised` with the error's own words.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine_agent.vllm.checkpoint import HEAD_NAME
from tests.support.eventually import eventually
from tests.support.tiny_rank import EMBEDDING_NAME
from tests.support.toy_rank import say, tensors_of
from tests.support.toy_trainer import RankProcess, ToyTrainer
from trainer_agent import wire
from trainer_agent.rank import PendingPush, PushReport, TrainerRank
from trainer_agent.source import ParamMeta

WITHIN = 180.0


class Weights:
    """A model whose weights change in place, as a training step changes them."""

    def __init__(self, model: Path | None = None) -> None:
        """Made up, or those of a directory that `make_tiny_model` made."""
        self.tensors = tensors_of(0) if model is None else load_file(model / "model.safetensors")
        self._ties = [("tied", "embed")] if model is None else [(HEAD_NAME, EMBEDDING_NAME)]
        self._learns = ("embed", "head") if model is None else tuple(self.tensors)
        self.stands_still_until: Path | None = None
        """A file that an iteration waits for, in its middle."""
        self.collective = False
        """An iteration meets the other ranks at each tensor, as those of a model that is split over ranks do."""

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def ties(self) -> Sequence[tuple[str, str]]:
        return self._ties

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if self.collective:
                dist.barrier()
            if name == "layer.1" and self.stands_still_until is not None:
                stand_still(self.stands_still_until)
            yield name, tensor

    def learn(self, step: int, elements: int) -> None:
        """As reinforcement learning does: a few elements change, in some of the tensors."""
        generator = torch.Generator().manual_seed(step)
        for name in self._learns:
            flat = self.tensors[name].view(-1)
            flat[torch.randperm(len(flat), generator=generator)[:elements]] += 0.5

    def become(self, step: int) -> None:
        for name, tensor in tensors_of(step).items():
            self.tensors[name].copy_(tensor)


def stand_still(until: Path) -> None:
    """A process that lives and does not move."""
    while not until.exists():
        time.sleep(0.02)


class Obedience:
    """What a rank can be told."""

    def __init__(self, rank: TrainerRank, weights: Weights) -> None:
        self._rank = rank
        self._weights = weights
        self._pending: dict[int, PendingPush] = {}

    def train(self, step: int) -> dict[str, Any]:
        """A step: the weights become those of `step`, and the agent hears of it."""
        with self._rank.phase("train"):
            self._rank.set_step(step)
            self._weights.become(step)
        return {}

    def meet(self, at: str, world: int) -> dict[str, Any]:
        """From now on the weights are read together."""
        number = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{at}", rank=number, world_size=world)
        self._weights.collective = True
        return {}

    def stand_still(self, until: str) -> dict[str, Any]:
        """In a step that does not end."""
        with self._rank.phase("train"):
            stand_still(Path(until))
        return {}

    def push_standing_still(self, step: int, until: str) -> dict[str, Any]:
        """In the middle of reading the weights."""
        self._weights.stands_still_until = Path(until)
        return self.push(step)

    def push(self, step: int, **how: Any) -> dict[str, Any]:
        self._weights.become(step)
        return _told(self._rank.push(step, **how))

    def learn_and_push(self, step: int, elements: int = 20, **how: Any) -> dict[str, Any]:
        self._weights.learn(step, elements)
        return _told(self._rank.push(step, **how))

    def push_async(self, step: int) -> dict[str, Any]:
        """What is pushed becomes something else at once."""
        self._weights.become(step)
        self._pending[step] = self._rank.push_async(step)
        self._weights.become(-1)
        return {}

    def learn_and_push_async(self, step: int, elements: int = 20) -> dict[str, Any]:
        """What is pushed is trained on at once."""
        self._weights.learn(step, elements)
        self._pending[step] = self._rank.push_async(step)
        self._weights.learn(-step, elements)
        return {}

    def done(self, step: int) -> dict[str, Any]:
        return {"done": self._pending[step].done}

    def released(self, step: int, **how: Any) -> dict[str, Any]:
        self._pending[step].released(**how)
        return {}

    def applied(self, step: int, **how: Any) -> dict[str, Any]:
        return _told(self._pending[step].applied(**how))

    def serving(self, step: int, **how: Any) -> dict[str, Any]:
        return _told(self._pending[step].serving(**how))

    def fork(self, step: int) -> dict[str, Any]:
        """What a forked child meets that asks for the parent's push."""
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            try:
                self._pending[step].applied(1)
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            return {"child": answer.read()}


def _told(report: PushReport) -> dict[str, Any]:
    return {
        "version": report.version.number,
        "status": report.status,
        "outcomes": report.outcomes,
        "serving": sorted(report.serving),
    }


def main() -> None:
    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    model = how.pop("model_directory", None)
    weights = Weights(Path(model) if model else None)
    with TrainerRank.join(source=weights, **how) as rank:
        say(event="joined", term=rank.term)
        obedience = Obedience(rank, weights)
        for line in sys.stdin:
            order = json.loads(line)
            number = order.pop("number")
            try:
                say(event="did", number=number, **getattr(obedience, order.pop("do"))(**order))
            except Exception as error:
                notes = getattr(error, "__notes__", [])
                reason = getattr(error, "reason", type(error).__name__)
                stacks = getattr(error, "stacks", "")
                say(event="raised", number=number, reason=reason, text=str(error), notes=notes, stacks=stacks)
                if reason == "STALE_TERM":
                    raise


class ObedientRanks:
    """All ranks of one life."""

    def __init__(self, ranks: list[RankProcess]) -> None:
        self.ranks = ranks
        self._orders = 0

    @classmethod
    async def start(
        cls, trainer: ToyTrainer, world: int = 2, *, environment: Mapping[str, str] | None = None, **join: Any
    ) -> ObedientRanks:
        """Started, and joined. `model_directory`: whose weights they begin with."""
        socket = {wire.RANK_SOCKET_VARIABLE: str(trainer.directory / "ranks.sock"), "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(world):
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.support.obedient",
                json.dumps({"push_timeout": 60.0} | join),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **ids, **socket, **(environment or {})},
            )
            ranks.append(RankProcess(process))
        trainer.ranks = ranks
        made = cls(ranks)
        await eventually(lambda: all(r.said("joined") for r in ranks), within=WITHIN)
        return made

    async def all(self, do: str, **how: Any) -> list[dict[str, Any]]:
        """Every rank's answer."""
        return await self.answers(*(self.tell(i, do, **how) for i in range(len(self.ranks))))

    def tell(self, rank: int, do: str, **how: Any) -> int:
        """Give an order; its number."""
        self._orders += 1
        order = {"do": do, "number": self._orders} | how
        stdin = self.ranks[rank].process.stdin
        assert stdin is not None
        stdin.write(f"{json.dumps(order)}\n".encode())
        return self._orders

    async def answers(self, *numbers: int) -> list[dict[str, Any]]:
        await eventually(lambda: all(self.answer(n) for n in numbers), within=WITHIN)
        return [a for n in numbers if (a := self.answer(n)) is not None]

    def answer(self, number: int) -> dict[str, Any] | None:
        """What was answered to an order, if it was."""
        lines = [line for r in self.ranks for line in r.lines if line.get("number") == number]
        return lines[0] if lines else None

    async def leave(self) -> list[int]:
        """No more orders: the ranks end. Their exit codes."""
        for rank in self.ranks:
            with suppress(ConnectionError):
                assert rank.process.stdin is not None
                rank.process.stdin.close()
        return [await rank.code() for rank in self.ranks]


if __name__ == "__main__":
    main()
