"""`weightplane engines keep | release | drain | pause | resume | wake | shutdown`: one engine is told something.

Nothing here carries weights or claims a version (INV-2). With `--wait` a command ends when what it ordered has come
about, or with 1 when that took longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from controlplane.cli.engine_orders import Target

EngineName = Annotated[str, typer.Argument(metavar="ENGINE", help="The engine.")]
Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Wait so long for it to come about.", min=0)]
Owner = Annotated[str, typer.Option("--owner", metavar="NAME", help="Who asks; the same name ends it.")]
OPERATOR = "operator"
PAUSE_WAIT_SECONDS = 60.0


@reported
def keep(
    engine: EngineName,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="Number of the version.", min=1)],
    model: Annotated[str, typer.Option("--model", help="Its model, if it is not connected.")] = "",
    wait: Wait = 0.0,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Keep an engine at a version while the fleet moves on, over its restarts too: for an evaluation, say.

    It takes no updates, and rollout clients are sent to it only where they ask for it. If it does not hold the version,
    its checkpoint is brought to it; the checkpoint stays as long. An engine that holds a later version must be started
    anew first.
    """
    from controlplane.cli.engine_orders import keep as order

    return _done(order(_target(coordinator, engine, timeout), number, model, wait))


@reported
def release(
    engine: EngineName,
    wait: Wait = 0.0,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Let a kept engine go with the fleet again: a checkpoint or the next push brings it up to date."""
    from controlplane.cli.engine_orders import release as order

    return _done(order(_target(coordinator, engine, timeout), wait))


@reported
def drain(
    engine: EngineName,
    wait: Wait = 0.0,
    owner: Owner = OPERATOR,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Let an engine take nothing new, neither requests nor updates; what is in it goes on to its end.

    With --wait ends when nothing is in it any more. `resume` takes it back.
    """
    from controlplane.cli.engine_orders import drain as order

    return _done(order(_target(coordinator, engine, timeout), owner, wait))


@reported
def pause(
    engine: EngineName,
    mode: Annotated[
        str, typer.Option("--mode", help="What becomes of requests in it: keep, abort, or wait for their end.")
    ] = "keep",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="With --mode wait: how long they may take.", min=0)
    ] = PAUSE_WAIT_SECONDS,
    owner: Owner = OPERATOR,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Keep an engine's gate shut until `resume`; it still takes updates. Ends when it makes no tokens."""
    from controlplane.cli.engine_orders import MODES
    from controlplane.cli.engine_orders import pause as order

    if mode not in MODES:
        raise CommandFailed(ExitCode.USAGE, f"--mode is one of {', '.join(MODES)}, not {mode}")
    return _done(order(_target(coordinator, engine, timeout), owner, mode, wait if mode == "wait" else 0.0))


@reported
def resume(
    engine: EngineName,
    wait: Wait = 0.0,
    owner: Owner = OPERATOR,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """End one's own `pause` and `drain`. The gate opens when nobody else holds it and the version is served.

    With --wait ends when clients are sent to it.
    """
    from controlplane.cli.engine_orders import resume as order

    return _done(order(_target(coordinator, engine, timeout), owner, wait))


@reported
def wake(
    engine: EngineName,
    owner: Annotated[
        str, typer.Option("--owner", metavar="NAME", help="End the sleep for this one alone. Default: for all.")
    ] = "",
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Also where a trainer that has its devices may live: its memory is in the way."),
    ] = False,
    wait: Wait = 0.0,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Wake an engine in the name of whoever put it to sleep, who will not do it: a trainer that was fenced, say.

    Know that their processes are gone: they may have its devices' memory still. An engine that died asleep, or whose
    agent was started anew meanwhile, is started. With --wait ends when clients are sent to it.
    """
    from controlplane.cli.engine_orders import wake as order

    return _done(order(_target(coordinator, engine, timeout), owner, wait, anyway=anyway))


@reported
def shutdown(
    engine: EngineName,
    reason: Annotated[str, typer.Option("--reason", help="Why, for its log.")] = "an operator asked",
    wait: Wait = 0.0,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """End an engine and its agent in order. It leaves the fleet; nothing starts it again.

    Requests in it end with what they have: `drain --wait` first. With --wait ends when it has left.
    """
    from controlplane.cli.engine_orders import shutdown as order

    return _done(order(_target(coordinator, engine, timeout), reason, wait))


def _target(coordinator: str, engine: str, timeout: float) -> Target:
    from controlplane.cli.engine_orders import Target

    return Target(coordinator, engine, timeout)


def _done(order: Coroutine[Any, Any, str]) -> int:
    typer.echo(asyncio.run(order))
    return ExitCode.OK
