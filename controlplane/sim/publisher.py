"""A trainer's checkpoints: it writes some of what the fleet committed, tells the coordinator, and later deletes it."""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.fleet_records import CheckpointKept
from controlplane.sim.kernel import Action, connect
from controlplane.sim.leaseholder import Leaseholder
from controlplane.sim.shelf import Written
from controlplane.sim.shipment import Shipment

WRITE_CHANCE = 0.4
WRITE_SECONDS = (0.1, 1.0)
DELETE_SECONDS = 0.3
"""Between the word that a checkpoint is retired and its deletion."""
KEEPS = 3
RETRY_SECONDS = (0.2, 0.8)


class Publisher:
    """Those of one life of a trainer."""

    def __init__(self, trainer: Leaseholder) -> None:
        self._trainer = trainer
        self._around = trainer.around
        self._kept: list[CheckpointKept] = []

    def write(self, shipment: Shipment, *, surely: bool = False) -> None:
        """Of a push that was committed; some are written."""
        begun, rng = shipment.begun, self._around.kernel.rng
        wanted = surely or (self._around.settings.checkpoints and rng.random() < WRITE_CHANCE)
        if not wanted:
            return
        written = Written(shipment.layout, shipment.content)
        name = f"{self._trainer.model}-{begun.version.number}"
        kept = written.kept(self._trainer.model, begun.version, name)
        self._trainer.after(rng.uniform(*WRITE_SECONDS), lambda: self._written(written, kept))

    def _written(self, written: Written, kept: CheckpointKept) -> None:
        self._around.shelf.put(kept.name, written)
        self._around.faults.point(self._trainer, "trainer.before_publish")
        event = fe.CheckpointPublished(self._around.settings.run_id, self._trainer.term, kept)
        self._say(event, lambda: self._published(kept), lambda: self._around.shelf.remove(kept.name))

    def _published(self, kept: CheckpointKept) -> None:
        if kept not in self._kept:
            self._kept.append(kept)
        if len(self._kept) > KEEPS:
            self._retire(self._kept.pop(0))

    def _retire(self, kept: CheckpointKept) -> None:
        """Told before it is deleted."""
        run, term = self._around.settings.run_id, self._trainer.term
        event = fe.CheckpointRetired(run, kept.model, term, kept.version.number)

        def delete() -> None:
            self._trainer.after(DELETE_SECONDS, lambda: self._around.shelf.remove(kept.name))

        self._say(event, delete, lambda: None)

    def _say(self, event: fe.CheckpointPublished | fe.CheckpointRetired, done: Action, refused: Action) -> None:
        """Until it is answered; a refusal ends it."""
        coordinator, answered = self._trainer.coordinator, False

        def again() -> None:
            self._trainer.after(self._around.kernel.rng.uniform(*RETRY_SECONDS), say)

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
