"""An observer that looks at every version an engine claims, and the ledger that it holds them against.

Promises: what a version's weights are is taken from the coordinator's log of what it wrote and from `truth`, never
from an engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.kill_matrix.matrix import Outcome
from tests.kill_matrix.truth import PROMPT, SAMPLE_TOKENS, Truth
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc, rollout_pb2, rollout_pb2_grpc, version_pb2

RUN = "kill-matrix"
LOOK_SECONDS = 0.5
"""Longest wait for one answer: a daemon that is held or stopped gives none."""
EVERY_SECONDS = 0.05
_BEGAN = re.compile(r"version=WeightVersion\(number=(\d+), term=(\d+)\), step=(\d+)")
_UPDATE = re.compile(r"update_id='([^']+)'")
_PHASE = re.compile(r"<Phase\.([A-Z]+)")


class LogTail:
    """The JSON lines of a log, each read once. Lines that are none are somebody else's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def fresh(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):
                    parsed = json.loads(line)
                    if isinstance(parsed, dict):
                        yield parsed


class Ledger:
    """What the coordinator wrote, from its log: term and step of each number, and how each update was decided."""

    def __init__(self, log: Path) -> None:
        self._tail = LogTail(log)
        self._numbers: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        self._terms: dict[int, int] = {}
        self._phases: dict[int, str] = {}

    def step(self, number: int) -> int | None:
        self._read()
        return self._steps.get(number)

    def term(self, number: int) -> int | None:
        self._read()
        return self._terms.get(number)

    @property
    def newest(self) -> int:
        """The latest number given; 0: none."""
        self._read()
        return max(self._steps, default=0)

    def outcome(self, number: int) -> Outcome | None:
        """None: nothing about it was written yet."""
        self._read()
        phase = self._phases.get(number)
        return (
            None
            if phase is None
            else {"COMMITTED": Outcome.COMMITTED, "DEGRADED": Outcome.DEGRADED}.get(phase, Outcome.KEPT)
        )

    def _read(self) -> None:
        for line in self._tail.fresh():
            if line.get("event") == "record_written":
                self._take(str(line["kind"]), str(line["record"]))

    def _take(self, kind: str, record: str) -> None:
        update = _UPDATE.search(record)
        if kind == "UpdateBegan" and update is not None and (began := _BEGAN.search(record)) is not None:
            self._numbers[update[1]] = int(began[1])
            self._terms[int(began[1])] = int(began[2])
            self._steps[int(began[1])] = int(began[3])
        elif kind == "UpdateDecided" and update is not None and (phase := _PHASE.search(record)) is not None:
            self._phases[self._numbers[update[1]]] = phase[1]


@dataclass
class Observer:
    """Looks at one engine's claims, again and again, and writes down what is wrong about them."""

    engine_id: str
    channel: grpc.aio.Channel
    ledger: Ledger
    truth: Truth
    wrong: list[str] = field(default_factory=list)
    samples: int = 0
    status: engine_pb2.EngineStatus | None = None
    """The last answer; None while there is none."""
    quiet: bool = False
    """No samples are asked for: the engine is left idle."""
    sampled: int = 0
    """The number of the last sample's version; 0 while there is none."""
    claimed: set[int] = field(default_factory=set)
    """Every number that a status or a sample ever named."""
    _life: str = ""
    _highest: int = 0
    _unset_for: str = ""
    """The update that it last had no version in."""

    async def watch(self) -> None:
        while True:
            self.status = await self._ask()
            if self.status is not None:
                self._judge(self.status)
            asks = self.status is not None and self.status.gate_open and not self.quiet
            self.sampled = await self._sample() if asks else 0
            await asyncio.sleep(EVERY_SECONDS)

    async def _ask(self) -> engine_pb2.EngineStatus | None:
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel)
        try:
            response = await stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=LOOK_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        assert isinstance(response.status, engine_pb2.EngineStatus)
        return response.status

    def _judge(self, status: engine_pb2.EngineStatus) -> None:
        if status.engine.incarnation != self._life:
            self._life, self._highest = status.engine.incarnation, 0
        if not status.HasField("applied"):
            self._unset_for = status.update.update_id
            if status.gate_open:
                self._say("an open gate without a version")
            return
        number = status.applied.number
        step = self._step(status.applied)
        self._judge_install(status)
        if number < self._highest:
            self._say(f"version {number} after {self._highest} in one life")
        if step is not None and status.content_digest != self.truth.content(step):
            self._say(f"version {number} with other content than it has")
        self._highest = max(number, self._highest)

    def _judge_install(self, status: engine_pb2.EngineStatus) -> None:
        """Of a status that claims a version: nothing is claimed from the first byte on until the install is done."""
        update = status.update
        if update.stage != engine_pb2.UPDATE_STAGE_INSTALLING:
            return
        if update.version == status.applied or update.update_id == self._unset_for:
            self._say(f"version {status.applied.number} while it installs {update.version.number}")

    async def _sample(self) -> int:
        """Tokens with their versions; 0: none, which a shut gate and a dead agent may give."""
        stub: Any = rollout_pb2_grpc.RolloutStub(self.channel)
        request = rollout_pb2.GenerateRequest(
            run_id=RUN,
            model="policy",
            prompt_token_ids=PROMPT,
            sampling=rollout_pb2.SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0.0, ignore_eos=True),
        )
        request.wait.FromMilliseconds(1)
        tokens: list[int] = []
        finish = rollout_pb2.Finish()
        try:
            async for response in stub.Generate(request, timeout=LOOK_SECONDS):
                tokens += response.token_ids
                finish = response.finish
        except grpc.aio.AioRpcError:
            return 0
        return self._judge_sample(tokens, finish)

    def _judge_sample(self, tokens: list[int], finish: rollout_pb2.Finish) -> int:
        number = 0
        for span in finish.spans:
            number = span.version.number
            step = self._step(span.version)
            if step is not None and not self.truth.makes(step, tokens, span.start, span.end):
                self._say(f"tokens {tokens} that version {number} does not make")
        self.samples += bool(number)
        return number

    def _step(self, version: version_pb2.WeightVersion) -> int | None:
        """Of a claimed version. Every claim comes through here."""
        self.claimed.add(version.number)
        term = self.ledger.term(version.number)
        if term is None:
            self._say(f"version {version.number}, which no ledger knows")
        elif term != version.term:
            self._say(f"version {version.number} of term {version.term}, which was given to term {term}")
        return self.ledger.step(version.number)

    def _say(self, what: str) -> None:
        self.wrong.append(f"{self.engine_id} claims {what}")
