"""Several models in one run, units that serve together, groups, and models that are not trained."""

from __future__ import annotations

from controlplane.core.engine_state import HoldKind
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.sim.engine import InstallEnding
from controlplane.sim.scenarios.stage import (
    decided,
    expect,
    go_on,
    life,
    next_decision,
    next_update,
    pass_time,
    rest,
    scenario,
    serve,
    team,
    trainer,
    until_quiet,
)
from controlplane.sim.settings import CRITIC, POLICY, REFERENCE
from controlplane.sim.world import World


@scenario(counts={POLICY: 2, CRITIC: 2})
def a_models_trainer_dies_while_another_models_engines_update(world: World) -> None:
    """Leases, numbers and served sets are a model's own: the other's update is decided as if nothing had been."""
    serve(world)
    update = next_update(world, CRITIC)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    trainer(world).crash()
    decided(world, update)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")
    world.settle()


@scenario(UpdatePolicy(quorum=1, min_engines={"left": 1}), {POLICY: 2, CRITIC: 1})
def groups_that_a_model_does_not_have_are_not_asked_of_it(world: World) -> None:
    """The policy's engines are counted by groups; the critic has none, and is updated all the same."""
    world.start()
    world.run_until(world.well, 20.0, "both models serve")
    life(world, "e0").hold(HoldKind.DRAINING, "ann", present=True)
    world.run_until(lambda: world.coverage.reasons["NOT_ENOUGH_ENGINES"] > 0, 20.0, "nobody is left in the group")
    number = max(world.teams[CRITIC].served).number
    world.run_until(lambda: max(world.teams[CRITIC].served).number > number, 20.0, "the critic goes on")
    life(world, "e0").hold(HoldKind.DRAINING, "ann", present=False)
    world.settle()


@scenario(UpdatePolicy(quorum=1), {POLICY: 4}, units=True)
def a_unit_of_which_one_install_fails_serves_nothing(world: World) -> None:
    """The other unit commits the version. Of this one, who applied it keeps its gate shut until both hold it."""
    serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")

    def as_it_must_be() -> bool:
        gates = [life(world, f"e{i}").open for i in range(4)]
        return gates == [False, False, True, True]

    world.run_until(as_it_must_be, 5.0, "one unit serves, the other does not")
    world.settle()


@scenario(counts={POLICY: 2, CRITIC: 2}, units=True)
def two_models_have_units_of_one_name(world: World) -> None:
    """What becomes of one is told to its own members."""
    serve(world)
    for name, partner in (("e0", "e1"), ("ce0", "ce1")):
        rest(world)
        world.agents[name].crash()
        pass_time(world, 3.0)
        expect(world, not life(world, partner).open, f"{partner} serves nothing")
        go_on(world)
        until_quiet(world)
    world.settle()


@scenario(UpdatePolicy(), {POLICY: 4}, units=True)
def a_member_of_a_unit_dies_and_the_other_serves_nothing(world: World) -> None:
    """Its partner's gate shuts, as it is told to serve nothing, and opens when both hold the version again."""
    serve(world)
    world.agents["e0"].crash()
    world.run_until(lambda: not life(world, "e1").open, 5.0, "e1 serves nothing")
    world.settle()


@scenario(counts={POLICY: 1, REFERENCE: 2})
def a_frozen_models_engine_with_other_weights_is_refused(world: World) -> None:
    """The first says what the model is; one that loaded something else is nobody's, until it loads the same."""
    odd = world.agents["re1"]
    right, odd.content = odd.content, world.around.next_content()
    world.start()
    world.run_until(lambda: life(world, "re0").open or life(world, "re1").open, 20.0, "one serves")
    pass_time(world, 5.0)
    gates = [life(world, name).open for name in ("re0", "re1")]
    expect(world, sorted(gates) == [False, True], f"one of them serves: {gates}")
    expect(world, world.coverage.reasons["VERSION_CONFLICT"] > 0, "the other is told why not")
    wrong = odd if gates[0] else world.agents["re0"]
    wrong.content = right if gates[0] else odd.content
    wrong.crash()
    world.settle()


@scenario(counts={POLICY: 1, REFERENCE: 1})
def a_frozen_engine_that_is_poisoned_is_started_anew(world: World) -> None:
    """No update will ever heal it, so its agent ends its life."""
    serve(world)
    one = life(world, "re0")
    one.requests.disagree()
    world.run_until(lambda: life(world, "re0") is not one, 5.0, "it has a new life")
    world.settle()


@scenario(counts={POLICY: 1, CRITIC: 1, REFERENCE: 1})
def a_run_of_three_models_is_quiet(world: World) -> None:
    """Nothing goes wrong at all."""
    serve(world)
    numbers = [v.number for t in world.teams.values() for v in t.served]
    expect(world, len(set(numbers)) == len(numbers), f"{numbers}")
    expect(world, team(world).served[0].number > 0, "a trained model has a number")
    world.settle()
