"""The simulator: its scenarios and a few seeds, one history for one seed, and what they reach."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from controlplane.sim.coverage import NOT_HERE
from controlplane.sim.faults import POINTS
from controlplane.sim.runner import run, run_scenario, run_seed
from controlplane.sim.scenarios import SCENARIOS
from controlplane.sim.settings import CRITIC, POLICY, REFERENCE, SimSettings

SEEDS = range(20)
EVENTS = 1200


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_no_scenario_breaks_the_contract(name: str, seed: int) -> None:
    _, violation = run_scenario(name, seed, SimSettings())
    assert violation is None, str(violation)


def test_no_seed_breaks_the_contract_and_every_fleet_lights_up_again() -> None:
    report = run(SEEDS, EVENTS, scenarios=False)
    assert report.good, "\n".join(report.lines())


def test_a_hundred_engines_in_one_world() -> None:
    world, violation = run_seed(3, 0, SimSettings(engines=100))
    assert violation is None, str(violation)
    assert world.coverage.fleet_events["EngineConnected"] >= 100


def test_every_seeded_world_has_two_trained_models_and_a_frozen_one() -> None:
    world, violation = run_seed(5, 0, SimSettings())
    assert violation is None, str(violation)
    assert sorted(world.teams) == [CRITIC, POLICY, REFERENCE]
    assert [team.served[0].number > 0 for _, team in sorted(world.teams.items())] == [True, True, False]


def test_the_scenarios_alone_reach_every_event_transition_phase_reason_and_fault_point() -> None:
    report = run([0], 0)
    assert report.good, "\n".join(report.lines())
    assert {kind: names for kind, names in report.coverage.never(POINTS).items() if names} == {}
    assert not report.coverage.reasons.keys() & NOT_HERE.keys(), "the list says that they are not to be met here"


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
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
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
        "engine transitions",
        "update phases",
        "error reasons",
        "fault points",
    ):
        assert f"never reached, {kind}: " in lines
