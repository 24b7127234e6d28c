"""The simulator: its scenarios and a few seeds, one history for one seed, and a witness that names planted faults."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from controlplane.core import engine_events as ee
from controlplane.core import fleet_events as fe
from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_state import Held, Poisoned
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_records import EngineRecord, UpdateDecided, UpdateWentGo
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, Term
from controlplane.sim.runner import run, run_scenario, run_seed
from controlplane.sim.scenarios import SCENARIOS
from controlplane.sim.settings import SimSettings

SEEDS = range(20)
EVENTS = 1200


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario(name: str, seed: int) -> None:
    _, violation = run_scenario(name, seed, SimSettings())
    assert violation is None, str(violation)


def test_no_seed_breaks_the_contract_and_every_fleet_lights_up_again() -> None:
    report = run(SEEDS, EVENTS, scenarios=False)
    assert report.good, "\n".join(report.lines())


def test_a_hundred_engines_in_one_world() -> None:
    world, violation = run_seed(3, 0, SimSettings(engines=100))
    assert violation is None, str(violation)
    assert world.coverage.fleet_events["EngineConnected"] >= 100


def test_one_seed_is_one_history_whatever_the_interpreter_hashes() -> None:
    def history(hash_seed: str) -> str:
        program = (
            "from controlplane.sim.runner import run_seed\n"
            "from controlplane.sim.settings import SimSettings\n"
            "w, v = run_seed(7, 1500, SimSettings())\n"
            "print(w.kernel.events, w.kernel.now, w.describe(), sorted(w.coverage.engine_events.items()), v)"
        )
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert history("1") == history("2")


def test_the_report_names_what_was_never_reached() -> None:
    report = run([1], 300, scenarios=False)
    lines = "\n".join(report.lines())
    assert "1 worlds" in lines
    for kind in (
        "engine events",
        "coordinator events",
        "engine words",
        "update phases",
        "error reasons",
        "fault points",
    ):
        assert f"never reached, {kind}: " in lines


# ---- planted faults: each breaks one rule, and the witness names it ----


class ClaimsDuringTheInstall(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        return [] if isinstance(event, ee.Quiesced) else super().handle(event, now)


class ClaimsAtTheCommit(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ee.CommitArrived):
            self.state = replace(self.state, weights=Held(event.version, event.content_digest))
        return effects


class TheEndCommits(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        update = self.update
        if isinstance(event, ee.StreamEnded) and update is not None and update.verified and not self.state.installing:
            return [ee.StartInstall(event.stream, update)]
        return super().handle(event, now)


class ResumesAfterAFailure(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        if isinstance(event, ee.InstallEnded):
            event = replace(event, touched=False)
        return super().handle(event, now)


class ForgetsPoison(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        before = self.state
        effects = super().handle(event, now)
        if isinstance(self.state.weights, Poisoned) and isinstance(event, ee.SpansDisagreed):
            self.state = before
        return effects


class GoesBack(EngineCore):
    def _check_version(self, event: ee.Opened) -> None:
        pass


class AnswersDone(EngineCore):
    def _is_done_or_under_way(self, event: ee.Opened) -> bool:
        progress = self.state.progress
        return progress is not None and (progress.update_id, progress.version) == (event.update_id, event.version)


class ForgetsTerms(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        self.term = Term(0)
        return super().handle(event, now)


class NeedsNoWelcome(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        self.welcomed = True
        return super().handle(event, now)


class FollowsOldCoordinators(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[ee.Effect]:
        if isinstance(event, ee.FleetChanged):
            self.coordinator_term = Term(0)
        return super().handle(event, now)


class IgnoresHolds(EngineCore):
    @property
    def gate_open(self) -> bool:
        return isinstance(self.state.weights, Held) and self.state.weights.version in self.served


class TrustsSilence(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        return [] if isinstance(event, fe.Tick) else super().handle(event, now)


class RoutesWhatIsShut(FleetCore):
    def routable(self, record: EngineRecord) -> bool:
        return record.state.applied in self.model(record.state.model).served


class SavesNoDecision(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fe.Save) and isinstance(x.record, UpdateDecided))]


class SavesNoGo(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fe.Save) and isinstance(x.record, UpdateWentGo))]


class GivesNumbersTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.UpdateRequested):
            self.next_number = 1
        return super().handle(event, now)


class GivesTermsTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.TrainerConnected):
            for model in self.models.values():
                model.term = Term(0)
        return super().handle(event, now)


class NeverDecides(FleetCore):
    def open_update(self, model: ModelName) -> UpdateTransaction | None:
        return None


PLANTED: list[tuple[type[EngineCore] | type[FleetCore], str]] = [
    (ClaimsDuringTheInstall, "INV-1"),
    (ClaimsAtTheCommit, "INV-1"),
    (TheEndCommits, "INV-3"),
    (ResumesAfterAFailure, "INV-1"),
    (ForgetsPoison, "INV-11"),
    (GoesBack, "INV-5"),
    (AnswersDone, "INV-6"),
    (ForgetsTerms, "INV-7"),
    (NeedsNoWelcome, "INV-7"),
    (IgnoresHolds, "INV-4"),
    (TrustsSilence, "INV-8"),
    (RoutesWhatIsShut, "INV-10"),
    (SavesNoDecision, "INV-9"),
    (SavesNoGo, "INV-9"),
    (GivesNumbersTwice, "versions"),
    (GivesTermsTwice, "INV-7"),
    (NeverDecides, "liveness"),
]


@pytest.mark.parametrize(("core", "invariant"), PLANTED, ids=[c.__name__ for c, _ in PLANTED])
def test_a_planted_fault_is_caught(core: type[EngineCore] | type[FleetCore], invariant: str) -> None:
    settings = SimSettings(engine_core=core) if issubclass(core, EngineCore) else SimSettings(fleet_core=core)
    found = set()
    for seed in range(60):
        _, violation = run_seed(seed, EVENTS, settings)
        found.add(violation.invariant if violation else "")
        if invariant in found:
            return
    pytest.fail(f"{invariant} was not named: {found}")


def test_a_planted_old_coordinator_is_followed_only_by_the_planted_core() -> None:
    name = "an_old_coordinators_call_arrives_after_the_new_ones"
    _, violation = run_scenario(name, 0, SimSettings(engine_core=FollowsOldCoordinators))
    assert violation is not None
