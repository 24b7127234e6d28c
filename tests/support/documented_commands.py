"""What becomes of each command that the documentation shows: it is run here, or another test or target runs it.

To add a command to a page, add a line here. `tests/integration/test_documented_commands.py` refuses a command without
one, and a line that no page needs any more. Commands of pages that have a test of their own are that test's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.support.documents import Command

PAGES_WITH_A_TEST = {
    "docs/grpcurl.md": "tests/integration/test_grpcurl_docs.py",
    "docs/security.md": "tests/unit/test_security_document.py",
}
"""They run whole, in their own order."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run by the test. It is found by how it begins; what is changed to run it is said here."""

    begins: str
    where: Literal["alone", "fleet", "ends", "after"] = "alone"
    """`alone` in an empty directory with the page's files; `fleet` against a coordinator and engines; `ends`, which
    change the fleet: after the others, in the order of this table; `after`, once the coordinator has stopped, beside
    its state."""
    code: tuple[int, ...] = (0,)
    says: str = ""
    """Part of what it prints."""
    more: str = ""
    """Words that are added: to end soon, where the page's reader would press Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Run by another test or target, which the reason names; looked for by a pattern from the command's beginning."""

    pattern: str
    by: str
    shows: str = ""
    """Text in that file without which it would not run the command; empty where it calls what the command calls."""


RUN = (
    Run("weightplane --help", says="Commands:"),
    Run("weightplane up fleet.toml --dry-run", says="policy-0"),
    Run("weightplane certs dev certs", says="coordinator"),
    Run("weightplane token new"),
    Run("weightplane sim --seed 7 --events 200"),
    Run("weightplane status", "fleet", says="engine-0"),
    Run("weightplane engines", "fleet", says="engine-0"),
    Run("weightplane watch", "fleet", says="engine_joined", more="--count 1"),
    Run("weightplane updates", "fleet", says="committed"),
    Run("weightplane why latest", "fleet", says="committed after"),
    Run("weightplane verify", "fleet", says="all equal"),
    # What is wrong depends on the machine: memory that others have, limits.
    Run("weightplane doctor", "fleet", code=(0, 1), says="coordinator"),
    Run("weightplane plan", "fleet", says="plan revision"),
    Run("weightplane health --addr HOST:PORT", "fleet"),
    # Nobody kept checkpoints here: a refusal with a reason, and how to act on it.
    Run("weightplane rollback policy", "fleet", code=(1,), says="CHECKPOINT_UNKNOWN"),
    Run("python ask.py", "fleet", says="1.1"),
    Run("weightplane ledger accept", "fleet", says="nothing was to be accepted"),
    Run("weightplane engines wake engine-0", "fleet", says="sleeps for nobody"),
    Run("weightplane engines drain engine-1", "ends", says="takes nothing new"),
    Run("weightplane engines shutdown engine-1", "ends", says="engine-1 left"),
    Run("weightplane ledger verify", "after", says="ledger", more="--state-dir weightplane-state"),
)

JOINS = "tests/integration/test_joins_and_drains.py"
ORDERS = "tests/integration/test_engine_orders.py"
ELSEWHERE = (
    Elsewhere(r"make (setup|test|check)", "every developer, and whatever tests this repository"),
    Elsewhere(r"make demo", "tests/e2e/test_demo_tiny.py", '"demo"'),
    Elsewhere(r"make bench(-quick)?", "bench/"),
    Elsewhere(r"pip install weightplane\[ray\]", "tests/integration/test_up_ray.py"),
    Elsewhere(r"weightplane up --ray", "tests/integration/test_up_ray.py", '"up", "--ray"'),
    Elsewhere(r"(export|mkdir|cd|cp) ", "the shell"),
    Elsewhere(r"kill -9 ", "tests/integration/test_up.py", "signal.SIGKILL"),
    Elsewhere(r"weightplane coordinator --listen", "tests/integration/test_watchdog.py", '"--listen", "127.0.0.1:0"'),
    Elsewhere(
        r"weightplane engine --fleet fleet.toml --member-of",
        "tests/integration/test_engine_of_nodes.py",
        '"--member-of"',
    ),
    Elsewhere(r"weightplane (coordinator|engine) --fleet", "tests/integration/test_up.py"),
    Elsewhere(r"weightplane up fleet.toml$", "tests/integration/test_examples.py"),
    Elsewhere(r"weightplane engine --config", "tests/integration/test_traces.py", '"engine", "--config"'),
    Elsewhere(r"weightplane trainer .*--", "tests/integration/test_examples.py"),
    Elsewhere(r"weightplane engines (keep|release)", JOINS),
    Elsewhere(r"weightplane engines (drain|shutdown) engine-\d --wait", ORDERS, '"shutdown", "e1", "--wait"'),
    Elsewhere(r"python -m vllm\.entrypoints", "tests/support/vllm_server.py", "vllm.entrypoints"),
    Elsewhere(r"--[\w-]+-path [\w.]+$", "tests/unit/test_slime_rollouts.py", "-path"),
    Elsewhere(r"systemctl (enable|start|status)", "tests/deploy/test_systemd.py", '"systemctl", "start"'),
    Elsewhere(r"buildah build", "tests/deploy/images.py", '"build", "--isolation"'),
    Elsewhere(r"(pytest|\S*python -m pytest) ", "the test that it names"),
    Elsewhere(r"\S*python -m examples\.run ", "tests/integration/test_examples.py", "examples.run"),
    Elsewhere(r"\S*python bench/", "bench/"),
)


def plain(command: Command) -> str:
    """Without variables before it, without comments, one space between words."""
    return " ".join(command.words)


def how(command: Command) -> Run | Elsewhere | None:
    """The longest beginning that fits decides; sessions that act on a fleet are their own tests'."""
    text = plain(command)
    elsewhere = next((e for e in ELSEWHERE if re.match(e.pattern, text)), None)
    if command.shown and elsewhere is not None:
        return elsewhere
    fitting = [r for r in RUN if (text + " ").startswith(r.begins + " ")]
    return max(fitting, key=lambda r: len(r.begins), default=None) or elsewhere
