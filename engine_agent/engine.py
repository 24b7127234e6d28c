"""The port between an engine agent and one inference engine.

Three implementations obey it, under one contract suite (`tests/contract/test_engine_port.py`):
`engine_agent.vllm.engine.VllmEngine` (the real one), `engine_agent.external.engine.ExternalEngine` (real, in a server
that somebody else started) and `engine_agent.memory.engine.MemoryEngine` (fast, for tests and scale). An engine
knows nothing of terms, served sets, gates or other engines; it moves weights in, tokens out, and says honestly whether
its weights were touched.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from controlplane.core.assembly import Record
from controlplane.core.canary import Canary
from controlplane.core.layout import Expected, Layout
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sampling import SamplingSettings
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange

PROCESSED_LOGPROBS = "processed_logprobs"
"""Capability: its log probabilities are of the distribution that was drawn from, not of the model's raw one."""
CUDA_IPC = "cuda_ipc"
"""Capability: its workers can open device memory that ranks on their devices export."""
ROUTED_EXPERTS = "routed_experts"
"""Capability: samples come with the experts of each token."""
SAMPLING_MASK = "sampling_mask"
"""Capability: each token comes with the tokens that it was drawn from."""
DRAFT = "draft"
"""Capability of an engine with a draft model that updates may carry."""
DRAFT_IS_A_MIXTURE = "the draft model is a mixture since an install that failed, and this update does not cover it"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine once it has started."""

    world_size: int
    """Worker processes (tensor × pipeline × data parallel); equals the number of device UUIDs."""
    device_uuids: tuple[str, ...]
    """One per worker, in worker rank order; each in the form of `controlplane.core.names.device_uuid`."""
    vocab_size: int
    max_model_len: int
    """Prompt plus generated tokens, at most."""
    max_logprobs: int
    expected: Expected
    """Names, shapes and dtypes that an update must cover (safetensors headers of the model path)."""
    likeness: str
    """Engines of one likeness say the same of the same bytes: all that may change an answer, in one text."""
    max_requests: int
    """How many requests it runs at once; more wait in it."""
    capabilities: frozenset[str]
    """Of `staged`, `streaming`, `cuda_ipc`, `rollback`, `sleep`, `prefix_cache`, `batch_invariant`, `draft`,
    `processed_logprobs`, `routed_experts`, `sampling_mask`. Deltas are the agent's affair, and the format that it takes
    is `expected`'s."""
    pids: tuple[int, ...]
    """Processes that hold the weights (EngineCore and workers); none where they are not the agent's."""
    initial_digest: bytes | None = None
    """Content digest of the checkpoint that it loaded, summed by the agent; only for a frozen model's engine."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """`byte_count` bytes at `offset` of the file `path` (under /dev/shm, or /proc/PID/fd of the agent)."""

    path: str
    offset: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor lies: whole and contiguous, `offset` bytes into chunk number `chunk`."""

    chunk: int
    offset: int


@dataclass(frozen=True)
class StagedWeights:
    """A whole version's bytes, checked and waiting in shared memory; installing it needs no other input.

    `chunks` maps a device UUID to its list of chunks; the key "" serves any worker on this host. A worker
    reads the list of its own device. `placements[i]` belongs to `layout.tensors[i]`.
    """

    layout: Layout
    label: str
    """The version's decimal number: the label under which the engine stamps tokens."""
    chunks: Mapping[str, Sequence[SegmentSpan]]
    placements: Sequence[Placement]


@dataclass(frozen=True)
class DeviceChunk:
    """One chunk of a streaming install in exported device memory: no agent can read it, each worker checks its own."""

    ranges: Mapping[str, ExportedRange]
    """By device UUID; equal bytes in all."""
    records: Sequence[Record]
    """What lies in it. A tensor may go over several chunks: workers keep what came of it."""
    checksums: Mapping[int, bytes]
    """XXH3_64 of each tensor that is whole with this chunk."""


@dataclass(frozen=True)
class StagedPart:
    """Whole tensors of a streaming install, checked and waiting in shared memory. `chunks` as in StagedWeights."""

    chunks: Mapping[str, Sequence[SegmentSpan]]
    tensors: Sequence[int]
    """Indexes into the layout."""
    placements: Sequence[Placement]
    """One for each of `tensors`; none where they lie in `device`."""
    device: DeviceChunk | None = None
    """In place of `chunks`: `tensors` are those that are whole with it."""


@dataclass(frozen=True, slots=True)
class InstallReport:
    loaded_tensors: int
    """Names of the layout that the engine's loader accepted."""
    load_seconds: float
    cache_seconds: float


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """New tokens of one request. The last delta has `finish_reason` set, and may hold no token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token: log probability of the sampled token after sampling transforms. Empty if not asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, or None while running."""
    stop_reason: str = ""
    cached_prompt_tokens: int = 0
    prompt_logprobs: tuple[float, ...] = ()
    """Entry i belongs to prompt token i + 1; on one delta, where `sampling.prompt_logprobs`."""
    engine_spans: tuple[tuple[str, int, int], ...] = ()
    """The engine's own (label, start, end) spans over this request's tokens, on the last delta."""
    sampling_masks: tuple[tuple[int, ...], ...] = ()
    """One per token: the tokens that it was drawn from. Empty without the capability `sampling_mask`."""
    routed_experts: RoutedExperts | None = None
    """On the last delta of an engine with the capability `routed_experts`, where it has them for every token."""
    native: Any = field(default=None, compare=False)
    """The engine's own object, for a request that was made in the engine's own words; else None."""


@dataclass(frozen=True)
class LiveRequests:
    """Answer of `quiesce`: how many tokens each live request had been given when generation stood still."""

    token_counts: Mapping[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """One inference engine, one life. After `shutdown` or death a new object is made (a new incarnation)."""

    async def start(self) -> EngineFacts:
        """Start processes and load the model. The weights it loads carry no version: they are unset.

        Never blocks the event loop. Raises EngineDied with the reason (and the engine's last log lines);
        UnsupportedByEngine where its settings ask for what no repetition of the start would bring.
        """
        ...

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Generate. Closing the iterator aborts the request in the engine. While paused the request waits.

        The caller has validated token ids and lengths. Raises EngineDied.
        """
        ...

    async def quiesce(self) -> LiveRequests:
        """Stop the scheduler, keep requests, and wait until every token made so far was handed to its consumer.

        After it returns no forward pass runs, and no consumer will see a further token, until `resume`.
        The caller goes on consuming the iterators meanwhile (else this would never return). Idempotent.
        """
        ...

    async def install(self, staged: StagedWeights) -> InstallReport:
        """Install a staged version in every worker, clear every cache, set the engine's label to `staged.label`.

        What the layout has for the draft model goes in with the rest or not at all. After a failure that touched the
        draft an update without it is refused: what it left there would be taken for whole.

        Must be called quiesced. Raises InstallFailed with `touched` true unless the old weights are
        certainly whole; EngineDied. On return every worker has copied what it needs: the staged bytes may go.
        """
        ...

    async def open_exports(self, probes: Sequence[ExportedProbe]) -> None:
        """Have each worker open the memory that is exported for its device, and compare the probe. What was open before
        and is not named is closed, and never opened again; with none everything is closed. Nothing of the model is
        touched, and the scheduler may run. What is open already is not opened twice.

        Raises IpcNotPossible: a worker cannot, or finds other bytes, or there is none for its device; nothing is open
        then. EngineDied, DeadlineExceeded.
        """
        ...

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        """Begin an install whose bytes come in parts. Must be called quiesced; one of `finish_streaming` and
        `abandon_streaming` ends it.

        Raises UnsupportedByEngine without the capability `streaming`; InstallFailed as `install` does; EngineDied.
        """
        ...

    async def install_part(self, part: StagedPart) -> None:
        """Install these tensors in every worker; on return no worker reads the part's memory any more (INV-12). Of a
        chunk in device memory too, whose exports are open.

        Raises InstallFailed, EngineDied. The install goes on to its abandonment then.
        """
        ...

    async def finish_streaming(self) -> InstallReport:
        """Every tensor came: finish the install as `install` does, caches and label too.

        Raises InstallFailed; EngineDied.
        """
        ...

    async def abandon_streaming(self) -> None:
        """No more comes. If a part came the engine's weights are a mixture; the next whole update starts clean. Nothing
        is resumed. Idempotent.

        Raises EngineDied.
        """
        ...

    async def clear_caches(self) -> None:
        """Forget everything computed before: prefix, encoder, multimodal and connector caches; kept requests are
        computed anew. Must be called quiesced. An install does it by itself.

        Raises EngineDied, DeadlineExceeded.
        """
        ...

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        """Run a prompt, or the fixed one (the scheduler runs meanwhile, and is stopped again before this returns).

        Raises CanaryFailed if a logprob is not finite or the reply is short.
        """
        ...

    async def resume(self) -> None:
        """Let the scheduler run. Kept requests go on, their prefix computed anew under the new weights."""
        ...

    async def sleep(self, level: int) -> None:
        """Free the devices; must be called quiesced. Level 1 keeps the weights aside, level 2 drops them; both drop the
        KV cache: what kept requests had computed is computed anew after waking. Also when it sleeps already, to go to
        level 2.

        Raises UnsupportedByEngine without the capability `sleep`; EngineDied.
        """
        ...

    async def wake(self, *, kv_cache: bool) -> None:
        """Take the weights' memory again, and the KV cache if asked for; the scheduler stands still as before.
        After level 2 the weights are nobody's until an install. Idempotent.

        Raises UnsupportedByEngine without the capability `sleep`; EngineDied.
        """
        ...

    async def probe(self) -> None:
        """A round trip through the engine core; raises EngineDied when it is gone. May wait behind an install."""
        ...

    async def shutdown(self) -> None:
        """End every process of this engine; kills what does not end in time. Idempotent."""
        ...
