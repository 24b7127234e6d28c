"""The commands that run for long: coordinator, engine agent, trainer agent.

Each loads its settings from a file and the command line, sets up logs (JSON on stderr when nobody watches), and runs
until it is done, fails, or gets SIGINT or SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from controlplane.cli.ending import CommandFailed, reported
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from engine_agent.members.member import MemberSettings
    from trainer_agent.agent.settings import TrainerSettings

T = TypeVar("T")

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings, as TOML. The command line goes over them.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as vllm.dtype=bfloat16. May be repeated."),
]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    typer.Option("--log-level", metavar="LEVEL", case_sensitive=False, help="DEBUG, INFO, WARNING or ERROR."),
]
LogFormat = Annotated[
    Literal["auto", "json", "console"],
    typer.Option("--log-format", metavar="FORMAT", help="json, console, or auto: by whether a terminal watches."),
]
Parent = Annotated[
    int | None,
    typer.Option("--die-with-parent", metavar="PID", help="End when process PID, which started this one, ends."),
]
Fleet = Annotated[
    Path | None,
    typer.Option("--fleet", metavar="FILE", help="Take the settings from a fleet file; instead of --config."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Serve other hosts without TLS.")]
Coordinator = Annotated[
    str | None, typer.Option("--coordinator", metavar="HOST:PORT", help="The coordinator to live with.")
]
EngineListen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve; port 0 takes any free one.")
]
EngineId = Annotated[str | None, typer.Option("--id", metavar="ID", help="Which engine of the fleet file.")]
MemberOf = Annotated[
    str | None, typer.Option("--member-of", metavar="ID", help="Be a further node of engine ID; needs --head.")
]
Head = Annotated[str | None, typer.Option("--head", metavar="HOST:PORT", help="With --member-of: the engine's agent.")]


@reported
def coordinator(
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve.  [default: 127.0.0.1:7070]")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="What must survive a restart: terms, versions.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="The training run. Every call must name it.")
    ] = None,
    config: Config = None,
    fleet: Fleet = None,
    insecure: Insecure = False,
    sets: Sets = None,
    log_level: LogLevel = "INFO",
    log_format: LogFormat = "auto",
    die_with_parent: Parent = None,
) -> int:
    """Run the coordinator: it owns the fleet's record and decides; it never touches a tensor's bytes."""
    from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator

    given = _given(sets, listen=listen, state_dir=state_dir, run_id=run_id, insecure=_flag(insecure))
    if fleet is not None:
        from controlplane.cli.up.settings import coordinator_of

        _only_one(config)
        settings = coordinator_of(fleet, given)
    else:
        settings = _settings(CoordinatorSettings, config, given)
    _prepare("coordinator", log_level, log_format, die_with_parent)
    return asyncio.run(run_coordinator(settings))


@reported
def engine(
    config: Config = None,
    listen: EngineListen = None,
    coordinator: Coordinator = None,
    fleet: Fleet = None,
    engine_id: EngineId = None,
    member_of: MemberOf = None,
    head: Head = None,
    insecure: Insecure = False,
    sets: Sets = None,
    log_level: LogLevel = "INFO",
    log_format: LogFormat = "auto",
    die_with_parent: Parent = None,
) -> int:
    """Run an engine agent with its engine: the only writer of that engine's weights."""
    from controlplane.cli.up.settings import engine_of
    from engine_agent.daemon.agent import run_engine
    from engine_agent.daemon.settings import EngineSettings
    from engine_agent.members.member import run_member

    _agent_or_member(member_of, head, listen, coordinator, engine_id, insecure)
    if member_of is not None:
        member = _member(member_of, fleet, config, _given(sets, engine_id=member_of, head=head))
        _prepare("member", log_level, log_format, die_with_parent)
        return asyncio.run(run_member(member))
    given = _given(sets, listen=listen, coordinator=coordinator, insecure=_flag(insecure))
    place = _in_fleet(fleet, engine_id, config, "engines")
    settings = _settings(EngineSettings, config, given) if place is None else engine_of(*place, given)
    _prepare("engine", log_level, log_format, die_with_parent)
    return asyncio.run(run_engine(settings))


@reported
def trainer(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- SCRIPT [ARGS]", help="What each rank runs, and its arguments.")
    ] = None,
    config: Config = None,
    coordinator: Coordinator = None,
    fleet: Fleet = None,
    trainer_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Which trainer of the fleet file.")
    ] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the model's lease over from whoever holds it, who is fenced.")
    ] = False,
    insecure: Insecure = False,
    sets: Sets = None,
    log_level: LogLevel = "INFO",
    log_format: LogFormat = "auto",
    die_with_parent: Parent = None,
) -> int:
    """Run a trainer agent: it starts the training ranks and speaks for them."""
    from trainer_agent.agent import run_trainer
    from trainer_agent.agent.settings import TrainerSettings

    flags = {"insecure": _flag(insecure), "takeover": _flag(takeover)}
    given = _given(sets, coordinator=coordinator, **flags)
    place = _in_fleet(fleet, trainer_id, config, "trainers")
    if place is not None:
        settings, command = _trainer_of(*place, given, command)
    else:
        settings = _settings(TrainerSettings, config, given)
    if not command:
        raise typer.BadParameter("name the training script after --, such as: weightplane trainer -- train.py")
    _prepare("trainer", log_level, log_format, die_with_parent)
    return asyncio.run(run_trainer(settings, command))


def _agent_or_member(member_of: str | None, head: str | None, *agents: object) -> None:
    """`agents`: the values of the options that an agent alone has."""
    if (member_of is None) != (head is None):
        raise typer.BadParameter("--member-of and --head go together: the engine, and where its agent is")
    if member_of is not None and any(agents):
        raise typer.BadParameter("a member serves nobody: --listen, --coordinator, --insecure and --id are an agent's")


def _member(engine_id: str, fleet: Path | None, config: Path | None, given: dict[str, Any]) -> MemberSettings:
    from controlplane.cli.up.settings import member_of
    from engine_agent.members.member import MemberSettings

    if fleet is None:
        return _settings(MemberSettings, config, given)
    _only_one(config)
    return member_of(fleet, engine_id, given)


def _trainer_of(
    fleet: Path, trainer_id: str, given: dict[str, Any], command: list[str] | None
) -> tuple[TrainerSettings, list[str]]:
    """A command on the command line goes over the file's. Ranks see the devices of the engines that they are beside."""
    from controlplane.cli.up.settings import trainer_of
    from engine_agent.vllm.environment import gpu_present

    found = trainer_of(fleet, trainer_id, given)
    if found.devices and gpu_present():
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(device) for device in found.devices))
    return found.settings, command or list(found.command)


def _given(sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """What the command line says, nested as the file is; a flag goes over --set."""
    from controlplane.config import Text, parse_overrides

    return parse_overrides(sets or []) | {name: Text(value) for name, value in flags.items() if value is not None}


def _flag(given: bool) -> str | None:
    """Not given: what the file says stays."""
    return "true" if given else None


def _settings(cls: type[T], config: Path | None, given: dict[str, Any]) -> T:
    from controlplane.config import load

    return load(cls, config, given)


def _in_fleet(fleet: Path | None, name: str | None, config: Path | None, kind: str) -> tuple[Path, str] | None:
    """The fleet file, and which of its `kind` this one is; None: its settings are not from there."""
    if (fleet is None) != (name is None):
        raise typer.BadParameter(f"--fleet and --id go together: the file, and which of its {kind}")
    if fleet is None or name is None:
        return None
    _only_one(config)
    return fleet, name


def _only_one(config: Path | None) -> None:
    if config is not None:
        raise typer.BadParameter("give --config or --fleet, not both")


def _prepare(component: str, log_level: str, log_format: str, parent: int | None) -> None:
    from controlplane.processes import die_with_parent
    from controlplane.rpc.logs import configure_logging

    configure_logging(component, json=None if log_format == "auto" else log_format == "json", level=log_level)
    if parent is None:
        return
    try:
        die_with_parent(parent)
    except ProcessLookupError as error:
        raise CommandFailed(ExitCode.FAILED, str(error)) from error
