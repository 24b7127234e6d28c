"""An engine's core without an engine: a test tells it what arrives, what is read and how installs end."""

from __future__ import annotations

from controlplane.core import engine_core as core
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.engine_core import DELTA
from controlplane.core.engine_state import (
    EngineState,
    Held,
    KeptBase,
    Stage,
    Timings,
)
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.layout import DType, Expected, Layout, TensorSpec, content_digest
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion

LAYOUT = Layout((TensorSpec("a", DType.F32, (2, 2)), TensorSpec("b", DType.F32, (3,))))
EXPECTED = Expected(shapes={"a": (2, 2), "b": (3,)}, dtypes={"a": frozenset({DType.F32}), "b": frozenset({DType.F32})})
INCARNATION = Incarnation("life-1")


def checksums(seed: int) -> list[bytes]:
    return [bytes([seed] * 8), bytes([seed + 1] * 8)]


def version(number: int, term: int = 1) -> WeightVersion:
    return WeightVersion(number, Term(term))


class Agent:
    """Drives a core as an agent does, one call a step."""

    def __init__(
        self,
        *,
        term: int = 0,
        welcomed: bool = True,
        frozen: bytes | None = None,
        capabilities: frozenset[str] = frozenset({core.SLEEP}),
    ) -> None:
        state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), INCARNATION)
        self.core = core.EngineCore(state, term=Term(term), coordinator_term=Term(0), number=0)
        self.now = 0.0
        self.core.handle(events.Started(EXPECTED, capabilities, frozen), self.now)
        if welcomed:
            self.welcome(term or 1)

    def welcome(self, term: int, *served: WeightVersion, coordinator_term: int = 1) -> list[fx.Effect]:
        return self.handle(events.FleetChanged(Term(coordinator_term), Term(term), frozenset(served)))

    def handle(self, event: events.Event) -> list[fx.Effect]:
        return self.core.handle(event, self.now)

    def open(
        self,
        number: int,
        *,
        stream: int = 1,
        term: int = 1,
        update_id: str = "",
        run: str = "run",
        model: str = "policy",
        incarnation: str = INCARNATION,
        layout: Layout = LAYOUT,
        by_coordinator: int | None = None,
        base: Held | None = None,
        kept: KeptBase | None = None,
        streaming: bool = False,
    ) -> list[fx.Effect]:
        """`by_coordinator`: the writer is one, with that term of its own."""
        return self.handle(
            events.Opened(
                stream,
                RunId(run),
                ModelName(model),
                Incarnation(incarnation),
                UpdateId(update_id or f"u{number}"),
                Term(term if by_coordinator is None else by_coordinator),
                version(number, term),
                layout.digest,
                len(layout.tensors),
                layout.byte_count,
                by_coordinator is not None,
                base,
                kept=kept,
                streaming=streaming,
            )
        )

    def chunk(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1) -> list[fx.Effect]:
        a, b = checksums(seed)
        records = [Record(0, 0, 0, 16, a), Record(1, 0, 16, 12, b)]
        return self.handle(events.ChunkArrived(stream, version(number, term), 0, records, 28))

    def commit(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1) -> list[fx.Effect]:
        digest = content_digest(checksums(seed))
        return self.handle(events.CommitArrived(stream, version(number, term), 1, 28, digest))

    def receive(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1, update_id: str = "") -> None:
        accept = next(
            x for x in self.open(number, stream=stream, term=term, update_id=update_id) if isinstance(x, fx.Accept)
        )
        if accept.layout_needed:
            self.handle(events.LayoutArrived(stream, LAYOUT))
        self.chunk(number, stream=stream, term=term, seed=seed)
        self.handle(events.BytesVerified(stream))

    def apply(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1, update_id: str = "") -> None:
        self.receive(number, stream=stream, term=term, seed=seed, update_id=update_id)
        self.commit(number, stream=stream, term=term, seed=seed)
        self.handle(events.Quiesced())
        self.handle(events.CanaryPassed(Timings()))

    @property
    def applied(self) -> WeightVersion | None:
        return self.core.state.applied

    @property
    def stage(self) -> Stage | None:
        progress = self.core.state.progress
        return progress.stage if progress else None


CAPABILITIES = frozenset({STREAMING, DELTA})


class Streaming(Agent):
    """An agent whose engine holds and serves version 1, and the frames of a streaming update to version 2."""

    def __init__(self) -> None:
        super().__init__(capabilities=CAPABILITIES)
        self.apply(1)
        self.welcome(1, version(1))

    def admit(self, number: int = 2, *, stream: int = 2, term: int = 1) -> None:
        self.open(number, stream=stream, term=term, streaming=True)
        self.handle(events.StreamAdmitted(stream))

    def part(self, tensor: int, number: int = 2, *, stream: int = 2) -> list[fx.Effect]:
        record = [Record(0, 0, 0, 16, checksums(5)[0]), Record(1, 0, 0, 12, checksums(5)[1])][tensor]
        return self.handle(events.ChunkArrived(stream, version(number), tensor, [record], record.byte_count))

    def touch(self) -> None:
        """Up to the first byte in the engine."""
        self.admit()
        self.part(0)
        self.handle(events.Quiesced())

    def all_in(self) -> None:
        self.touch()
        self.part(1)
        self.handle(events.BytesVerified(2))

    def commit_streamed(self, *, chunks: int = 2, byte_count: int = 28, seed: int = 5) -> list[fx.Effect]:
        digest = content_digest(checksums(seed))
        return self.handle(events.CommitArrived(2, version(2), chunks, byte_count, digest))


def asleep(level: int = 1, *, owner: str = "trainer") -> Agent:
    """An engine that serves version 1, put to sleep."""
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.handle(events.SleepRequested(owner, level))
    return agent
