"""One install, from a checked version in shared memory to weights that spoke: stand still, put in, prove.

Promises that nothing is claimed before the last of these is done (INV-1), and that whatever is raised on the way leaves
what the engine holds to its life to say (INV-4): nothing is resumed here. On an engine that sleeps but for its weights'
memory the proof waits for the KV cache, and the gate for the proof.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

from controlplane import failpoints, tracing
from controlplane.core import engine_events as events
from controlplane.core.canary import Canary, CanaryReference
from controlplane.core.engine_state import LETS_FINISH, EngineState, HoldKind, Poisoned, Residency, Timings
from controlplane.core.engine_update import Update
from controlplane.core.errors import CanaryFailed
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.sample_spans import UPDATING
from controlplane.tracing import Phases
from engine_agent.engine import InstallReport
from engine_agent.life.gate import Gate
from engine_agent.life.life_parts import LifeParts
from engine_agent.life.spans import trace_install
from engine_agent.receivers import Receiver

log = structlog.get_logger(__name__)

NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Applied:
    """What an install found out, for the writer."""

    report: InstallReport
    canary: Canary | None
    """None: put off until its KV cache is resident."""
    timings: Timings
    content_digest: bytes
    changed_tensors: int | None = None
    """Tensors whose bytes differ from what this engine held last; None at its first. 0 hints at the wrong model."""


class Install:
    """One install in one life, under the life's lock. `run` once."""

    def __init__(self, life: LifeParts, gate: Gate, receiver: Receiver, update: Update, pause: PausePolicy) -> None:
        self.receiver = receiver
        self.update = update
        self._life = life
        self._gate = gate
        self._pause = pause
        self.phases = Phases()

    async def run(self) -> Applied:
        """What it found out; its caller claims the version, in the same step (INV-1).

        Raises InstallFailed, InstallTimedOut, CanaryFailed, EngineDied, and what kept it from standing still.
        """
        self.phases = Phases()  # from the moment that the life's lock is its
        failure: BaseException | None = None
        try:
            return await self._run()
        except BaseException as error:  # also one that nobody planned for, or the life's end, is how it ended
            failure = error
            raise
        finally:
            tracing.soon(trace_install, self._life.core.state, self.update, self.phases, failure)

    async def _run(self) -> Applied:
        failpoints.hit("engine.before_install")
        with self.phases.phase("wait"):
            wait = await self._let_finish()
        with self.phases.phase("quiesce"):
            quiesce = await self._stand_still()
        with self.phases.phase("load"):
            report = await self._put_in()
        self.phases.split("caches", report.cache_seconds)
        speaks = self._life.core.state.residency is Residency.AWAKE
        with self.phases.phase("canary"):
            canary, seconds = await self._prove() if speaks else (None, 0.0)  # put off until there is a KV cache
        failpoints.hit("engine.after_install")
        timings = Timings(quiesce, report.load_seconds, report.cache_seconds, seconds, wait)
        return Applied(report, canary, timings, self.update.content_digest)

    async def _let_finish(self) -> float:
        """Seconds that requests were given to end by themselves; nobody enters meanwhile, since the update holds the
        gate. Those that took longer are named."""
        life = self._life
        if (
            self._pause.mode is not PauseMode.WAIT or not self._gate.runs
        ):  # what stands still already ends by no waiting
            return 0.0
        began = time.monotonic()
        left = asyncio.ensure_future(life.requests.none_left())
        held = asyncio.ensure_future(life.state.wait_for(_stops, self._pause.wait_seconds))
        await asyncio.wait({left, held}, timeout=self._pause.wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (left, held):
            task.cancel()
        await asyncio.gather(left, held, return_exceptions=True)
        if self._life.requests.names:
            log.warning(
                "requests_took_longer", requests=self._life.requests.names[:NAMES_SHOWN], pause=str(self._pause)
            )
        return time.monotonic() - began

    async def _stand_still(self) -> float:
        """Seconds until no forward pass ran and every token was with its consumer (INV-11)."""
        began, pause = time.monotonic(), self._pause
        await self._gate.stand_still()
        if isinstance(
            self._life.core.state.weights, Poisoned
        ):  # found while it waited: not a token more of that (INV-4)
            self._life.requests.abort_all()
        if (pause.fallback if pause.mode is PauseMode.WAIT else pause.mode) is PauseMode.ABORT:
            self._life.requests.abort(why=UPDATING)
        return time.monotonic() - began

    async def _put_in(self) -> InstallReport:
        staged = self.receiver.staged(self.update.version.label)
        self._life.apply(events.Quiesced())  # INV-1: unset from here on
        failpoints.hit("engine.mid_install")
        return await self._life.engine.install(staged)

    async def _prove(self) -> tuple[Canary, float]:
        """What the canary said, and how long it took."""
        began = time.monotonic()
        return await spoken(self._life, self.update.version.label, self.update.reference), time.monotonic() - began


async def spoken(life: LifeParts, label: str, reference: CanaryReference | None) -> Canary:
    """What it says of its weights, compared with what the trainer said where it did. Raises CanaryFailed."""
    said = await life.engine.canary()
    if reference is None:
        return said
    again = await life.engine.canary(reference.prompt_token_ids)
    problem = reference.disagreement(again.prompt_logprobs)
    if problem:
        raise CanaryFailed(life.core.state.engine_id, label, problem)
    return replace(said, by_reference=True)


def _stops(state: EngineState) -> bool:
    """Somebody keeps the gate shut who does not let requests finish: they are waited for no longer."""
    return any(hold.kind not in LETS_FINISH | {HoldKind.UPDATING} for hold in state.holds)
