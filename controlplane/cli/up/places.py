"""Where the processes of a fleet file run: this machine, or nodes that a cluster chose. One contract for both.

`run` sees one life of one process through and never starts another: restarts are the caller's. `stop_all` ends what
still runs, trainers before the engines that they push to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controlplane.cli.crew import Crew, died


@dataclass(frozen=True, slots=True)
class Process:
    """One daemon of a fleet file."""

    name: str
    words: tuple[str, ...]
    """Its command line, after `weightplane`."""
    takes_devices: bool = False
    """An engine that is to be told which of a node's GPUs are its own."""
    listens_anywhere: bool = False
    """The file leaves its address open, and other hosts must reach it: it listens at its node's."""

    @property
    def kind(self) -> str:
        """coordinator, engine or trainer."""
        return self.words[0]


@dataclass(frozen=True, slots=True)
class Ended:
    """How one life of a process ended."""

    code: int | None
    """Its exit code, negative for a signal; None: it was lost with its node."""
    said: str
    """How, with the last lines of its log."""


class Place(Protocol):
    """Runs processes somewhere."""

    async def run(self, process: Process, started: Callable[[str], None]) -> Ended:
        """Until it ends. `started` is told once where it runs; before that it may have to wait for room."""
        ...

    async def stop_all(self) -> None:
        """End every process in order; what does not end is killed. Nothing is left."""
        ...

    def hurry(self) -> None:
        """From now on nobody is asked, everybody is killed."""
        ...


class ThisMachine:
    """A `Place`: children of this command."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def run(self, process: Process, started: Callable[[str], None]) -> Ended:
        """See `Place`."""
        child = await self._crew.weightplane(process.name, *process.words)
        started(f"pid {child.process.pid}")
        code = await child.process.wait()
        said = str(died(child))
        await self._crew.stop(child)  # what it left behind
        return Ended(code, said)

    async def stop_all(self) -> None:
        """See `Place`. What was started last ends first."""
        await self._crew.stop_all()

    def hurry(self) -> None:
        """See `Place`."""
        self._crew.hurry = True
