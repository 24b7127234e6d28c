"""The engine agent's decisions, event by event: INV-1, 3, 4, 5, 6, 7 at their keeper."""

from __future__ import annotations

import pytest

from controlplane.core import engine_core as core
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.assembly import Record
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, KeptBase, Life, Poisoned, Stage, Timings
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

    def welcome(self, term: int, *served: WeightVersion, coordinator_term: int = 1) -> list[events.Effect]:
        return self.handle(events.FleetChanged(Term(coordinator_term), Term(term), frozenset(served)))

    def handle(self, event: events.Event) -> list[events.Effect]:
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
    ) -> list[events.Effect]:
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

    def chunk(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1) -> list[events.Effect]:
        a, b = checksums(seed)
        records = [Record(0, 0, 0, 16, a), Record(1, 0, 16, 12, b)]
        return self.handle(events.ChunkArrived(stream, version(number, term), 0, records, 28))

    def commit(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1) -> list[events.Effect]:
        digest = content_digest(checksums(seed))
        return self.handle(events.CommitArrived(stream, version(number, term), 1, 28, digest))

    def receive(self, number: int, *, stream: int = 1, term: int = 1, seed: int = 1, update_id: str = "") -> None:
        accept = next(
            x for x in self.open(number, stream=stream, term=term, update_id=update_id) if isinstance(x, events.Accept)
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


def test_v3_the_old_version_is_claimed_between_any_two_frames_before_the_commit() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    assert agent.applied == version(1)


def test_inv1_unset_from_quiesced_until_the_canary_spoke() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    assert agent.applied == version(1)
    agent.handle(events.Quiesced())
    assert agent.applied is None
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.core.state.weights == Held(version(2), content_digest(checksums(5)))


def test_inv3_the_end_of_a_stream_is_an_abort_and_never_a_commit() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    effects = agent.handle(events.StreamEnded(2, "gone"))
    assert events.DropStaged(2) in effects
    assert (agent.applied, agent.stage) == (version(1), Stage.ABORTED)
    with pytest.raises(e.UpdateAborted):
        agent.commit(2, stream=2, seed=5)


def test_inv3_a_stream_may_end_once_its_commit_was_taken() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    assert agent.handle(events.StreamEnded(1, "gone")) == []
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(1)


@pytest.mark.parametrize(
    ("chunks", "byte_count", "seed", "error"),
    [(2, 28, 1, e.ByteCountMismatch), (1, 27, 1, e.ByteCountMismatch), (1, 28, 9, e.ChecksumMismatch)],
)
def test_m3_a_commit_that_does_not_state_what_came_is_refused(
    chunks: int, byte_count: int, seed: int, error: type[e.WeightplaneError]
) -> None:
    agent = Agent()
    agent.receive(1)
    with pytest.raises(error):
        agent.handle(events.CommitArrived(1, version(1), chunks, byte_count, content_digest(checksums(seed))))
    assert agent.stage is Stage.READY


def test_v5_a_commit_before_every_byte_was_checked_is_refused() -> None:
    agent = Agent()
    agent.open(1)
    agent.handle(events.LayoutArrived(1, LAYOUT))
    agent.chunk(1)
    with pytest.raises(e.FrameOutOfOrder):
        agent.commit(1)


def test_inv4_a_failure_before_the_first_byte_leaves_the_old_version_in_force() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    assert not agent.core.gate_open
    agent.handle(events.InstallEnded(e.DeadlineExceeded("quiesce", "the last tokens", 1.0), touched=False))
    assert agent.applied == version(1)
    assert agent.core.gate_open


def test_inv4_a_failure_after_the_first_byte_is_poison_and_only_a_full_update_heals_it() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    agent.handle(events.Quiesced())
    agent.handle(events.InstallEnded(e.InstallFailed("e0", "1.2", True, "boom"), touched=True))
    assert isinstance(agent.core.state.weights, Poisoned)
    assert agent.applied is None
    assert not agent.core.gate_open
    agent.apply(3, stream=3, seed=7)
    agent.welcome(1, version(3))
    assert agent.core.gate_open


def test_v4_the_new_version_is_never_claimed_by_a_failed_install() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.handle(events.Quiesced())
    agent.handle(events.InstallEnded(e.CanaryFailed("e0", "1.1", "NaN"), touched=True))
    assert agent.applied is None
    assert agent.stage is Stage.FAILED


def test_inv5_a_version_below_one_applied_in_this_incarnation_is_refused() -> None:
    agent = Agent()
    agent.apply(7)
    with pytest.raises(e.StaleVersion) as refusal:
        agent.open(6, stream=2)
    assert (refusal.value.applied, refusal.value.got) == (7, 6)
    assert agent.applied == version(7)


def test_inv6_the_same_update_before_its_commit_starts_anew_and_ends_the_older_stream() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.open(1, stream=2)
    assert any(isinstance(x, events.EndStream) and x.stream == 1 for x in effects)
    agent.chunk(1, stream=2)
    with pytest.raises(e.UpdateAborted):
        agent.commit(1, stream=1)


def test_inv6_the_same_update_after_its_commit_attaches() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    assert events.Accept(2, layout_needed=False, attached=True) in agent.open(1, stream=2)
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert events.Accept(3, layout_needed=False, attached=True) in agent.open(1, stream=3)


def test_inv6_done_is_answered_only_while_it_is_held_now() -> None:
    agent = Agent()
    agent.apply(1)
    agent.handle(events.SpansDisagreed("not what the engine says"))
    effects = agent.open(1, stream=2)
    assert events.Accept(2, layout_needed=False, attached=False) in effects


def test_inv6_the_same_version_with_other_content_is_a_conflict() -> None:
    agent = Agent()
    agent.apply(1, seed=1)
    agent.handle(events.SpansDisagreed("poisoned"))
    agent.receive(1, stream=2, seed=5, update_id="other")
    with pytest.raises(e.VersionConflict):
        agent.commit(1, stream=2, seed=5)


def test_inv7_nothing_is_taken_before_the_welcome() -> None:
    with pytest.raises(e.NotWelcomed):
        Agent(welcomed=False).open(1)


def test_inv7_a_lower_term_than_the_disk_remembers_is_refused() -> None:
    agent = Agent(term=5)
    with pytest.raises(e.StaleTerm) as refusal:
        agent.open(1, term=4)
    assert (refusal.value.got, refusal.value.current) == (4, 5)


def test_inv7_a_higher_term_ends_an_update_of_a_lower_one_before_its_install() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.welcome(2)
    assert any(isinstance(x, events.EndStream) and isinstance(x.error, e.StaleTerm) for x in effects)
    assert events.Remember(Term(2), Term(1), 0) in effects
    with pytest.raises(e.UpdateAborted):
        agent.commit(1)


def test_inv7_an_install_that_began_runs_to_its_end() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.welcome(2)
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(1)


def test_inv7_an_old_coordinators_words_are_refused() -> None:
    agent = Agent()
    agent.welcome(1, coordinator_term=3)
    with pytest.raises(e.StaleTerm):
        agent.welcome(1, version(9), coordinator_term=2)
    assert agent.core.served == frozenset()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"run": "other"}, e.WrongRun),
        ({"model": "teacher"}, e.WrongModel),
        ({"incarnation": "life-0"}, e.WrongIncarnation),
    ],
)
def test_l2_l7_words_for_another_run_model_or_life_are_refused(
    changed: dict[str, str], error: type[e.WeightplaneError]
) -> None:
    agent = Agent()
    with pytest.raises(error):
        agent.open(1, **changed)  # type: ignore[arg-type]
    assert agent.core.update is None


def test_g1_a_second_writer_is_told_who_holds_the_stream() -> None:
    agent = Agent()
    agent.receive(1)
    with pytest.raises(e.UpdateInProgress) as refusal:
        agent.open(2, stream=2)
    assert refusal.value.update_id == "u1"


def test_m2_a_layout_that_does_not_cover_the_engine_is_refused_by_name() -> None:
    agent = Agent()
    short = Layout((TensorSpec("a", DType.F32, (2, 2)),))
    agent.open(1, layout=short)
    with pytest.raises(e.ManifestIncomplete) as refusal:
        agent.handle(events.LayoutArrived(1, short))
    assert refusal.value.names == ["b"]


def test_a_layout_is_sent_once_and_then_named_by_its_digest() -> None:
    agent = Agent()
    agent.apply(1)
    assert events.Accept(2, layout_needed=False, attached=False) in agent.open(2, stream=2)


def test_v2_an_update_to_a_paused_engine_ends_applied_and_the_gate_stays_as_the_operator_left_it() -> None:
    agent = Agent()
    hold = Hold(HoldKind.OPERATOR, "me")
    agent.handle(events.HoldChanged(hold, present=True))
    agent.apply(1)
    agent.welcome(1, version(1))
    assert agent.applied == version(1)
    assert not agent.core.gate_open
    agent.handle(events.HoldChanged(hold, present=False))
    assert agent.core.gate_open


def test_an_operators_resume_in_mid_install_opens_nothing() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    agent.handle(events.HoldChanged(Hold(HoldKind.OPERATOR, "me"), present=False))
    assert not agent.core.gate_open


def test_a_death_leaves_nothing_held_and_ends_the_update() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    effects = agent.handle(events.Died("killed"))
    assert any(isinstance(x, events.EndStream) for x in effects)
    assert (agent.applied, agent.core.state.life) == (None, Life.DEAD)
    with pytest.raises(e.EngineNotReady):
        agent.open(3, stream=3)
