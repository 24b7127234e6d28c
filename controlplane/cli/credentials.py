"""How a command proves who it is: options before the command's name, or WEIGHTPLANE_TLS_… in the environment."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import CommandFailed
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from controlplane.rpc.security import TlsSettings

Ca = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="WEIGHTPLANE_TLS_CA", metavar="FILE", help="Authority of the daemons, as PEM."),
]
Cert = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="WEIGHTPLANE_TLS_CERT", metavar="FILE", help="Our certificate.")
]
Key = Annotated[Path | None, typer.Option("--tls-key", envvar="WEIGHTPLANE_TLS_KEY", metavar="FILE", help="Its key.")]
ServerName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        envvar="WEIGHTPLANE_TLS_SERVER_NAME",
        metavar="NAME",
        help="Name in the daemons' certificates, if it is not their address.",
    ),
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="WEIGHTPLANE_TOKEN_FILE", metavar="FILE", help="Our token, in place of a certificate."
    ),
]

_given: ContextVar[tuple[Path | None, Path | None, Path | None, str, Path | None]] = ContextVar(
    "weightplane_credentials", default=(None, None, None, "", None)
)


def give(ca: Path | None, cert: Path | None, key: Path | None, server_name: str, token: Path | None) -> None:
    """What the command line says, for `credentials`."""
    _given.set((ca, cert, key, server_name, token))


def credentials() -> TlsSettings:
    """For every channel of the command. Raises CommandFailed: they do not go together."""
    from controlplane.rpc.security import TlsSettings

    ca, cert, key, server_name, token = _given.get()
    try:
        return TlsSettings(ca=ca, cert=cert, key=key, server_name=server_name, token=token)
    except ValueError as error:
        raise CommandFailed(ExitCode.CONFIG, str(error).replace("tls.", "--tls-")) from error
