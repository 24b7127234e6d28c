"""Devices that ranks share with engines, seen from the trainer agent: take them (engines sleep), give them (they wake).

Promises: the coordinator knows that this trainer holds devices before the first engine sleeps, and until the last one
woke; whatever is lost on the way is asked again until the caller's limit, since each call is idempotent. Who sleeps
for this trainer is asked of the fleet, never remembered: so the next life finds out what the last one took. Each call
says in which turn it is made, and what was left behind in an earlier turn or life moves no engine any more (INV-7):
so whoever gives tells every engine on its devices, also those that are awake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc
import structlog

from controlplane.core.engine_sleep import SLEEP
from controlplane.core.errors import (
    DeadlineExceeded,
    DevicesTaken,
    EngineNotReady,
    ModelFrozen,
    StaleTerm,
    StaleTurn,
    UnsupportedByEngine,
    WeightplaneError,
)
from controlplane.core.names import device_uuid, trainer_owner
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent.asked import PushContext
from trainer_agent.agent.rankset import RankSet
from weightplane.v1 import engine_pb2, lifecycle_pb2, operator_pb2

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.2
LOOK_SECONDS = 5.0
"""Longest single question to the coordinator."""
_REFUSED = (ModelFrozen, UnsupportedByEngine, StaleTerm)
"""What no repetition changes."""
_NOT_OURS = (DevicesTaken, EngineNotReady, StaleTurn)
"""Of a wake: somebody else still has the engine asleep, or it died asleep and a fresh one starts by this very word, or
its ranks took it again meanwhile."""

Ask = Callable[[operator_pb2.EngineView, float], Awaitable[object]]


class TimeSharing:
    """Of one life of the ranks."""

    def __init__(self, ranks: RankSet, context: PushContext, trainer_id: str, changed: Callable[[], None]) -> None:
        """`changed`: the coordinator is to be told the status."""
        self._ranks = ranks
        self._context = context
        self._trainer_id = trainer_id
        self._owner = trainer_owner(trainer_id)
        self._changed = changed
        self._turn = 0
        """Takings and givings so far, under this life's term."""

    async def take(self, level: int, seconds: float) -> None:
        """Put every engine on the ranks' devices to sleep; returns when the devices are free.

        Raises:
            UnsupportedByEngine: an engine cannot, and none was asked to. ModelFrozen: one may not. DeadlineExceeded:
            one did not in time. What was taken until then stays taken: `give` is the way back.
        """
        await self._until("take_devices", LOOK_SECONDS, self._can_sleep)
        self._hold(True)
        await self._until("take_devices", seconds, self._known_to_hold)
        ask = partial(self._sleep, turn=self._next_turn(), level=level)
        await self._until("take_devices", seconds, lambda: self._all(ask, self._shared))
        log.info("devices_taken", level=level)

    async def give(self, seconds: float) -> dict[str, str]:
        """Wake what sleeps for this trainer; returns when canaries spoke and gates may open. The engines that woke
        poisoned, each with the cause: their memory is theirs again, and the next whole push heals them.

        Raises DeadlineExceeded.
        """
        poisoned: dict[str, str] = {}
        wake = partial(self._wake, turn=self._next_turn(), kv=True, poisoned=poisoned)
        await self._until("give_devices", seconds, lambda: self._all(wake, self._to_wake))
        self._hold(False)
        log.info("devices_given")
        return poisoned

    async def wake_weights(self, seconds: float) -> None:
        """The weights' memory of what sleeps for this trainer: an install needs no more. Raises DeadlineExceeded."""
        if self._ranks.holds_devices:
            wake = partial(self._wake, turn=self._next_turn(), kv=False, poisoned={})
            await self._until("push", seconds, lambda: self._all(wake, self._sleepers))

    async def find_out(self, seconds: float) -> None:
        """Whether an earlier life took devices and never gave them. Raises DeadlineExceeded."""

        async def look() -> list[WeightplaneError]:
            self._hold(bool(self._sleepers(await self._fleet())))
            return []

        await self._until("join", seconds, look)

    def _next_turn(self) -> lifecycle_pb2.DeviceTurn:
        self._turn += 1
        return lifecycle_pb2.DeviceTurn(term=self._ranks.term, number=self._turn)

    # ---- who ----

    def _hold(self, held: bool) -> None:
        if self._ranks.holds_devices != held:
            self._ranks.holds_devices = held
            self._changed()

    async def _fleet(self) -> operator_pb2.FleetView:
        response = await self._context.stubs.operator.GetFleet(operator_pb2.GetFleetRequest(), timeout=LOOK_SECONDS)
        return response.fleet

    def _shared(self, fleet: operator_pb2.FleetView) -> list[operator_pb2.EngineView]:
        """Engines on the ranks' devices, by UUID."""
        own = {device_uuid(c.join.device_uuid) for c in self._ranks.members.values()}
        return [v for v in self._of_model(fleet) if own & {device_uuid(d) for d in v.device_uuids}]

    def _sleepers(self, fleet: operator_pb2.FleetView) -> list[operator_pb2.EngineView]:
        """Engines that sleep in this trainer's name, also where its ranks are gone."""
        asleep = engine_pb2.HOLD_KIND_ASLEEP
        mine = (asleep, self._owner)
        return [v for v in self._of_model(fleet) if mine in {(h.kind, h.owner) for h in v.status.holds}]

    def _to_wake(self, fleet: operator_pb2.FleetView) -> list[operator_pb2.EngineView]:
        """Also what shares the devices and says that it is awake: a sleep may still be on its way there."""
        able = [v for v in self._shared(fleet) if v.known and SLEEP in v.capabilities]
        sleepers = self._sleepers(fleet)
        return sleepers + [v for v in able if v not in sleepers]

    def _of_model(self, fleet: operator_pb2.FleetView) -> list[operator_pb2.EngineView]:
        return [v for v in fleet.engines if v.status.model == self._ranks.model]

    async def _can_sleep(self) -> list[WeightplaneError]:
        """Before any engine sleeps: each must be able to. Raises UnsupportedByEngine."""
        for view in self._shared(await self._fleet()):
            if view.known and view.capabilities and SLEEP not in view.capabilities:
                raise UnsupportedByEngine(engine_id=view.status.engine.engine_id, what="sleep")
        return []

    async def _known_to_hold(self) -> list[WeightplaneError]:
        """What keeps the coordinator from knowing that this trainer holds its devices."""
        for trainer in (await self._fleet()).trainers:
            if (trainer.trainer_id, trainer.term) == (self._trainer_id, self._ranks.term):
                return [] if trainer.status.holds_devices else [self._late("it was not told yet")]
        return [self._late("it does not know this trainer")]

    @staticmethod
    def _late(cause: str) -> DeadlineExceeded:
        return DeadlineExceeded(phase="devices", waited_for=f"the coordinator ({cause})", waited_seconds=0.0)

    # ---- asking ----

    async def _until(self, phase: str, seconds: float, once: Callable[[], Awaitable[list[WeightplaneError]]]) -> None:
        """Repeat until nothing failed. Raises DeadlineExceeded with the last cause, and what no repetition changes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    errors = await once()
            except grpc.aio.AioRpcError as broken:
                errors = [from_rpc_error(broken)]
            except TimeoutError:
                errors = [self._late("an engine or the coordinator did not answer")]
            if not errors:
                return
            if loop.time() + RETRY_SECONDS > deadline:
                raise DeadlineExceeded(phase=phase, waited_for=str(errors[0]), waited_seconds=seconds) from errors[0]
            await asyncio.sleep(RETRY_SECONDS)

    async def _all(
        self, ask: Ask, who: Callable[[operator_pb2.FleetView], Sequence[operator_pb2.EngineView]]
    ) -> list[WeightplaneError]:
        """Ask each; what went wrong and may go better. Raises the refusals of `_REFUSED`."""
        asked = who(await self._fleet())
        answers = await asyncio.gather(*(ask(v, LOOK_SECONDS) for v in asked), return_exceptions=True)
        errors: list[WeightplaneError] = []
        for view, answer in zip(asked, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                errors += [] if _gone(view, answer) else [from_rpc_error(answer)]
            elif isinstance(answer, BaseException):
                raise answer
        for error in errors:
            if isinstance(error, _REFUSED):
                raise error
        return errors

    async def _sleep(
        self, view: operator_pb2.EngineView, seconds: float, *, turn: lifecycle_pb2.DeviceTurn, level: int
    ) -> None:
        request = lifecycle_pb2.SleepRequest(
            run_id=self._context.run_id, engine=view.status.engine, owner=self._owner, level=level, turn=turn
        )
        await self._context.stubs.lifecycle(view.endpoint).Sleep(request, timeout=seconds)

    async def _wake(
        self,
        view: operator_pb2.EngineView,
        seconds: float,
        *,
        turn: lifecycle_pb2.DeviceTurn,
        kv: bool,
        poisoned: dict[str, str],
    ) -> None:
        """`poisoned` gets its name, if it is."""
        if not kv and view.status.life != engine_pb2.ENGINE_LIFE_RUNNING:
            return  # it died asleep: no weights go there before its devices are given
        request = lifecycle_pb2.WakeUpRequest(
            run_id=self._context.run_id, engine=view.status.engine, owner=self._owner, kv_cache=kv, turn=turn
        )
        try:
            response = await self._context.stubs.lifecycle(view.endpoint).WakeUp(request, timeout=seconds)
        except grpc.aio.AioRpcError as broken:
            if isinstance(from_rpc_error(broken), _NOT_OURS):
                return
            raise
        if response.status.weights == engine_pb2.WEIGHTS_STATE_POISONED:
            poisoned[view.status.engine.engine_id] = response.status.poison_cause
            log.error("engine_woke_poisoned", engine=view.status.engine.engine_id, cause=response.status.poison_cause)


def _gone(view: operator_pb2.EngineView, error: grpc.aio.AioRpcError) -> bool:
    """Silent at the coordinator, and nobody listens at its address: its processes and their memory are no more. One
    that is only silent may have its memory still."""
    gone = not view.known and error.code() is grpc.StatusCode.UNAVAILABLE
    if gone:
        log.warning("engine_gone", engine=view.status.engine.engine_id, endpoint=view.endpoint)
    return gone
