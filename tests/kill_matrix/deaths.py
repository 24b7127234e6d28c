"""An engine's own deaths, with real vLLM: what is tried, and how it is written into the page.

Pure. A death falls on e0 while a push is held; the phase says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tests.kill_matrix.matrix import HEAL_SECONDS, VLLM_HEAL_SECONDS, Outcome

STOP_SECONDS = 30.0
"""Of the agent that is stopped: three times as long as a lease lasts by default."""
GROUP = "deaths"
"""Its name on the command line."""
HEAD = "## An engine's own deaths, with real vLLM"


class Victim(Enum):
    CORE = "EngineCore"
    AGENT = "engine agent"


@dataclass(frozen=True, slots=True)
class Death:
    """One thing to try."""

    name: str
    what: str
    """For the table."""
    victim: Victim
    holder: str = "trainer"
    point: str = "trainer.before_open"
    arm: str = "hold"
    generating: bool = False
    """Requests run at the blow; else the engine is left alone until then."""
    stopped_seconds: float = 0.0
    """0: it is killed."""

    @property
    def limit_seconds(self) -> float:
        """From the blow until the engine must be routable again."""
        return STOP_SECONDS + HEAL_SECONDS if self.stopped_seconds else VLLM_HEAL_SECONDS


DEATHS = (
    Death("core_idle", "EngineCore is killed while it is idle", Victim.CORE),
    Death("agent_killed", "the agent is killed while its engine generates", Victim.AGENT, generating=True),
    Death("core_generating", "EngineCore is killed while it generates", Victim.CORE, generating=True),
    Death(
        "core_mid_transfer",
        "EngineCore is killed while bytes arrive",
        Victim.CORE,
        point="trainer.between_chunks",
        arm="hold after=3",
    ),
    Death(
        "core_mid_install",
        "EngineCore is killed while a worker installs",
        Victim.CORE,
        holder="e0",
        point="worker.install",
        arm="hold after=3",
    ),
    Death(
        "agent_stopped",
        f"the agent is stopped for {STOP_SECONDS:.0f} s while its engine generates",
        Victim.AGENT,
        generating=True,
        stopped_seconds=STOP_SECONDS,
    ),
)


@dataclass(frozen=True)
class Dying:
    """What a death showed. Times are seconds from the blow."""

    death: Death
    outcome: Outcome | None = None
    unrouted_seconds: float = 0.0
    """Until the coordinator routed nobody to it."""
    back_seconds: float = 0.0
    """Until it was routable again."""
    problems: tuple[str, ...] = field(default=())

    @property
    def text(self) -> str:
        """The row's end."""
        outcome = self.outcome.value if self.outcome else "unknown"
        failed = "**failed** " if self.problems else ""
        return f"{failed}{outcome} | {self.unrouted_seconds:.1f} s | {self.back_seconds:.1f} s"


def deaths(only: str) -> tuple[Death, ...]:
    """All, or the one that `deaths:NAME` names. Raises ValueError."""
    name = only.partition(":")[2]
    found = tuple(d for d in DEATHS if name in ("", d.name))
    if not found:
        raise ValueError(f"no death is named {name!r}; there are {', '.join(d.name for d in DEATHS)}")
    return found


def section(found: Sequence[Dying]) -> str:
    """Markdown, from its heading to its end."""
    rows = [f"| {d.death.what} | {d.text} |" for d in found]
    problems = [f"- {d.death.name}: {'; '.join(d.problems)}" for d in found if d.problems]
    table = ["| what dies | the held push | unrouted after | routable again after |", "|---|---|---|---|", *rows]
    return "\n".join([HEAD, "", TEXT, *table, *(["", "Failed:", "", *problems] if problems else []), ""])


def put_into(page: str, fresh: str) -> str:
    """The page with `fresh` in place of its section, or at its end."""
    before, head, after = page.partition(HEAD)
    _, heading, rest = after.partition("\n## ") if head else ("", "", "")
    return before.rstrip() + "\n\n" + fresh.rstrip() + "\n" + (f"{heading}{rest}" if heading else "")


def section_of(page: str) -> str:
    """The page's section; empty if it has none."""
    _, head, after = page.partition(HEAD)
    return (head + after.partition("\n## ")[0]) if head else ""


TEXT = f"""One cell alone: `python -m tests.kill_matrix.run --only {GROUP}:NAME`; the group, into this page:
`--only {GROUP} --write docs/failures.md`.

The fleet is the one above, with a real vLLM engine as e0. Its processes are struck, not the trainer's: EngineCore,
which owns the scheduler and starts the workers, or the agent in front of it. A dead EngineCore is replaced by its
agent: a fresh engine, a new incarnation, unset, which takes the next push. A killed agent is started again by its
supervisor, on the same port; its engine's processes end with it, and what they left in shared memory is removed before
the next engine starts. Waits of 1, 2, 4 s … between deaths in a row are in the times. *Unrouted* is when the
coordinator sends nobody there any more: told by the agent, by its broken session, or by the end of its lease (2 s
here); in an install nobody was sent there to begin with. Every request that ran ended: with its tokens, or with an
error.
"""
