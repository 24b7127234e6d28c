"""What a delta saves: pushes of real learning steps of a real model over inline, whole and as what changed.

    python bench/delta.py [--rates 1e-6 1e-5] [--steps N] [--warm-up N] [--cache DIR]

SmolLM2-135M in bfloat16; a coordinator, one engine agent with real vLLM, a trainer agent and this rank, on one machine,
with bytes in the stream as from another host. The steps: AdamW on float32 weights, as mixed-precision training keeps
them, at a constant learning rate, with the gradient of a policy-gradient loss (advantages +1, -1, +0.5, -0.5) over four
passages of this project's own text; the first `warm-up` steps are not measured. The same steps are pushed twice, first
whole, then as deltas, and the engine's greedy tokens and log probabilities after each step are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from controlplane.cli.ask import get_fleet
from controlplane.cli.demo.settings import default_cache_dir
from controlplane.cli.ending import CommandFailed
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from trainer_agent.demo.models import smollm2
from trainer_agent.rank import PushReport, TrainerRank
from trainer_agent.source import ParamMeta
from trainer_agent.sources.iterable import IterableSource

RUN = "bench-delta"
START_SECONDS = 300.0
SEQUENCES, LENGTH = 4, 128
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)
PROMPT_TOKENS, NEW_TOKENS = 24, 32
TIES = (("lm_head.weight", "model.embed_tokens.weight"),)

Weights = dict[str, torch.Tensor]
Words = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Pushed:
    """One push, and what the engine says after it."""

    seconds: float
    byte_count: int
    words: Words


# ---- learning -----------------------------------------------------------------------------------


def passages(model: Path) -> torch.Tensor:
    """Four passages of README.md, as the model's tokens: (SEQUENCES, LENGTH)."""
    from tokenizers import Tokenizer

    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return torch.tensor(tokens[: SEQUENCES * LENGTH]).view(SEQUENCES, LENGTH)


def learnt(model: Path, rate: float, steps: int, warm_up: int) -> list[Weights]:
    """The weights in bfloat16 after the warm-up, and after each step that follows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    tokens, found = passages(model), []
    for step in range(warm_up + steps + 1):
        if step >= warm_up:
            found.append({name: p.detach().to(torch.bfloat16) for name, p in network.named_parameters()})
        if step == warm_up + steps:
            break
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_of(network, tokens))
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return found


def loss_of(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = network(tokens[:, :-1]).logits.log_softmax(-1)
    chosen = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1).mean(-1)
    return -(torch.tensor(ADVANTAGES) * chosen).mean()


def changed_fraction(old: Weights, new: Weights) -> float:
    differing = sum(int((a.view(torch.int16) != new[name].view(torch.int16)).sum()) for name, a in old.items())
    return differing / sum(a.numel() for a in old.values())


# ---- pushing ------------------------------------------------------------------------------------


def push_all(address: str, sequence: list[Weights], tokens: list[int], *, deltas: bool) -> list[Pushed]:
    """Every version of the sequence, one after the other; the first one is whole in any case."""
    current: Weights = {}
    meta = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in sequence[0].items()]
    source = IterableSource(meta, lambda: iter(current.items()), ties=TIES)
    found = []
    with TrainerRank.join(address, source=source, run_id=RUN, deltas=deltas) as rank:
        for step, weights in enumerate(sequence):
            current.clear()
            current.update(weights)
            report = rank.push(step)
            found.append(Pushed(report.seconds, bytes_of(address, report), words(address, report, tokens)))
    return found


def bytes_of(address: str, report: PushReport) -> int:
    """What the engine's agent received of it."""
    (engine,) = asyncio.run(get_fleet(address, 10.0)).engines
    assert engine.status.applied.number == report.version.number
    return int(engine.status.update.bytes_received)


def words(address: str, report: PushReport, tokens: list[int]) -> Words:
    async def ask() -> Words:
        async with RolloutClient(address, run_id=RUN) as rollouts:
            sampling = SamplingSettings(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
            sample = await rollouts.generate(tokens, sampling, min_version=report.version)
            return list(sample.tokens), list(sample.logprobs)

    return asyncio.run(ask())


# ---- the fleet ----------------------------------------------------------------------------------


@contextmanager
def fleet(model: Path, directory: Path) -> Iterator[str]:
    """A coordinator and an engine agent as processes of their own. Their address."""
    address_file = directory / "address"
    common = {"run_id": RUN, "state_dir": str(directory)}
    coordinator = {"listen": "127.0.0.1:0", "address_file": str(address_file), "transport": "inline", **common}
    processes = [_start(directory, "coordinator", coordinator)]
    try:
        _wait(address_file.exists, 30.0)
        address = address_file.read_text()
        vllm = {"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4}
        engine = {"engine_id": "engine-0", "coordinator": address, "deltas": True, **common, "vllm": vllm}
        processes.append(_start(directory, "engine", engine))
        _wait(lambda: _started(address), START_SECONDS)
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def _started(address: str) -> bool:
    with suppress(CommandFailed):
        return len(asyncio.run(get_fleet(address, 10.0)).engines) == 1
    return False


def _start(directory: Path, command: str, config: dict[str, Any]) -> subprocess.Popen[bytes]:
    file = directory / f"{command}.toml"
    tables = {k: v for k, v in config.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in config.items() if k not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    file.write_text("\n".join(lines) + "\n")
    with (directory / f"{command}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli.main", command, "--config", str(file)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )


def _wait(check: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"the fleet did not start within {seconds} s")
        time.sleep(0.5)


def measure_rate(address: str, model: Path, rate: float, steps: int, warm_up: int) -> dict[str, Any]:
    """Medians over the steps."""
    sequence = learnt(model, rate, steps, warm_up)
    tokens = passages(model)[0, :PROMPT_TOKENS].tolist()
    runs = [push_all(address, sequence, tokens, deltas=deltas) for deltas in (False, True)]
    whole, delta = (run[1:] for run in runs)
    changed = [changed_fraction(a, b) for a, b in itertools.pairwise(sequence)]
    return {
        "learning_rate": rate,
        "steps": steps,
        "elements_changed_percent": round(100 * statistics.median(changed), 3),
        "whole_bytes": whole[0].byte_count,
        "delta_bytes": round(statistics.median(p.byte_count for p in delta)),
        "whole_seconds": round(statistics.median(p.seconds for p in whole), 3),
        "delta_seconds": round(statistics.median(p.seconds for p in delta), 3),
        "same_tokens_and_logprobs": all(a.words == b.words for a, b in zip(*runs, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=None, help="where the model is kept")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    model = smollm2((given.cache or default_cache_dir()).absolute())
    with tempfile.TemporaryDirectory() as directory, fleet(model, Path(directory)) as address:
        for rate in given.rates:
            print(json.dumps(measure_rate(address, model, rate, given.steps, given.warm_up)), flush=True)


if __name__ == "__main__":
    main()
