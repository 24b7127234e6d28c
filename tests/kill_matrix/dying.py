"""Strikes a real engine's processes and watches until it is routable again.

Promises that nothing of the dead one is left, that every request that ran has ended, and that the fleet is whole again
and takes a later push.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil

from controlplane.processes import start_time
from tests.kill_matrix.deaths import Death, Dying, Victim
from tests.kill_matrix.fleet import Fleet, running_fleet
from tests.kill_matrix.matrix import Backend
from tests.kill_matrix.observer import RUN
from tests.kill_matrix.truth import PROMPT
from tests.support.eventually import eventually
from trainer_agent.agent.launch import lives
from weightplane.v1 import operator_pb2, rollout_pb2, rollout_pb2_grpc

START_SECONDS = 180.0
REQUESTS = 4
TOKENS = 100


async def run_deaths(todo: Sequence[Death], directory: Path) -> AsyncIterator[Dying]:
    """One finding a death, on one fleet as long as none fails."""
    left, fleets = list(todo), 0
    while left:
        fleets += 1
        with suppress(_Spent):
            async with running_fleet(directory / f"dying-{fleets}", Backend.VLLM) as fleet:
                while left:
                    dying = await die(fleet, left.pop(0))
                    yield dying
                    if dying.problems:
                        raise _Spent


class _Spent(Exception):
    """The fleet is of no more use, and its logs are kept."""


async def die(fleet: Fleet, death: Death) -> Dying:
    """Hold a push, strike, let go, wait until e0 is routable again and all is well."""
    observer = fleet.observers["e0"]
    try:
        await eventually(fleet.whole_at, within=START_SECONDS)
        observer.quiet = not death.generating
        async with _requests(fleet, death) as running:
            blow = await _strike(fleet, death, running)
            observer.quiet = False
            return await _watch(fleet, death, blow, running)
    except AssertionError as error:
        return Dying(death, problems=(f"it was not reached: {error}", *fleet.take_problems()))
    finally:
        observer.quiet = False


class _Blow:
    """It fell."""

    def __init__(self, held: int, life: str, below: dict[int, int]) -> None:
        self.held = held
        self.life = life
        """The incarnation that was struck."""
        self.below = below
        self.at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.at

    def nothing_left(self) -> bool:
        left = [pid for pid, started in self.below.items() if start_time(pid) == started]
        assert not left, f"processes {left} outlive the one that started them"
        return True


async def _strike(fleet: Fleet, death: Death, running: Requests) -> _Blow:
    holder = fleet.daemons[death.holder]
    holder.arm(death.point, death.arm)
    try:
        await eventually(lambda: holder.reached(death.point), within=START_SECONDS)
        if death.generating:
            await eventually(lambda: running.live > 0)
        engine = await _e0(fleet)
        assert engine is not None, "the coordinator does not know e0"
        pid = _victim(fleet, death)
        blow = _Blow(fleet.ledger.newest, engine.status.engine.incarnation, lives(pid))
        os.kill(pid, signal.SIGSTOP if death.stopped_seconds else signal.SIGKILL)
    finally:
        holder.let_go(death.point)
    if death.stopped_seconds:
        blow.below.clear()
    return blow


def _victim(fleet: Fleet, death: Death) -> int:
    agent = fleet.daemons["e0"].pid
    if death.victim is Victim.AGENT:
        return agent
    children = [p.pid for p in psutil.Process(agent).children() if "resource_tracker" not in str(p.cmdline())]
    assert len(children) == 1, f"children of the agent: {children}"
    return children[0]


async def _watch(fleet: Fleet, death: Death, blow: _Blow, running: Requests) -> Dying:
    agent, unrouted, back = fleet.daemons["e0"].pid, 0.0, 0.0
    problems: list[str] = []
    going_on = asyncio.create_task(_go_on_after(agent, death, blow))
    try:
        await eventually(lambda: _unrouted(fleet, blow), within=death.limit_seconds)
        unrouted = blow.seconds
        await going_on
        await eventually(lambda: _routable(fleet, blow, death), within=death.limit_seconds - blow.seconds)
        back = blow.seconds
        running.stop()
        await eventually(lambda: running.live == 0, within=30.0)
        await eventually(lambda: _whole(fleet, blow.held + 1), within=START_SECONDS)
        await eventually(blow.nothing_left)
    except AssertionError as error:
        problems.append(f"version {blow.held}: {error}")
        await going_on
    return Dying(death, fleet.ledger.outcome(blow.held), unrouted, back, (*problems, *fleet.take_problems()))


async def _go_on_after(agent: int, death: Death, blow: _Blow) -> None:
    if death.stopped_seconds:
        await asyncio.sleep(death.stopped_seconds - blow.seconds)
        os.kill(agent, signal.SIGCONT)


async def _e0(fleet: Fleet) -> operator_pb2.EngineView | None:
    view = await fleet.view()
    return next((e for e in view.engines if e.status.engine.engine_id == "e0"), None) if view is not None else None


async def _unrouted(fleet: Fleet, blow: _Blow) -> bool:
    engine = await _e0(fleet)
    return engine is not None and (not engine.routable or engine.status.engine.incarnation != blow.life)


async def _routable(fleet: Fleet, blow: _Blow, death: Death) -> bool:
    engine = await _e0(fleet)
    assert engine is not None, "the coordinator does not answer"
    assert engine.routable, f"e0 is not routable ({engine.status.word})"
    same = engine.status.engine.incarnation == blow.life
    assert same == bool(death.stopped_seconds), (
        "the life that was struck is routed to" if same else "it is another life"
    )
    return True


async def _whole(fleet: Fleet, at_least: int) -> bool:
    number = await fleet.whole_at()
    assert number >= at_least, f"the fleet serves {number}, not {at_least} or later"
    return True


class Requests:
    """Some that run at e0, one after the other; each must end, in whatever way."""

    def __init__(self, fleet: Fleet) -> None:
        self._stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channels["e0"])
        self._go_on = True
        self.live = 0
        """Those that got a token and have not ended."""

    def stop(self) -> None:
        """Begin no more."""
        self._go_on = False

    async def run(self) -> None:
        while self._go_on:
            await self._one()
            await asyncio.sleep(0.01)

    async def _one(self) -> None:
        sampling = rollout_pb2.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request = rollout_pb2.GenerateRequest(run_id=RUN, model="policy", prompt_token_ids=PROMPT, sampling=sampling)
        request.wait.FromMilliseconds(1)
        begun = False
        try:
            async for _ in self._stub.Generate(request):  # without a deadline: it must end by itself
                self.live += not begun
                begun = True
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.live -= begun


@asynccontextmanager
async def _requests(fleet: Fleet, death: Death) -> AsyncIterator[Requests]:
    requests = Requests(fleet)
    tasks = [asyncio.create_task(requests.run()) for _ in range(REQUESTS if death.generating else 0)]
    try:
        yield requests
    finally:
        requests.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
