"""All ways in which a number of ranks can split a model, and which model each of them is tried with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.hf_models import DENSE, WITH_EXPERTS

LEAST_LAYERS = 4
LEAST_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of Megatron's groups; `layout` is Megatron's own string that says which stage has which layers."""

    ranks: int
    family: str
    tied: bool
    dtype: str = "float32"
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    layout: str = ""

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def has_experts(self) -> bool:
        return self.family in WITH_EXPERTS

    @property
    def computes_on_a_cpu(self) -> bool:
        """Megatron's dispatcher gathers unequal numbers of tokens over an expert's tensor-parallel ranks when experts
        are split both ways, which gloo refuses: "ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected
        (37, 64), got (43, 64))". The ranks on which the numbers are equal then wait for the others for ever."""
        return not (self.has_experts and self.expert > 1 and self.expert_tensor > 1)

    @property
    def layers(self) -> int:
        return max(LEAST_LAYERS, self.pipeline * self.virtual_pipeline)

    @property
    def experts(self) -> dict[str, int]:
        """What the model's config says of their number: as many as ranks, so that each number of ranks divides it."""
        if not self.has_experts:
            return {}
        key = "num_local_experts" if self.family == "mixtral" else "num_experts"
        return {key: max(LEAST_EXPERTS, self.ranks)}

    @property
    def model(self) -> str:
        """The model's directory: topologies that want the same model share it."""
        return f"{self.family}-{'tied' if self.tied else 'untied'}-{self.dtype}-{self.layers}-layers"

    @property
    def name(self) -> str:
        sizes = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "vpp": self.virtual_pipeline,
            "cp": self.context,
            "dp": self.data,
            "ep": self.expert,
            "etp": self.expert_tensor if self.has_experts else 1,
        }
        split = "-".join(f"{key}{size}" for key, size in sizes.items() if size > 1) or "alone"
        kind = "tied" if self.tied else "untied"
        layout = f"-{self.layout.replace('|', '_')}" if self.layout else ""
        return f"{split}{layout}-{self.family}-{kind}-{self.dtype}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def every(ranks: int) -> Iterator[Topology]:
    """Every combination of sizes that are powers of two, dense and with experts; models take turns."""
    for kind, families in ((_dense, DENSE), (_with_experts, WITH_EXPERTS)):
        models = [(f, tied, dtype) for dtype in ("float32", "bfloat16") for tied in (True, False) for f in families]
        for sizes, (family, tied, dtype) in zip(kind(ranks), itertools.cycle(models), strict=False):
            yield Topology(ranks, family, tied, dtype, **sizes)  # type: ignore[arg-type]


def _dense(ranks: int) -> Iterator[dict[str, int]]:
    for tensor, pipeline, context in _products(ranks, 3):
        for virtual in _virtual(pipeline):
            yield {
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
                "context": context,
                "expert_tensor": tensor,
            }


def _with_experts(ranks: int) -> Iterator[dict[str, int]]:
    for sizes in _dense(ranks):
        for expert, expert_tensor in _products(ranks // sizes["pipeline"], 2):
            yield sizes | {"expert": expert, "expert_tensor": expert_tensor}


def _virtual(pipeline: int) -> Sequence[int]:
    """Megatron interleaves stages only where there are several."""
    return (1, 2) if pipeline > 1 else (1,)


def _products(limit: int, count: int) -> Iterator[tuple[int, ...]]:
    """Powers of two whose product is at most `limit`, itself one: the rest is data parallel."""
    powers = [1 << i for i in range(limit.bit_length())]
    return (sizes for sizes in itertools.product(powers, repeat=count) if _product(sizes) <= limit)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
