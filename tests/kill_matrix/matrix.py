"""What is tried: which process is killed or stopped at which phase of a push, and how the findings are written down.

Pure. A phase is a failpoint of one daemon, which stands still there while another process, or that one, is struck.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

HEAL_SECONDS = 30.0
"""From the blow until the fleet must be whole again."""
VLLM_HEAL_SECONDS = 90.0
"""The same where a vLLM engine must be started anew, which takes 10 to 25 s of them by itself."""


class Backend(Enum):
    """What the struck engine of a fleet is."""

    MEMORY = "memory"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Phase:
    """A point in the life of an update."""

    name: str
    holder: str
    """The daemon that stands still there."""
    point: str
    meaning: str
    arm: str = "hold"


PHASES = (
    Phase("before_open", "trainer", "trainer.before_open", "the update has begun; no engine has heard of it"),
    Phase("after_open", "trainer", "trainer.after_open", "an engine has accepted it; no bytes yet"),
    Phase("between_chunks", "trainer", "trainer.between_chunks", "some of the bytes are there", "hold after=3"),
    Phase("before_commit", "trainer", "trainer.before_commit", "go is in the ledger; no commit frame went"),
    Phase("after_commit", "trainer", "trainer.after_commit", "commit frames went out; nobody has answered"),
    Phase("before_install", "e0", "engine.before_install", "an engine has its commit frame and has not begun"),
    Phase("mid_install", "e0", "engine.mid_install", "an engine's weights are unset"),
    Phase("after_install", "e0", "engine.after_install", "the weights are in; nobody has been told"),
    Phase("before_decision", "coordinator", "coordinator.before_decision", "all reports are in; nothing is written"),
    Phase("after_decision", "coordinator", "coordinator.after_decision", "the decision is written; no gate is open"),
)
"""In the order of an update's life."""

PROCESSES = {
    "leader": "leader rank",
    "rank": "other rank",
    "trainer": "trainer agent",
    "engine": "engine agent",
    "vllm": "engine agent (vLLM)",
    "coordinator": "coordinator",
}
"""Short names, as on the command line, and how the table calls them."""


class Blow(Enum):
    KILL = "kill -9"
    STOP = "SIGSTOP 3 s"


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to try."""

    phase: Phase
    process: str
    blow: Blow

    @property
    def name(self) -> str:
        return f"{self.phase.name}:{self.process}" + (":stop" if self.blow is Blow.STOP else "")

    @property
    def backend(self) -> Backend:
        """Of the fleet that it needs."""
        return Backend.VLLM if self.process == "vllm" else Backend.MEMORY

    @property
    def limit_seconds(self) -> float:
        """From the blow until the fleet must be whole again."""
        restarts = self.backend is Backend.VLLM and self.blow is Blow.KILL
        return VLLM_HEAL_SECONDS if restarts else HEAL_SECONDS


class Outcome(Enum):
    """What became of the push that was held."""

    COMMITTED = "committed"
    DEGRADED = "degraded"
    KEPT = "old version kept"


@dataclass(frozen=True)
class Finding:
    """What a cell showed."""

    cell: Cell
    outcome: Outcome | None = None
    heal_seconds: float = 0.0
    """From the blow until both engines served one version, the held push's or a later one."""
    next_seconds: float = 0.0
    """From the blow until both served a later push's."""
    problems: tuple[str, ...] = field(default=())

    @property
    def text(self) -> str:
        """For the table."""
        outcome = self.outcome.value if self.outcome else "unknown"
        return f"**failed** ({outcome})" if self.problems else f"{outcome}, {self.heal_seconds:.1f} s"


def cells(only: str = "") -> list[Cell]:
    """All of them, or those that `only` names: PHASE (both blows), PHASE:PROCESS (the kill) or PHASE:PROCESS:stop.

    An empty phase or process means all. Those of one backend follow each other, so that they can share a fleet.

    Raises:
        ValueError: it names none.
    """
    whole = [Cell(phase, process, blow) for blow in Blow for phase in PHASES for process in PROCESSES]
    phase, process, blow = [*only.split(":"), "", ""][:3]
    blows = {"stop": {Blow.STOP}, "": {Blow.KILL} if process else set(Blow)}.get(blow, set())
    chosen = [c for c in whole if phase in ("", c.phase.name) and process in ("", c.process) and c.blow in blows]
    if not chosen:
        raise ValueError(f"no cell is named {only!r}; phases: {[p.name for p in PHASES]}, processes: {list(PROCESSES)}")
    return sorted(chosen, key=lambda c: c.backend is Backend.VLLM)


def table(findings: Iterable[Finding], blow: Blow) -> str:
    """Markdown: a row a phase, a column a process."""
    found = {(f.cell.phase.name, f.cell.process): f for f in findings if f.cell.blow is blow}
    columns = [p for p in PROCESSES if any(process == p for _, process in found)]
    lines = ["| phase | " + " | ".join(PROCESSES[p] for p in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for phase in PHASES:
        row = [found.get((phase.name, p)) for p in columns]
        if any(row):
            lines.append(f"| {phase.name} | " + " | ".join(f.text if f else "" for f in row) + " |")
    return "\n".join(lines)


def document(findings: list[Finding], seconds: float) -> str:
    """docs/failures.md."""
    phases = "\n".join(f"| {p.name} | {p.meaning} |" for p in PHASES)
    failed = [f for f in findings if f.problems]
    problems = "\n".join(f"- {f.cell.name}: {'; '.join(f.problems)}" for f in failed)
    parts = (
        INTRODUCTION,
        "| phase | what is true there |\n|---|---|\n" + phases + "\n",
        f"## kill -9\n\n{table(findings, Blow.KILL)}\n",
        "## SIGSTOP, and SIGCONT after 3 s\n\nTimes count from the SIGSTOP: 3 s of each are its own.\n",
        f"{table(findings, Blow.STOP)}\n",
        _wrapped(
            f"{len(findings)} cells in {seconds / 60:.0f} minutes, {len(failed)} failed. {_slowest(findings)}"
            "Times are of a machine with 2 busy cores; most of them are the start of Python and torch in the ranks, "
            "and of vLLM in its column."
        ),
        f"Failed:\n\n{problems}\n" if failed else "",
    )
    return "\n".join(parts).rstrip() + "\n"


def _slowest(findings: list[Finding]) -> str:
    """Of each backend: a start of vLLM would hide the others."""
    text = ""
    for backend, engines in ((Backend.MEMORY, "in-memory engines"), (Backend.VLLM, "the vLLM engine")):
        of_it = [f for f in findings if f.cell.backend is backend]
        whole = max((f.heal_seconds for f in of_it), default=0.0)
        later = max((f.next_seconds for f in of_it), default=0.0)
        if of_it:
            text += (
                f"With {engines} the slowest was whole after {whole:.1f} s, and a later push had reached both engines "
                f"after {later:.1f} s at most. "
            )
    return text


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118) + "\n"


INTRODUCTION = f"""# What dies, what is seen, what heals it

This page is generated by `make kill-matrix`; one cell alone: `python -m tests.kill_matrix.run --only PHASE:PROCESS`.

A coordinator, two engine agents with in-memory engines and a trainer agent with two ranks run, each a process of its
own. One engine has devices of its own (it is the one that is struck), the other shares the ranks' two devices; rank 0
leads both. The trainer pushes without end. In each cell a push is held at a phase, a process is struck there, and the
push is let go. Whatever died is started again with the same command, as systemd would; the ranks are started again by
their agent. Nobody else helps.

The column *engine agent (vLLM)* has a real vLLM engine where the struck in-memory engine was: a small Llama in float32,
which the trainer pushes whole, with other weights at each step. Its tokens are compared with what transformers makes
of the weights of the version that they claim; the other engine stays in memory and is compared as ever.

- **What is seen.** Nothing wrong: at every look the engines' statuses and tokens are compared with the weights of the
  version that they claim. A version never falls while an engine lives, and none is claimed during an install. The
  push itself ends in one of three ways. *committed*: the fleet serves it. *degraded*: it serves it with the
  engines that have it, and the other follows with the next push. *old version kept*: the push failed; who holds the
  version before it serves it on, and an engine that had installed the new one waits, gate shut, for the next push.
- **What heals it.** A killed rank or trainer agent: the set of ranks starts again under a higher term and pushes. A
  killed engine agent: it comes back unset and takes the next push. A killed coordinator: it reads its ledger, asks the
  engines what they hold, and decides. A stopped process goes on where it was, or is told that it is late.
- **When it is whole.** Both engines are routable and serve one version, the held push's or a later one. That must come
  within {HEAL_SECONDS:.0f} s of the blow, or within {VLLM_HEAL_SECONDS:.0f} s where a vLLM engine must be started anew;
  after it a later push must arrive, and no process may be left that the killed one had started. The tables give the
  seconds to whole.
"""
