"""How a command ends: with an exit code, and with one line for an error that was to be expected.

An error that is none of ours is a defect: it keeps its traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from controlplane.exit_codes import ExitCode

P = ParamSpec("P")


class CommandFailed(Exception):
    """A command could not do what was asked: the exit code, and the line (or lines) that people see."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def reported(command: Callable[P, int]) -> Callable[P, None]:
    """Make a command whose result is its exit code end as commands do: code, one line, or Ctrl-C."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except Exception as error:
            expected = _expected(error)
            if expected is None:
                raise
            code, line = expected
            typer.echo(f"weightplane: {line}", err=True)
        raise typer.Exit(int(code))

    return run


def _expected(error: Exception) -> tuple[int, str] | None:
    """The code and the line of an expected error; None for any other."""
    if isinstance(error, CommandFailed):
        return error.code, str(error)
    from controlplane.config import ConfigError

    if isinstance(error, ConfigError):
        return ExitCode.CONFIG, str(error)
    if isinstance(error, ModuleNotFoundError):
        return _missing_extra(error)
    from controlplane.core.errors import WeightplaneError
    from controlplane.rpc.ports import PortUnavailable

    if isinstance(error, PortUnavailable):
        return ExitCode.PORT_IN_USE, str(error)
    if isinstance(error, WeightplaneError):
        return _code(error), f"{error.reason}: {error}"
    return None


def _code(error: Exception) -> ExitCode:
    from controlplane.core import errors as e
    from controlplane.rpc.errors import RemoteError

    if isinstance(error, RemoteError) and error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return ExitCode.UNREACHABLE
    codes: list[tuple[type[e.WeightplaneError], ExitCode]] = [
        (e.StaleTerm, ExitCode.FENCED),
        (e.LeaseHeld, ExitCode.LEASE_HELD),
        (e.PeerLost, ExitCode.UNREACHABLE),
        (e.TlsFailed, ExitCode.UNREACHABLE),
        (e.Unauthenticated, ExitCode.DENIED),
        (e.PermissionDenied, ExitCode.DENIED),
        (e.EngineDied, ExitCode.ENGINE_FAILED),
        (e.LedgerError, ExitCode.LEDGER),
    ]
    return next((code for cls, code in codes if isinstance(error, cls)), ExitCode.FAILED)


_EXTRAS = {"vllm": "engine-cpu", "torch": "trainer", "megatron": "trainer", "safetensors": "trainer", "gguf": "demo"}


def _missing_extra(error: ModuleNotFoundError) -> tuple[int, str] | None:
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return None
    extra = _EXTRAS[name]
    return ExitCode.CONFIG, f"{name} is not installed here; this command needs: pip install 'weightplane[{extra}]'"
