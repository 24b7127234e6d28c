"""A fleet for the rows of the wire: a coordinator and engine agents with in-memory engines as processes of their own.

The trainer's rank is whoever asks (`rank`), and its trainer agent the process that it spawns, as under plain torchrun.
The engines expect SmolLM2-135M's tensors, in bfloat16 and of random bytes: how fast bytes travel does not depend on
what they are. Nothing in the agents knows that it is measured.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.coordinator import engines as heard
from bench.coordinator import start_coordinator
from bench.processes import processes, write_toml
from controlplane.cli.ask import get_fleet
from controlplane.core.layout import DType
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from trainer_agent.rank import TrainerRank
from trainer_agent.source import ParamMeta
from trainer_agent.sources.iterable import IterableSource
from weightplane.v1 import fleet_pb2

RUN = "bench-wire"
ENGINE = __name__
HIDDEN, INTERMEDIATE, KV, VOCABULARY, LAYERS = 576, 1536, 192, 49_152, 30


def smollm2_shapes() -> dict[str, tuple[int, ...]]:
    """The 272 tensors of SmolLM2-135M under their names in its checkpoint: 134,515,008 elements."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    square, small, up, down = (HIDDEN, HIDDEN), (KV, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    attention = {"q_proj": square, "k_proj": small, "v_proj": small, "o_proj": square}
    mlp = {"gate_proj": up, "up_proj": up, "down_proj": down}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        shapes |= {f"{at}.mlp.{name}.weight": shape for name, shape in mlp.items()}
    return shapes | {"model.norm.weight": (HIDDEN,)}


@dataclass
class Weights:
    """The rank's tensors, of random bytes."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls) -> Weights:
        generator = torch.Generator().manual_seed(0)
        shapes = smollm2_shapes()
        made = {n: torch.randn(shape, generator=generator).to(torch.bfloat16) for n, shape in shapes.items()}
        return cls(made)

    @property
    def byte_count(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def source(self) -> IterableSource:
        meta = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]
        return IterableSource(meta, lambda: iter(self.tensors.items()))


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the coordinator's clock says of one update, in seconds."""

    to_go: float
    """From its begin until every engine had all bytes, whole and checked."""
    total: float
    """Until it was decided: an in-memory engine's install is a sha256 of each tensor."""


class WireFleet:
    """The running processes, and a rank that pushes to them."""

    def __init__(self, address: str, rank: TrainerRank) -> None:
        self.address = address
        self._rank = rank
        self._step = 0

    def push(self) -> Pushed:
        """One whole update. Raises what `TrainerRank.push` does, and SystemExit where not every engine applied it."""
        self._step += 1
        report = self._rank.push(self._step)
        if set(report.outcomes.values()) != {"APPLIED"}:
            raise SystemExit(f"not every engine applied it: {report.outcomes}")
        state = self._state()
        began, went, ended = (t.ToNanoseconds() / 1e9 for t in (state.begin_time, state.go_time, state.decide_time))
        return Pushed(went - began, ended - began)

    def _state(self) -> fleet_pb2.UpdateState:
        return asyncio.run(get_fleet(self.address, 10.0)).updates[0]


@contextmanager
def wire_fleet(weights: Weights, *, transport: str, engines: int = 1, keep_staging: bool = True) -> Iterator[WireFleet]:
    """`transport`: how the coordinator plans, whatever host the engines are on. Not `keep_staging`: the
    agents' setting is false; else they are left to do as they do."""
    with tempfile.TemporaryDirectory() as at, processes(Path(at)) as started:
        address = start_coordinator(started, RUN, transport=transport)
        afresh = [] if keep_staging else ["afresh"]
        for name in (f"e{i}" for i in range(engines)):
            started.start(name, "-m", ENGINE, address, at, name, *afresh)
        started.wait(lambda: len(heard(address)) == engines, f"{engines} engines' hellos")
        trainer = {"coordinator": address, "run_id": RUN, "link_host": "127.0.0.1"}
        config = write_toml(Path(at, "trainer.toml"), trainer)
        with TrainerRank.join(address, source=weights.source, run_id=RUN, agent_config=config) as rank:
            yield WireFleet(address, rank)


def main() -> None:
    """An engine agent as a process: coordinator, directory, name, and `afresh` if it keeps no staging."""
    address, directory, name, *afresh = sys.argv[1:]
    settings = EngineSettings(
        engine_id=name,
        coordinator=address,
        run_id=RUN,
        state_dir=Path(directory) / "engines",
        backend="memory",
        memory=MemorySettings(tensors=smollm2_shapes(), dtype=DType.BF16),
        keep_staging=False if afresh else None,
    )
    sys.exit(asyncio.run(run_engine(settings)))


if __name__ == "__main__":
    main()
