"""What a process of this host is doing: the stacks of its threads, taken from outside by py-spy.

Promises: bounded in time, in text and in how many are looked at; no values of variables and no command lines, which may
hold secrets; never an error: what cannot be looked at is answered with the reason. The process is stopped for some
milliseconds and goes on. py-spy is optional (an extra of the agents), and needs the right to trace: root, or
CAP_SYS_PTRACE where the kernel restricts it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DUMP_SECONDS = 5.0
"""Longest time for one process; a large one takes half a second."""
MAX_TEXT_LENGTH = 64 * 1024
"""Of one process's stacks."""
MAX_PROCESSES = 32
"""Of one dump; the others are named and not looked at."""
AT_ONCE = 4
"""Dumps side by side: each takes a core for its time."""


_COMMAND = re.compile(r"^(Process \d+):.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Of one process."""

    name: str
    pid: int
    text: str = ""
    problem: str = ""
    """Why there are none."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}):\n{self.text or self.problem}"


async def dump(processes: Mapping[str, int]) -> list[Stacks]:
    """Look at each process, by name and id."""
    turns = asyncio.Semaphore(AT_ONCE)
    named = sorted(processes.items())
    looked = await asyncio.gather(*(_dump(name, pid, turns) for name, pid in named[:MAX_PROCESSES]))
    problem = f"not looked at: {len(named)} processes, the limit is {MAX_PROCESSES}"
    return [*looked, *(Stacks(name, pid, problem=problem) for name, pid in named[MAX_PROCESSES:])]


async def _dump(name: str, pid: int, turns: asyncio.Semaphore) -> Stacks:
    program = _program()
    if program is None:
        return Stacks(name, pid, problem="py-spy is not installed")
    async with turns:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            program, "dump", "--pid", str(pid), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(DUMP_SECONDS):
                out, error = await process.communicate()
        except TimeoutError:
            return Stacks(name, pid, problem=f"py-spy took longer than {DUMP_SECONDS} s")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    if process.returncode:
        return Stacks(name, pid, problem=f"py-spy: {_last_line(error) or f'exit code {process.returncode}'}")
    return Stacks(name, pid, text=without_command(out[:MAX_TEXT_LENGTH].decode(errors="replace")))


def without_command(text: str) -> str:
    """py-spy begins with the process's id and its arguments, among which people put keys."""
    return _COMMAND.sub(r"\1", text)


def _program() -> str | None:
    """Beside this interpreter, as pip puts it there, or anywhere on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""
