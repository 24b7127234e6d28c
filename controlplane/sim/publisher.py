"""A trainer's checkpoints: it writes some of what the fleet committed, tells the coordinator, and later deletes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.fleet_records import CheckpointKept
from controlplane.sim.kernel import Action, connect
from controlplane.sim.shelf import Written

if TYPE_CHECKING:
    from controlplane.sim.push import Push
    from controlplane.sim.trainer import Trainer

WRITE_CHANCE = 0.4
WRITE_SECONDS = (0.1, 1.0)
DELETE_SECONDS = 0.3
"""Between the word that a checkpoint is retired and its deletion."""
KEEPS = 3
RETRY_SECONDS = (0.2, 0.8)


class Publisher:
    """Those of one life of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._world = trainer.world
        self._kept: list[CheckpointKept] = []

    def write(self, push: Push, *, surely: bool = False) -> None:
        """Of a push that was committed; some are written."""
        begun, rng = push.begun, self._world.kernel.rng
        wanted = surely or (self._world.settings.checkpoints and rng.random() < WRITE_CHANCE)
        if begun is None or not wanted:
            return
        written = Written(push.layout, push.content)
        name = f"{self._trainer.model}-{begun.version.number}"
        kept = written.kept(self._trainer.model, begun.version, name)
        self._trainer.after(rng.uniform(*WRITE_SECONDS), lambda: self._written(written, kept))

    def _written(self, written: Written, kept: CheckpointKept) -> None:
        self._world.shelf.put(kept.name, written)
        self._world.faults.point(self._trainer, "trainer.before_publish")
        event = fe.CheckpointPublished(self._world.settings.run_id, self._trainer.term, kept)
        self._say(event, lambda: self._published(kept), lambda: self._world.shelf.remove(kept.name))

    def _published(self, kept: CheckpointKept) -> None:
        if kept not in self._kept:
            self._kept.append(kept)
        if len(self._kept) > KEEPS:
            self._retire(self._kept.pop(0))

    def _retire(self, kept: CheckpointKept) -> None:
        """Told before it is deleted."""
        run, term = self._world.settings.run_id, self._trainer.term
        event = fe.CheckpointRetired(run, kept.model, term, kept.version.number)

        def delete() -> None:
            self._trainer.after(DELETE_SECONDS, lambda: self._world.shelf.remove(kept.name))

        self._say(event, delete, lambda: None)

    def _say(self, event: fe.CheckpointPublished | fe.CheckpointRetired, done: Action, refused: Action) -> None:
        """Until it is answered; a refusal ends it."""
        coordinator, answered = self._world.coordinator, False

        def again() -> None:
            self._trainer.after(self._world.kernel.rng.uniform(*RETRY_SECONDS), say)

        def ended(error: e.WeightplaneError) -> None:
            if isinstance(error, e.StaleTerm):
                self._trainer.fence()
            if isinstance(error, (e.PeerLost, e.CoordinatorRecovering, e.LedgerRegressed)):
                again()
            else:
                refused()

        def said() -> None:
            nonlocal answered
            if not answered:
                answered = True
                done()

        def say() -> None:
            stream = connect(self._trainer, coordinator)
            if stream is None:
                again()
                return
            stream.on_client_end = ended
            stream.to_server(lambda: coordinator.said_once(stream, event, said))

        say()
