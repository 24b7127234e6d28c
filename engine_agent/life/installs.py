"""The installs of one life: begun when the core decides it, one at a time, and how each ended.

From its beginning an install is the agent's own: the stream that brought its bytes may die (INV-4, INV-6). What it
found out is claimed in the step in which it finished (INV-1); after a failure nothing is resumed here (INV-4).
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.canary import CanaryReference
from controlplane.core.engine_update import Update
from controlplane.core.errors import CanaryFailed, EngineDied, InstallFailed, InstallTimedOut, WeightplaneError
from controlplane.core.pauses import PausePolicy
from controlplane.core.versions import UpdateId
from controlplane.rpc.metrics import INSTALLS, PAUSE_PARTS, PAUSE_SECONDS
from engine_agent.life.gate import Gate
from engine_agent.life.installing import Applied, Install, spoken
from engine_agent.life.kept_base import BaseKeeper
from engine_agent.life.life_parts import LifeParts
from engine_agent.life.outcomes import Outcomes
from engine_agent.life.streaming import StreamingInstall
from engine_agent.life.streams import Streams

log = structlog.get_logger(__name__)


class Installs:
    """Of one life."""

    def __init__(self, life: LifeParts, gate: Gate, streams: Streams, base: BaseKeeper, pause: PausePolicy) -> None:
        """`pause` is for updates that do not say how. `base` keeps what was applied."""
        self._life = life
        self._gate = gate
        self._streams = streams
        self._base = base
        self._pause = pause
        self._outcomes = Outcomes()
        self._checksums: dict[str, bytes] = {}
        """Of the last install, by name."""
        self._owed_reference: CanaryReference | None = None
        """What the canary that was put off last is to be compared with."""

    def start(self, effect: fx.StartInstall) -> None:
        """The commit frame was taken."""
        update, receiver = effect.update, self._streams.receiver(effect.stream)
        install = Install(self._life, self._gate, receiver, update, update.pause or self._pause)
        self._begin(effect.stream, install)

    def start_streaming(self, effect: fx.StartStreaming) -> StreamingInstall:
        """From here on only its end opens the gate; what ends its stream before the commit frame cuts it (INV-4)."""
        update, receiver = effect.update, self._streams.receiver(effect.stream)
        install = StreamingInstall(self._life, self._gate, receiver, update, update.pause or self._pause)
        self._streams.streaming(effect.stream, install.cut)
        self._begin(effect.stream, install)
        return install

    async def outcome(self, update_id: UpdateId) -> Applied:
        """Wait for the end of an update's install. Raises its error."""
        return await self._outcomes.of(update_id)

    def decided(self, update_id: UpdateId, error: WeightplaneError | None) -> None:
        """The core's word: None is applied."""
        self._outcomes.decide(update_id, error)

    async def prove_at_last(self) -> None:
        """The canary of a version that was installed without a KV cache; the gate is shut meanwhile. What is wrong
        then is poisoned (INV-4): the next full update heals it. Raises EngineDied."""
        applied = self._life.core.state.applied
        try:
            said = await spoken(self._life, applied.label if applied else "unset", self._owed_reference)
        except EngineDied:
            raise
        except WeightplaneError as error:
            log.error("unproven_version_is_wrong", reason=error.reason, text=str(error))
            self._life.apply(events.Disproven(str(error)))
            self._life.requests.abort_all()
        else:
            self._life.apply(events.Proven(said))

    def _begin(self, stream: int, install: Install) -> None:
        self._outcomes.begin(install.update.update_id)
        self._life.tasks.spawn(self._run(stream, install))

    async def _run(self, stream: int, install: Install) -> None:
        async with self._life.lock:
            try:
                self._applied(stream, install, await install.run())
            except (InstallTimedOut, EngineDied) as error:
                self._lost(error)
            except InstallFailed as error:
                self._refused(error, touched=error.touched)
            except CanaryFailed as error:
                self._refused(error, touched=True)
            except WeightplaneError as error:
                self._refused(error, touched=install.update.quiesced)
            finally:
                self._streams.installed(stream)

    def _changed_tensors(self, update: Update) -> int | None:
        """How many differ from the last install's, by their checksums. None: this is the first."""
        assert update.assembly is not None  # it was committed
        tensors = update.assembly.layout.tensors
        fresh = {t.name: update.assembly.checksum(i) for i, t in enumerate(tensors)}
        before, self._checksums = self._checksums, fresh
        return sum(before.get(name) != checksum for name, checksum in fresh.items()) if before else None

    def _applied(self, stream: int, install: Install, found: Applied) -> None:
        """INV-1: the version is claimed in the step that finished, with what the install found out beside it."""
        update = install.update
        found = replace(found, changed_tensors=self._changed_tensors(update))
        self._outcomes.note(update.update_id, found)
        if found.canary is None:
            self._owed_reference = update.reference
            self._life.apply(events.CanaryDeferred(found.timings, found.changed_tensors))
        else:
            self._life.apply(events.CanaryPassed(found.timings, found.canary, found.changed_tensors))
        if self._base.take(update, install.receiver):
            self._streams.give_away(stream)
        else:
            install.receiver.installed()
        INSTALLS.labels("applied").inc()
        for part in PAUSE_PARTS:
            PAUSE_SECONDS.labels(part).observe(getattr(found.timings, part))
        log.info(
            "weights_applied", version=update.version.number, update_id=update.update_id, timings=str(found.timings)
        )

    def _refused(self, error: WeightplaneError, *, touched: bool) -> None:
        """INV-4: nothing is resumed here; the gate opens only if the weights are whole and served."""
        INSTALLS.labels(error.reason).inc()
        log.error("install_failed", reason=error.reason, text=str(error), touched=touched)
        self._life.apply(events.InstallEnded(error, touched))
        if touched:
            self._life.requests.abort_all()

    def _lost(self, error: WeightplaneError) -> None:
        """An unknown outcome: the processes go, and a new incarnation takes their place."""
        INSTALLS.labels(error.reason).inc()
        log.error("install_lost", reason=error.reason, text=str(error))
        self._life.apply(events.InstallEnded(error, touched=True))
        self._life.requests.abort_all()
        self._life.tasks.die(str(error))
