"""What an in-memory engine is told to be, and its model: pure functions of weights, prompt and position.

Whoever knows the weights can compute each token and each score again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.core.layout import DRAFT_PREFIX, PLAIN, DType, Expected, TensorSpec, own_name
from engine_agent.engine import Placement, SegmentSpan

EXPERTS = 300
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class MemorySettings:
    """How an in-memory engine behaves."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"w": (4,)})
    """Names and shapes that an update must cover."""
    dtype: DType = DType.F32
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    """Of the tensors whose dtype is another than `dtype`."""
    weights_format: str = PLAIN
    draft_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names and shapes of its draft model, which has the same dtypes; empty: it has none. What it speaks does not
    depend on them."""
    vocab_size: int = 256
    max_model_len: int = 4096
    max_requests: int = 256
    seconds_per_token: float = 0.0
    """How long a token takes; 0 yields to the loop only."""
    install_seconds: float = 0.0
    can_sleep: bool = True
    can_stream: bool = True
    sleep_seconds: float = 0.0
    """How long sleeping takes, and waking."""
    kv_bytes: int = 1 << 20
    """Size of its KV cache."""
    seed: int = 0
    """Which weights it loads at its start, if it serves them; engines of one seed load the same."""
    device_uuids: tuple[str, ...] = ("MEM-0",)
    expert_layers: int = 0
    """Layers with experts, of which it says for each token which one it went to; 0: it says nothing of them."""
    says_masks: bool = False
    """It says what each token was drawn from: that token alone."""


def initial_tensors(settings: MemorySettings) -> dict[str, bytes]:
    """The bytes of the tensors that such an engine loads at its start."""
    sizes = {n: size for n, size in sizes_of(settings).items() if n in settings.tensors}
    return {n: hashlib.shake_256(f"{settings.seed}/{n}".encode()).digest(size) for n, size in sizes.items()}


def sizes_of(settings: MemorySettings) -> dict[str, int]:
    named = dict(settings.tensors) | {DRAFT_PREFIX + n: shape for n, shape in settings.draft_tensors.items()}
    return {n: TensorSpec(n, _dtype(settings, n), tuple(shape)).byte_count for n, shape in named.items()}


def _dtype(settings: MemorySettings, name: str) -> DType:
    return settings.dtypes.get(own_name(name), settings.dtype)


def expected_of(settings: MemorySettings) -> Expected:
    def of(shapes: Mapping[str, tuple[int, ...]], draft: Expected | None) -> Expected:
        dtypes = {name: frozenset({_dtype(settings, name)}) for name in shapes}
        return Expected(dict(shapes), dtypes, format=settings.weights_format, draft=draft)

    return of(settings.tensors, of(settings.draft_tensors, None) if settings.draft_tensors else None)


def weights_of(tensor_digests: Mapping[str, bytes]) -> bytes:
    """The engine's weights as one digest: sha256 over names and sha256 of each tensor's bytes, sorted."""
    h = hashlib.sha256()
    for name, digest in sorted(tensor_digests.items()):
        h.update(name.encode() + b"\0" + digest)
    return h.digest()


def token_of(weights: bytes, prompt: Sequence[int], position: int, vocab_size: int) -> int:
    """The token that these weights make after this prompt at this position."""
    h = hashlib.sha256(weights + repr((tuple(prompt), position)).encode()).digest()
    return int.from_bytes(h[:4], "big") % vocab_size


def expert_of(place: int, layer: int) -> int:
    """The expert that the token at this place goes to, whatever it is."""
    return (place + layer) % EXPERTS


def score_of(weights: bytes, prompt: Sequence[int], position: int) -> float:
    """How probable these weights find the prompt's token at this position, given those before it; natural log."""
    h = hashlib.sha256(weights + repr((tuple(prompt[: position + 1]), "score")).encode()).digest()
    return -float(int.from_bytes(h[:4], "big")) / 2**30


def digest_of(chunks: Mapping[str, Sequence[SegmentSpan]], place: Placement, tensor: TensorSpec) -> bytes:
    """sha256 of a tensor's bytes as they lie in shared memory, for every device alike."""
    digests = {_read(spans[place.chunk], place.offset, tensor.byte_count) for spans in chunks.values()}
    if len(digests) != 1:
        raise OSError(f"devices hold different bytes of {tensor.name}")
    return digests.pop()


def _read(span: SegmentSpan, offset: int, size: int) -> bytes:
    h = hashlib.sha256()
    with open(span.path, "rb") as file:
        file.seek(span.offset + offset)
        while size:
            block = file.read(min(size, _READ_BYTES))
            if not block:
                raise OSError(f"{span.path} is shorter than the tensor")
            h.update(block)
            size -= len(block)
    return h.digest()
