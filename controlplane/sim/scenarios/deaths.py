"""A process dies, or stops, at each fault point in turn, in a fleet that does everything that it can do."""

from __future__ import annotations

from functools import partial

from controlplane.sim.faults import POINTS
from controlplane.sim.scenarios.stage import ALL, SCENARIOS, Scenario, go_on, serve, team, trainer
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World

LIMIT_SECONDS = 120.0


def _dies_at(world: World, point: str, action: str) -> None:
    """Whoever passes the point first; and then all is well again."""
    serve(world)
    for process in world.processes():
        world.faults.arm(point, process.name, action)
    team(world).borrows = True
    _do_everything(world)
    world.run_until(lambda: world.coverage.points[point] > 0, LIMIT_SECONDS, f"somebody passes {point}")
    go_on(world)
    world.settle()


def _do_everything(world: World) -> None:
    """Every few seconds: a checkpoint, a sleep, an engine that starts anew while nobody pushes."""
    writer, push = trainer(world), trainer(world).push
    if writer.up and push is not None and push.over and push.shipment is not None:
        writer.publisher.write(push.shipment, surely=True)
    agent = world.agents["e1"]
    if agent.up and agent.present.running:
        world.people.sleep(agent)
    if world.agents["e2"].up and world.kernel.rng.random() < 0.5:
        world.agents["e2"].crash()
    team(world).rests = not team(world).rests
    world.supervisor.after(2.5, lambda: None if world.people.tidy else _do_everything(world))


for _point in POINTS:
    for _action in ("crash", "pause"):
        _name = f"a_process_that_{_action}{'e' if _action == 'crash' else ''}s_at_{_point.replace('.', '_')}"
        SCENARIOS[_name] = Scenario(
            partial(_dies_at, point=_point, action=_action), ALL, {POLICY: 3}, lends=True, streaming=1
        )
