"""`--verify`: do the engines answer as a fresh engine does that loaded the trainer's weights from disk?

Every engine gets the same fixed prompts in one batch, greedy, twice: the second time its prefix cache answers for the
prompts. Tokens must be equal, and logprobs within TOLERANCE. Weights are float32 on all sides, and the batch is of
the same size everywhere, so sums differ by their order alone: about 1e-6 in a logprob, up to 1e-4 where the kernels
of another batch shape are taken. 1e-3 is above that noise, and far below what one wrong tensor does (0.1 and more).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from controlplane.cli.crew import Child, Crew, died
from controlplane.cli.demo.places import Places
from controlplane.core.pins import Pin
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, WeightVersion
from controlplane.rollout.sample import Assembly, Sample
from controlplane.rollout.wire import delta_from_proto
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import pin_to_proto, sampling_to_proto, seconds_to_proto
from controlplane.rpc.errors import from_rpc_error
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

TOLERANCE = 1e-3
PROMPTS = 8
SHORTEST_PROMPT = 5
PROMPT_STEP = 7
"""Prompts have lengths 5, 12, … 54: below, at and above the 32 tokens of a cache block."""
MAX_TOKENS = 24
WAIT_SECONDS = 30.0
GENERATE_SECONDS = 120.0
LIMIT_SECONDS = 300.0
"""For all answers, those of the fresh engine, which has to start, included."""
MAX_MODEL_LEN = 256
KV_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One engine against the reference."""

    equal_tokens: bool
    largest_difference: float
    """Of a logprob, over the tokens that both have."""

    @property
    def verified(self) -> bool:
        return self.equal_tokens and self.largest_difference <= TOLERANCE


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """The same for each run: token ids of any kind, since greedy decoding must agree on all of them."""
    draw = random.Random(0)
    lengths = [SHORTEST_PROMPT + PROMPT_STEP * i for i in range(PROMPTS)]
    return [[draw.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


async def ask_engine(
    engine_id: EngineId, endpoint: str, run_id: str, prompts: Sequence[Sequence[int]], version: WeightVersion
) -> list[Answer]:
    """Both rounds of greedy answers of one engine, all made by `version`.

    Raises:
        WeightplaneError: as `Rollout.Generate` does; SpanMismatch if any token was made by another version.
    """
    answers: list[Answer] = []
    async with open_channel(endpoint) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)
        for _ in range(2):
            samples = await asyncio.gather(*(_ask(stub, engine_id, run_id, p, version) for p in prompts))
            answers += [Answer(s.tokens, s.logprobs) for s in samples]
    return answers


async def _ask(
    stub: rollout_pb2_grpc.RolloutAsyncStub,
    engine_id: EngineId,
    run_id: str,
    prompt: Sequence[int],
    version: WeightVersion,
) -> Sample:
    greedy = SamplingSettings(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    request = rollout_pb2.GenerateRequest(
        run_id=run_id,
        model="policy",
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(greedy),
        pin=pin_to_proto(Pin(min_version=version)),
        wait=seconds_to_proto(WAIT_SECONDS),
    )
    assembly = Assembly(request_id="verify", pin=Pin(min_version=version))
    try:
        async for response in stub.Generate(request, timeout=GENERATE_SECONDS):
            assembly.add(delta_from_proto(engine_id, response))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return assembly.finish()


async def start_reference(crew: Crew, places: Places, prompts: Sequence[Sequence[int]]) -> Child:
    """A fresh engine that loads the weights which the trainer exported, answers, and ends."""
    request = {
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    files = [places.exported, places.work / "verify-request.json", places.work / "verify-answer.json"]
    files[1].write_text(json.dumps(request))
    module = [sys.executable, "-m", "controlplane.cli.demo.reference"]
    return await crew.start("reference", [*module, *map(str, files)])


def reference_answers(child: Child, places: Places) -> list[Answer]:
    """What it wrote, once it has ended. Raises CommandFailed if it did not end well."""
    if child.process.returncode != 0:
        raise died(child)
    answers = json.loads((places.work / "verify-answer.json").read_text())
    return [Answer(tuple(a["tokens"]), tuple(a["logprobs"])) for a in answers]


def compare(engine: Sequence[Answer], reference: Sequence[Answer]) -> Comparison:
    """`engine` holds one or more rounds of as many answers as `reference`."""
    rounds = len(engine) // len(reference)
    wanted = list(reference) * rounds
    differences = [
        abs(a - b)
        for mine, fresh in zip(engine, wanted, strict=True)
        for a, b in zip(mine.logprobs, fresh.logprobs, strict=False)
    ]
    equal = all(mine.tokens == fresh.tokens for mine, fresh in zip(engine, wanted, strict=True))
    return Comparison(equal_tokens=equal, largest_difference=max(differences, default=float("inf")))


def describe(comparisons: Mapping[str, Comparison]) -> list[str]:
    """One line for each engine."""
    return [
        f"{name}: {'equal' if c.verified else 'NOT EQUAL'} to a fresh engine: tokens "
        f"{'equal' if c.equal_tokens else 'differ'}, logprobs within {c.largest_difference:.1e} (tolerance {TOLERANCE})"
        for name, c in sorted(comparisons.items())
    ]


def vocab_size(model_dir: Path) -> int:
    size: int = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    return size
