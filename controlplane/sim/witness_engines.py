"""The witness's half that watches engines: what they claim, begin, make and hold, against what they really are."""

from __future__ import annotations

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core.engine_state import EngineState, Held, HoldKind, Poisoned, Residency
from controlplane.core.engine_transitions import moves
from controlplane.core.engine_update import Update
from controlplane.core.names import TRAINERS
from controlplane.core.versions import FROZEN, NO_TURN, WeightVersion
from controlplane.sim.life import Life
from controlplane.sim.settings import digest_of
from controlplane.sim.witness_base import Truth


class EngineWitness(Truth):
    """Nothing in an `EngineCore` is asked whether it is right."""

    tokens = 0

    def engine(self, life: Life, event: ee.Event, before: EngineState, effects: list[fx.Effect]) -> None:
        """An engine agent decided `event`; nothing was carried out yet."""
        after = life.core.state
        self.coverage.engine_events[type(event).__name__] += 1
        for move in moves(type(event), before, after):
            self.coverage.moves[move] += 1
        for hold in after.holds - before.holds:
            self.coverage.holds[hold.kind] += 1
        if isinstance(event, ee.FleetChanged):
            life.notes.told = event.served
        self._check_claim(life, event, before)
        self._check_sleep(life, event, before, effects)
        self._check_gate(life)
        if isinstance(event, ee.InstallEnded):
            self._check_failure(life, event)
        for effect in effects:
            if isinstance(effect, fx.StartInstall | fx.FinishStreaming):
                self._check_commit(life, event, effect.update)
            elif isinstance(effect, fx.StartStreaming):
                self._check_stream(life, event, effect.update)
            elif isinstance(effect, fx.Accept):
                self._check_accept(life, event, effect, before)
        self.check(after.incarnation == before.incarnation, "L2", "an incarnation changed its name")

    # ---- claims ----

    def _true(self, life: Life, version: WeightVersion) -> bytes | None:
        """The content that this engine has if its claim is right: of a frozen model, what itself loaded."""
        if version == FROZEN:
            return None if life.agent.content is None else digest_of(life.agent.content)
        return self.truth.get((life.agent.spec.name, version))

    def _check_claim(self, life: Life, event: ee.Event, before: EngineState) -> None:
        after, notes = life.core.state, life.notes
        applied = after.applied
        if applied is not None and isinstance(after.weights, Held):
            holds = life.engine.content
            good = holds == self._true(life, applied)
            self.check(good, "INV-1", f"{life} claims {applied}, holds {holds.hex()[:12]}")
            self.check(holds == after.weights.content_digest, "INV-1", f"{life} claims another digest")
            self.check((applied == FROZEN) == after.frozen, "frozen", f"{life} claims {applied}")
        if applied is not None and applied != before.applied:
            by_install = isinstance(event, ee.CanaryPassed | ee.CanaryDeferred)
            restored = isinstance(event, ee.InstallEnded) and not event.touched
            loaded = isinstance(event, ee.Started) and event.initial_digest is not None
            good = by_install or restored or loaded
            self.check(good, "INV-2", f"{type(event).__name__} made {life} claim {applied}")
        if isinstance(event, ee.CanaryPassed | ee.CanaryDeferred) and applied is not None:
            good = applied.number >= notes.highest or applied == notes.excused
            self.check(good, "INV-5", f"{life} applied {applied} after {notes.highest}")
            notes.highest = max(notes.highest, applied.number)
        if isinstance(event, ee.CanaryPassed | ee.CanaryDeferred):
            taken = after.progress is not None and notes.committed == after.progress.update_id
            self.check(taken, "INV-3", f"{life} claims {applied} without a commit frame")
            notes.distrusted = False
        elif isinstance(event, ee.SpansDisagreed):
            notes.distrusted = True
        self.check(not (notes.distrusted and applied), "INV-11", f"{life} claims {applied}, and its spans disagreed")

    def _check_gate(self, life: Life) -> None:
        state = life.core.state
        if not life.core.gate_open:
            return
        good = state.applied is not None and not state.installing
        self.check(good, "INV-4", f"{life}: the gate is open on {state}")
        heard = state.frozen or life.engine.heard == life.engine.content
        self.check(heard, "INV-1", f"{life}: the gate is open on what no canary spoke of")
        self.check(not state.holds, "INV-4", f"{life}: the gate is open, and held by {state.holds}")
        self.check(state.applied in life.notes.told, "INV-10", f"{life}: the gate is open on {state.applied}")
        awake = life.engine.residency is Residency.AWAKE and not life.notes.sleepers
        self.check(awake, "sleep", f"{life}: the gate is open, and it sleeps for {life.notes.sleepers}")

    # ---- sleep ----

    def _check_sleep(self, life: Life, event: ee.Event, before: EngineState, effects: list[fx.Effect]) -> None:
        """What is claimed of memory is there; and only who put an engine to sleep wakes it."""
        notes, after = life.notes, life.core.state
        if isinstance(event, (ee.SleepRequested, ee.WakeRequested)):
            self._check_turn(life, event)
        if isinstance(event, ee.SleepRequested):
            notes.sleepers.add(event.owner)
            notes.unheard.add(event.owner)
        elif isinstance(event, ee.WakeRequested):
            others = notes.sleepers - {event.owner}
            wakes = any(isinstance(x, fx.StartWake) for x in effects)
            self.check(not (wakes and others), "devices", f"{event.owner} wakes {life}, which sleeps for {others}")
            notes.unheard.discard(event.owner)
            if others:  # its word was heard all the same
                notes.sleepers.discard(event.owner)
        elif isinstance(event, ee.Woke) and after.residency is not before.residency:
            self.check(not notes.unheard, "devices", f"{life} is awake, and {notes.unheard} put it to sleep since")
            if after.residency is Residency.AWAKE:
                notes.sleepers.clear()
        self.check_memory(life, at_rest=False)

    def _check_turn(self, life: Life, event: ee.SleepRequested | ee.WakeRequested) -> None:
        """INV-7: whose word moves an engine's memory has the lease, as far as the agent knows, and did not go past that
        word itself; but what it took it may give back, fenced or not, unless it took it again."""
        turn, notes = event.turn, life.notes
        if turn is None:
            return
        slept = isinstance(event, ee.SleepRequested)
        latest = notes.turn if slept else notes.taken.get(event.owner, NO_TURN)
        self.check(turn >= latest, "INV-7", f"{event} moves {life}, which heard {latest}")
        self.check(not slept or turn.term >= life.core.term, "INV-7", f"{event} is heeded under term {life.core.term}")
        notes.turn = max(notes.turn, turn)
        if slept:
            notes.taken[event.owner] = turn

    def check_memory(self, life: Life, *, at_rest: bool) -> None:
        """What it says of memory is there; and while nothing is under way on it, no more than that."""
        if life.running:
            says, really = life.core.state.residency, life.engine.residency
            more = says is Residency.ASLEEP or really is Residency.AWAKE
            good = says is really or (more and not at_rest)
            self.check(good, "sleep", f"{life} says {says.value} and is {really.value}")

    # ---- updates ----

    def _check_failure(self, life: Life, event: ee.InstallEnded) -> None:
        after, held_before = life.core.state, life.notes.held_before_install
        if event.touched:
            self.check(isinstance(after.weights, Poisoned), "INV-4", f"{life} was touched and is {after.weights}")
            self.check(not life.core.gate_open, "INV-4", f"{life} is poisoned and its gate is open")
        else:
            shut = life.notes.distrusted and isinstance(after.weights, Poisoned)
            self.check(after.weights == held_before or shut, "INV-4", f"{life} lost {held_before}")

    def _check_stream(self, life: Life, event: ee.Event, update: Update) -> None:
        """A streaming install begins: only by a chunk, and its writer was let go (INV-9)."""
        self.check(isinstance(event, ee.ChunkArrived), "INV-3", f"{type(event).__name__} began an install on {life}")
        went_go = self.disk.kept.went_go
        good = update.update_id in went_go or self.ledger_restored
        self.check(good, "INV-9", f"{update.update_id} goes into {life} before go")
        self._check_writer(life, update.writer_term, by_coordinator=update.by_coordinator)
        self.check(life.notes.welcomed, "INV-7", f"{life} installs before a welcome")
        life.notes.held_before_install, life.notes.committed = life.core.state.weights, None

    def _check_commit(self, life: Life, event: ee.Event, update: Update) -> None:
        what = "ended" if update.streaming else "began"
        self.check(isinstance(event, ee.CommitArrived), "INV-3", f"{type(event).__name__} {what} an install on {life}")
        assert isinstance(event, ee.CommitArrived)
        staged = life.staged[update.stream]
        arrived = (staged.chunks, staged.byte_count, staged.digest())
        stated = (event.chunk_count, event.byte_count, event.content_digest)
        self.check(arrived == stated, "INV-3", f"{life}: {stated} was stated, {arrived} came")
        self.check(event.version == update.version, "INV-2", f"a commit of {event.version} began {update.version}")
        own = self.truth.get((life.agent.spec.name, update.version))
        self.check(staged.digest() == own, "models", f"{life}: {update.version} is not these bytes of its model")
        self._check_writer(life, update.writer_term, by_coordinator=update.by_coordinator)
        self.check(life.notes.welcomed, "INV-7", f"{life} installs before a welcome")
        life.notes.committed = update.update_id
        if not update.streaming:
            life.notes.held_before_install = life.core.state.weights

    def _check_writer(self, life: Life, term: int, *, by_coordinator: bool) -> None:
        agent = life.agent
        seen = agent.seen_coordinator_term if by_coordinator else agent.seen_term
        whose = "coordinator" if by_coordinator else "trainer"
        self.check(term >= seen, "INV-7", f"{life} obeys {whose} term {term}, and saw {seen}")

    def _check_accept(self, life: Life, event: ee.Event, effect: fx.Accept, before: EngineState) -> None:
        assert isinstance(event, ee.Opened)
        notes = life.notes
        self.check(notes.welcomed, "INV-7", f"{life} took an update before its welcome")
        self._check_writer(life, event.writer_term, by_coordinator=event.by_coordinator)
        self.check(event.model == life.agent.spec.name, "models", f"{life} took an update of {event.model}")
        self.check(life.agent.content is None, "frozen", f"{life} took an update")
        if event.by_coordinator and before.applied is None and event.version in notes.told:
            notes.excused = event.version
        good = event.version.number >= notes.highest or event.version == notes.excused
        self.check(good, "INV-5", f"{life} took {event.version} after {notes.highest}")
        state = life.core.state
        if not effect.attached:
            beside = state.residency is Residency.WEIGHTS and not event.by_coordinator
            lent = beside and all(owner.startswith(TRAINERS) for owner in life.notes.sleepers)
            room = state.residency is Residency.AWAKE or (lent and life.engine.weights_resident)
            self.check(room, "sleep", f"{life} took an update, and is {state.residency.value}")
            draining = state.held_by(HoldKind.DRAINING)
            self.check(draining is None, "drain", f"{life} took an update, and drains for {draining}")
        elif not state.installing:
            held = life.engine.content == self._true(life, event.version) and state.applied == event.version
            self.check(held, "INV-6", f"{life} answers {event.version} as done and does not hold it")

    def heard_doubt(self, life: Life, version: WeightVersion) -> None:
        """Equal engines contradict it, and it was told so: it does not serve that version a moment longer."""
        held = life.core.state.applied == version
        self.check(not held, "doubts", f"{life} is doubted, and holds {version} still")

    def install_begins(self, life: Life) -> None:
        """The first byte comes now."""
        really = life.engine.residency
        self.check(life.engine.weights_resident, "sleep", f"an install begins on {life}, which is {really.value}")
        self.check(life.core.state.applied is None, "INV-1", f"{life} claims {life.core.state.applied} in an install")

    def acted(self, life: Life, event: ee.Event) -> None:
        """What followed from `event` was carried out: terms in it are on the agent's disk now (INV-7)."""
        agent = life.agent
        if isinstance(event, ee.FleetChanged):
            old = agent.seen_coordinator_term
            self.check(event.coordinator_term >= old, "INV-7", f"{life} followed coordinator {event.coordinator_term}")
            agent.seen_coordinator_term = event.coordinator_term
            agent.seen_term = max(agent.seen_term, event.term)
            life.notes.welcomed = True
        elif isinstance(event, ee.Opened) and event.by_coordinator:
            agent.seen_coordinator_term = max(agent.seen_coordinator_term, event.writer_term)
        elif isinstance(event, ee.Opened):
            agent.seen_term = max(agent.seen_term, event.writer_term)

    # ---- tokens ----

    def made_token(self, life: Life) -> None:
        really = life.engine.residency
        self.check(really is Residency.AWAKE, "sleep", f"{life} made a token, and is {really.value}")

    def token(self, life: Life, version: WeightVersion, content: bytes) -> None:
        """A token left under `version`; `content` made it."""
        self.tokens += 1
        good = content == self.truth.get((life.agent.spec.name, version))
        self.check(good, "INV-11", f"{life} labels a token {version}")
