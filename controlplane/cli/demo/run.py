"""The demo, from nothing to its last line: start every part, follow the training, verify, end everything.

Promises a clean end, however it comes about: no process, shared-memory segment, socket, temporary file or lock is
left. A first Ctrl-C ends every part in order, a second one kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from controlplane.cli.crew import Child, Crew, died
from controlplane.cli.demo import parts, verify
from controlplane.cli.demo.fleet_watch import FleetWatch
from controlplane.cli.demo.memory import PeakMemory
from controlplane.cli.demo.outcome import Outcome
from controlplane.cli.demo.places import Places, places
from controlplane.cli.demo.progress import Progress, follow
from controlplane.cli.demo.screen import Screen, make_screen
from controlplane.cli.demo.settings import DemoSettings
from controlplane.cli.ending import CommandFailed
from controlplane.cli.fleet_table import served_versions
from controlplane.core.versions import EngineId, WeightVersion
from controlplane.exit_codes import ExitCode
from controlplane.rpc.codec import version_from_proto
from weightplane.v1 import engine_pb2, operator_pb2

FETCH_SECONDS = 900.0
COORDINATOR_SECONDS = 30.0
ENGINES_SECONDS = 300.0
SETTLE_SECONDS = 30.0
"""For the engines' reports after the last push."""
POLL_SECONDS = 0.1
MODEL = "policy"


def run_demo(settings: DemoSettings) -> int:
    """Run it. Returns the exit code; the result is on stdout.

    Raises:
        CommandFailed: a part failed, with the last lines of its log.
    """
    return asyncio.run(_interruptible(settings))


async def _interruptible(settings: DemoSettings) -> int:
    mark = f"demo-{uuid.uuid4().hex[:8]}"
    console = Console(stderr=settings.as_json)
    loop = asyncio.get_running_loop()
    with places(settings.keep, mark) as where:
        crew = Crew(where.logs, mark, parts.environment(where))
        demo = asyncio.create_task(_demo(settings, where, crew, console, mark))

        def interrupt() -> None:
            crew.hurry = demo.cancelling() > 0
            if not crew.hurry:
                console.print("ending every process …")
                demo.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt)
        try:
            outcome = await demo
        except asyncio.CancelledError:
            return ExitCode.INTERRUPTED
    return _report(outcome, settings, console)


def _report(outcome: Outcome, settings: DemoSettings, console: Console) -> int:
    for line in outcome.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if settings.keep is not None:
        console.print(f"logs, state and weights are kept in {settings.keep}", markup=False, soft_wrap=True)
    if settings.as_json:
        print(outcome.to_json(), flush=True)
    return outcome.code


async def _demo(settings: DemoSettings, where: Places, crew: Crew, console: Console, run_id: str) -> Outcome:
    started = time.monotonic()
    progress = Progress(settings.steps)
    memory = PeakMemory()
    try:
        with make_screen(console, progress) as screen:
            async with _beside(memory.sample_forever()):
                screen.say(f"getting the model {settings.model}")
                model = await _fetch_model(settings, where, crew)
                async with _limited(settings.limit_seconds):
                    fleet, comparisons = await _main_job(settings, where, crew, screen, model, run_id)
            screen.say("ending every process")
            await crew.stop_all()
    finally:
        await crew.stop_all()
    return Outcome(
        steps=len(progress.steps),
        reward_first=progress.reward_first,
        reward_last=progress.reward_last,
        versions=_applied(fleet),
        fleet_version=_served(fleet),
        update_seconds_median=progress.update_seconds_median,
        comparisons=comparisons,
        seconds=round(time.monotonic() - started, 1),
        pss_peak_mib=memory.peak_mib,
    )


async def _main_job(
    settings: DemoSettings, where: Places, crew: Crew, screen: Screen, model: Path, run_id: str
) -> tuple[operator_pb2.FleetView, dict[str, verify.Comparison] | None]:
    address = await _start_coordinator(settings, where, crew, run_id)
    screen.say(f"the coordinator serves at {address}: try `weightplane status --coordinator {address}`")
    screen.say(f"the same in a browser, live: {where.page.read_text()}")
    watch = FleetWatch(address, screen.fleet)
    async with _beside(watch.run()):
        screen.say(f"starting {parts.ENGINES} vLLM engines")
        for number in range(parts.ENGINES):
            await parts.start_engine(crew, where, number, model=model, coordinator=address, run_id=run_id)
        await crew.within(ENGINES_SECONDS, "both engines to start", watch.until(_engines_run))
        screen.say(f"starting the Megatron trainer, {parts.RANKS} ranks")
        trainer = await parts.start_trainer(crew, where, settings, model=model, coordinator=address, run_id=run_id)
        await _follow_training(settings, where, crew, screen, watch, trainer)
        fleet = await crew.within(SETTLE_SECONDS, "both engines to report", watch.until(_engines_settled))
        comparisons = await _verify(where, crew, screen, fleet) if settings.verify else None
        return fleet, comparisons


async def _fetch_model(settings: DemoSettings, where: Places, crew: Crew) -> Path:
    path_file = where.work / "model.path"
    arguments = [settings.model.value, str(settings.cache_dir), str(settings.seed), str(path_file)]
    command = [sys.executable, "-m", "controlplane.cli.demo.fetch_model", *arguments]
    child = await crew.start("fetch-model", command)
    await crew.within(FETCH_SECONDS, "the model", child.process.wait(), may_end=child)
    if child.process.returncode != 0:
        raise died(child)
    await crew.stop(child)
    return Path(path_file.read_text())


async def _start_coordinator(settings: DemoSettings, where: Places, crew: Crew, run_id: str) -> str:
    """Its address."""
    child = await parts.start_coordinator(crew, where, settings, run_id)
    try:
        return await crew.within(COORDINATOR_SECONDS, "the coordinator to serve", _address(where.address))
    except CommandFailed as error:
        if child.process.returncode != ExitCode.PORT_IN_USE:
            raise
        text = f"cannot listen on {settings.listen}: it is in use, or not an address of this host; see --listen"
        raise CommandFailed(ExitCode.PORT_IN_USE, text) from error


async def _address(file: Path) -> str:
    while not file.exists():  # noqa: ASYNC110 - a file tells nobody that it came
        await asyncio.sleep(POLL_SECONDS)
    return file.read_text()


async def _follow_training(
    settings: DemoSettings, where: Places, crew: Crew, screen: Screen, watch: FleetWatch, trainer: Child
) -> None:
    """Until the trainer has ended well. It must have done what was asked: the export is its last work."""

    async def read_events() -> None:
        async for event in follow(where.events):
            if event.get("event") == "pushed":
                await watch.reaches(event["version"])
            screen.event(event)
            if event.get("event") == "finished":
                return

    async with _beside(read_events()) as reading:
        waiting = crew.within(settings.limit_seconds, "the training to end", trainer.process.wait(), may_end=trainer)
        if await waiting != 0:
            raise died(trainer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await reading
    await crew.stop(trainer)


async def _verify(
    where: Places, crew: Crew, screen: Screen, fleet: operator_pb2.FleetView
) -> dict[str, verify.Comparison]:
    screen.say("verifying: the engines' greedy answers against a fresh engine's")
    version = _served(fleet)
    if version is None:
        raise CommandFailed(ExitCode.FAILED, "nothing to verify: the fleet serves no version")
    prompts = verify.fixed_prompts(verify.vocab_size(where.exported))
    names = [EngineId(e.status.engine.engine_id) for e in fleet.engines]
    asked = [
        verify.ask_engine(name, e.endpoint, fleet.run_id, prompts, version)
        for name, e in zip(names, fleet.engines, strict=True)
    ]
    fresh = await verify.start_reference(crew, where, prompts)
    answers = asyncio.gather(fresh.process.wait(), asyncio.gather(*asked))
    _, engines = await crew.within(verify.LIMIT_SECONDS, "the engines' answers", answers, may_end=fresh)
    await crew.stop(fresh)
    reference = verify.reference_answers(fresh, where)
    return {name: verify.compare(answer, reference) for name, answer in zip(names, engines, strict=True)}


# ---- small things -------------------------------------------------------------------------------


def _engines_run(view: operator_pb2.FleetView) -> bool:
    running = [e for e in view.engines if e.known and e.status.life == engine_pb2.ENGINE_LIFE_RUNNING]
    return len(running) == parts.ENGINES


def _engines_settled(view: operator_pb2.FleetView) -> bool:
    """No update is open any more, and every engine's report is current."""
    busy = (engine_pb2.UPDATE_STAGE_RECEIVING, engine_pb2.UPDATE_STAGE_READY, engine_pb2.UPDATE_STAGE_INSTALLING)
    return _engines_run(view) and not any(e.status.update.stage in busy for e in view.engines)


def _applied(view: operator_pb2.FleetView) -> dict[str, WeightVersion | None]:
    return {
        e.status.engine.engine_id: version_from_proto(e.status.applied) if e.status.HasField("applied") else None
        for e in view.engines
    }


def _served(view: operator_pb2.FleetView) -> WeightVersion | None:
    """The one version that the fleet serves."""
    served = served_versions(view, MODEL)
    return version_from_proto(served[0]) if len(served) == 1 else None


@asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """`work` runs as a task while the block does. If it fails, that is raised at the block's end."""
    task: asyncio.Task[Any] = asyncio.create_task(work)
    try:
        yield task
    finally:
        failed = task.done() and not task.cancelled()
        task.cancel()
        await asyncio.wait({task})
        if failed:
            task.result()


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise CommandFailed(
            ExitCode.FAILED, f"the demo did not end within {seconds:.0f} s (--limit-seconds)"
        ) from error
