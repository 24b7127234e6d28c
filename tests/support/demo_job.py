"""The demo's training script without a fleet: pushes go into a transformers model, which also samples.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… python -m tests.support.demo_job --model-dir DIR … (options of the demo's script)

All else is real: Megatron, its optimizer and checkpoints, the export, the training loop. What the "engine" holds at
the end is written as `engine.safetensors` beside the events, to be compared with what the trainer exports.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from controlplane.core.versions import Term, WeightVersion
from trainer_agent.demo import grpo
from trainer_agent.demo.rollout_worker import Ask, Rollout


class Engine:
    """One transformers model on rank 0."""

    def __init__(self, model_dir: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
        self.number = 0

    def install(self, name: str, tensor: Any) -> None:
        import torch

        with torch.no_grad():
            self.model.get_parameter(name).copy_(tensor)

    def sample(self, asks: Sequence[Ask], version: WeightVersion) -> list[Rollout]:
        """All prompts have one length; no cache, since the model is tiny."""
        import torch

        assert version.number == self.number
        tokens = torch.tensor([ask.prompt for ask in asks])
        greedy = asks[0].sampling.temperature == 0
        torch.manual_seed(asks[0].sampling.seed or 0)
        logprobs = []
        for _ in range(asks[0].sampling.max_tokens):
            with torch.no_grad():
                distribution = self.model(tokens).logits[:, -1].log_softmax(-1)
            chosen = distribution.argmax(-1, True) if greedy else torch.multinomial(distribution.exp(), 1)
            logprobs.append(distribution.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], dim=1)
        told, start = torch.cat(logprobs, dim=1), len(asks[0].prompt)
        return [
            Rollout(ask.prompt, tuple(row[start:].tolist()), tuple(lp.tolist()), (self.number,), "engine")
            for ask, row, lp in zip(asks, tokens, told, strict=True)
        ]


class LoneRank:
    """Stands for TrainerRank: a push is an iteration over the source on every rank."""

    def __init__(self, source: Any, engine: Engine | None) -> None:
        self._source = source
        self._engine = engine
        self._number = 0

    def __enter__(self) -> LoneRank:
        return self

    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def phase(self, _: str) -> Iterator[None]:
        yield

    def set_step(self, _: int) -> None: ...

    def push(self, step: int) -> Any:
        from trainer_agent.rank.report import PushReport

        began = time.monotonic()
        self._number += 1
        for name, tensor in self._source:
            if self._engine:
                self._engine.install(name, tensor)
        if self._engine:
            self._engine.number = self._number
        version = WeightVersion(self._number, Term(1))
        return PushReport(version, step, "COMMITTED", {"engine": "APPLIED"}, seconds=time.monotonic() - began)


class LoneWorker:
    """Stands for RolloutWorker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, asks: Sequence[Ask], min_version: WeightVersion) -> list[Rollout]:
        return self._engine.sample(asks, min_version)


def main() -> None:
    settings = grpo.parse()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    from safetensors.torch import save_file

    from trainer_agent.demo import training
    from trainer_agent.rank import trainer_rank as rank

    engine = Engine(settings.model_dir) if os.environ["RANK"] == "0" else None

    class Join:
        @staticmethod
        def join(source: Any) -> LoneRank:
            return LoneRank(source, engine)

    # Stand-ins by name: this is a script of its own, nothing is to be put back.
    vars(rank)["TrainerRank"] = Join
    vars(training)["RolloutWorker"] = lambda: LoneWorker(engine) if engine else None
    training.train(settings)
    if engine:
        held = {name: parameter.detach() for name, parameter in engine.model.named_parameters()}
        save_file(held, settings.events.with_name("engine.safetensors"))


if __name__ == "__main__":
    main()
