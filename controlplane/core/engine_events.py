"""What happens to an engine agent: the events of `EngineCore`.

Each is a fact, and frozen. A new one needs its handler in the table of `engine_core` and, where it moves a part of the
state, its rows in `engine_transitions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.assembly import Record
from controlplane.core.canary import Canary, CanaryReference
from controlplane.core.engine_state import Held, Hold, KeptBase, Timings
from controlplane.core.lag import FleetCommit
from controlplane.core.layout import Expected, Layout
from controlplane.core.pauses import PausePolicy
from controlplane.core.versions import (
    DeviceTurn,
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    UpdateId,
    WeightVersion,
)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's processes run; `expected` is what an update must cover."""

    expected: Expected
    capabilities: frozenset[str] = frozenset()
    initial_digest: bytes | None = None
    """Of a frozen model's engine: content digest of the checkpoint that it loaded, and serves as number 0."""


@dataclass(frozen=True, slots=True)
class Died:
    cause: str


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """The coordinator's welcome or a later state: what is served, and the model's term."""

    coordinator_term: Term
    term: Term
    served: frozenset[WeightVersion]
    commits: tuple[FleetCommit, ...] = ()
    """The model's latest fleet commits, oldest first."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """The coordinator says that equal engines, which hold the same bytes, contradict this one's canary."""

    version: WeightVersion
    cause: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The first frame of a stream; see UpdateOpen."""

    stream: int
    run_id: RunId
    model: ModelName
    incarnation: Incarnation
    update_id: UpdateId
    writer_term: Term
    version: WeightVersion
    layout_digest: bytes
    tensor_count: int
    byte_count: int
    by_coordinator: bool = False
    """The writer is a coordinator: `writer_term` is its own."""
    base: Held | None = None
    """Of a delta: the weights that it changes."""
    engine_id: EngineId | None = None
    """The engine that the writer means; None: whoever lives as that incarnation."""
    kept: KeptBase | None = None
    """What the agent could apply a delta to."""
    streaming: bool = False
    """Its chunks are installed as they come; the first of them is the start of the install."""
    reference: CanaryReference | None = None
    """What the trainer says of the same weights."""
    pause: PausePolicy | None = None
    """What becomes of the requests in the engine; None: by the engine's own setting."""


@dataclass(frozen=True, slots=True)
class LayoutArrived:
    stream: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class StreamAdmitted:
    """Of a streaming update: layout and memory were accepted, and nothing was touched. Chunks may come after go."""

    stream: int


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    stream: int
    version: WeightVersion
    index: int
    records: Sequence[Record]
    buffer_bytes: int
    last: bool = False
    """Of a delta: nothing follows."""


@dataclass(frozen=True, slots=True)
class BytesVerified:
    """Every tensor's checksum was computed over what came, and was right."""

    stream: int


@dataclass(frozen=True, slots=True)
class CommitArrived:
    stream: int
    version: WeightVersion
    chunk_count: int
    byte_count: int
    content_digest: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The stream is over: by its end, a broken connection, silence, a refusal or an abort frame."""

    stream: int
    cause: str
    reason: str = "UPDATE_ABORTED"


@dataclass(frozen=True, slots=True)
class Quiesced:
    """No forward pass runs and every token made is with its consumer. The next step touches weights."""


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    """The last step of an install: the engine holds the version."""

    timings: Timings
    canary: Canary | None = None
    """What it said of it."""
    changed_tensors: int | None = None
    """Tensors whose bytes differ from what was held last; None: not known."""


@dataclass(frozen=True, slots=True)
class CanaryDeferred:
    """The last step of an install without a KV cache: the engine holds the version, and cannot speak yet."""

    timings: Timings
    changed_tensors: int | None = None
    """As of CanaryPassed."""


@dataclass(frozen=True, slots=True)
class Proven:
    """The canary that was put off passed."""

    canary: Canary | None = None
    """What it said."""


@dataclass(frozen=True, slots=True)
class Disproven:
    """The canary that was put off found fault."""

    cause: str


@dataclass(frozen=True, slots=True)
class InstallEnded:
    """The install did not work. `touched`: some byte may have been installed."""

    error: e.WeightplaneError
    touched: bool


@dataclass(frozen=True, slots=True)
class SpansDisagreed:
    """INV-11: our account of who made which token is not the engine's."""

    cause: str


@dataclass(frozen=True, slots=True)
class HoldChanged:
    hold: Hold
    present: bool


@dataclass(frozen=True, slots=True)
class SleepRequested:
    """Free the devices. Level 1 keeps the weights aside, level 2 drops them; both drop the KV cache."""

    owner: str
    level: int
    turn: DeviceTurn | None = None
    """Of a trainer that asks; None: a person does."""


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """Take devices again: the weights' memory, and the KV cache if asked for."""

    owner: str
    kv: bool
    turn: DeviceTurn | None = None
    """Of a trainer that asks; None: a person does."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The engine has it: what the last WakeRequested asked for."""

    kv: bool


@dataclass(frozen=True, slots=True)
class RequestsCounted:
    live: int
    waiting: int
    tokens_by_lag: tuple[int, ...] = ()
    """As in EngineState."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The agent ends."""


Event = (
    Started
    | Died
    | FleetChanged
    | Doubted
    | Opened
    | LayoutArrived
    | StreamAdmitted
    | ChunkArrived
    | BytesVerified
    | CommitArrived
    | StreamEnded
    | Quiesced
    | CanaryPassed
    | CanaryDeferred
    | Proven
    | Disproven
    | InstallEnded
    | SpansDisagreed
    | HoldChanged
    | SleepRequested
    | WakeRequested
    | Woke
    | RequestsCounted
    | Stopping
)
