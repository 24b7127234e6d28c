"""`weightplane certs dev` and `weightplane token new`: what callers prove with that they are who they say."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import CommandFailed, reported
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from controlplane.core.access import Principal

ROLES = ("coordinator", "trainer", "engine", "rollout", "viewer", "admin")
HOSTS = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS = 90.0

Run = Annotated[str, typer.Option("--run", metavar="ID", help="The run that it is for; * is any.")]

certs = typer.Typer(help="Make certificates.", no_args_is_help=True, rich_markup_mode=None)
token = typer.Typer(help="Make tokens, for callers without certificates.", no_args_is_help=True, rich_markup_mode=None)


@certs.callback()
def _certs() -> None:
    """Make certificates."""


@token.callback()
def _token() -> None:
    """Make tokens, for callers without certificates."""


@certs.command(short_help="Make an authority and a certificate for each role.")
@reported
def dev(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are written.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A further name or address of the servers. May be repeated."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="ROLE/NAME", help="One for this node alone, such as engine/engine-0."),
    ] = None,
    run: Run = "*",
    days: Annotated[float, typer.Option("--days", help="How long they are valid.")] = DEFAULT_DAYS,
) -> int:
    """Make a local authority, and a certificate and key for each role, in DIR.

    What is there stays: the same DIR with other --node adds to it. Keep ca.key away from the hosts that run daemons:
    who has it can be anybody.
    """
    from controlplane.rpc.security.authority import issue, open_authority

    wanted = [_principal(*_split(n), run) for n in node or ()] or [_principal(role, "*", run) for role in ROLES]
    try:
        authority = open_authority(directory)
        for principal in wanted:
            typer.echo(f"{issue(authority, principal, [*HOSTS, *(host or ())], days, directory)}  {principal}")
    except FileExistsError as error:
        what = f"{error.filename} is there, and is not overwritten: remove it, or name another directory"
        raise CommandFailed(ExitCode.FAILED, what) from error
    except (OSError, ValueError) as error:
        raise CommandFailed(ExitCode.FAILED, str(error)) from error
    return ExitCode.OK


@token.command(short_help="Make a token, and write its hash.")
@reported
def new(
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help=f"What its holder is: {', '.join(ROLES)}.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Who holds it.")],
    file: Annotated[
        Path, typer.Option("--file", metavar="FILE", help="The servers' file of hashes (tls.tokens).")
    ] = Path("tokens.toml"),
    run: Run = "*",
    days: Annotated[float | None, typer.Option("--days", help="How long it is valid; else for ever.")] = None,
) -> int:
    """Print a new token, once, and write its hash to FILE. A running server takes it at once."""
    from controlplane.rpc.security.tokens import add_token, new_token

    principal, made = _principal(role, name, run), new_token()
    expires = None if days is None else datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    try:
        add_token(file, principal, made, expires)
    except OSError as error:
        raise CommandFailed(ExitCode.FAILED, f"{file}: {error.strerror}") from error
    typer.echo(made)
    return ExitCode.OK


def _split(node: str) -> tuple[str, str]:
    role, slash, name = node.partition("/")
    if not slash or not name:
        raise CommandFailed(ExitCode.USAGE, f"--node is ROLE/NAME, such as engine/engine-0; not {node}")
    return role, name


def _principal(role: str, name: str, run: str) -> Principal:
    from controlplane.core.access import Principal, Role

    if role not in ROLES:
        raise CommandFailed(ExitCode.USAGE, f"a role is one of {', '.join(ROLES)}; not {role}")
    try:
        return Principal(Role(role), name, run)
    except ValueError as error:
        raise CommandFailed(ExitCode.USAGE, str(error)) from error
