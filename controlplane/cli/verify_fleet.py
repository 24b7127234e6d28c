"""Whether engines hold what the fleet serves: each agent's own answer, compared with the coordinator's record. Pure.

The coordinator's idea of an engine is what it last reported (INV-8); here the agent is asked itself, so that the two
and what is served are three words about one thing. Content is compared by digest: with what the version is known to be,
and among the engines that say they hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from controlplane.cli.fleet_table import version_text
from controlplane.cli.tables import add_row, new_table
from weightplane.v1 import engine_pb2, operator_pb2, version_pb2

Said = engine_pb2.EngineStatus | str
"""An agent's answer, or why there is none."""
DIGEST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one engine."""

    engine_id: str
    holds: str
    """The version that its agent says; unset; or unknown."""
    wanted: str
    """What it should hold: what the fleet serves, or the version that it is kept at."""
    digest: str
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


def compare(view: operator_pb2.FleetView, said: Mapping[str, Said]) -> list[Finding]:
    """One finding for each engine that the coordinator knows."""
    known = known_digests(view)
    heard = [s for s in said.values() if isinstance(s, engine_pb2.EngineStatus) and s.HasField("applied")]
    for status in heard:  # what nobody else knows the engines must at least agree on
        known.setdefault((status.model, version_text(status.applied)), status.content_digest)
    return [_finding(view, engine, said[engine.status.engine.engine_id], known) for engine in view.engines]


def known_digests(view: operator_pb2.FleetView) -> dict[tuple[str, str], bytes]:
    """By model and version: what its bytes are, from decided updates and from checkpoints."""
    updates = {(u.model, version_text(u.version)): u.content_digest for u in view.updates if u.content_digest}
    return {(c.model, version_text(c.version)): c.content_digest for c in view.checkpoints} | updates


def _finding(
    view: operator_pb2.FleetView, engine: operator_pb2.EngineView, said: Said, known: Mapping[tuple[str, str], bytes]
) -> Finding:
    name, wanted = engine.status.engine.engine_id, _wanted(view, engine)
    words = " or ".join(map(version_text, wanted)) or "nothing yet"
    if isinstance(said, str):
        return Finding(name, "unknown", words, "", (said,))
    holds = version_text(said.applied) if said.HasField("applied") else "unset"
    problems = tuple(_problems(engine, said, wanted, known))
    return Finding(name, holds, words, said.content_digest.hex(), problems)


def _wanted(view: operator_pb2.FleetView, engine: operator_pb2.EngineView) -> list[version_pb2.WeightVersion]:
    if engine.HasField("kept"):
        return [engine.kept]
    return [v for m in view.state.models if m.model == engine.status.model for v in m.served]


def _problems(
    engine: operator_pb2.EngineView,
    said: engine_pb2.EngineStatus,
    wanted: list[version_pb2.WeightVersion],
    known: Mapping[tuple[str, str], bytes],
) -> Iterator[str]:
    if said.engine.incarnation != engine.status.engine.incarnation:
        yield "it lives another life than the coordinator knows of"
    if said.weights == engine_pb2.WEIGHTS_STATE_POISONED:
        yield f"poisoned: {said.poison_cause}"
    elif not said.HasField("applied"):
        yield "it holds no version"
    elif said.applied not in wanted:
        yield "the fleet does not serve that"
    elif engine.known and engine.status.applied != said.applied:
        yield f"the coordinator was told {version_text(engine.status.applied)}"
    if said.HasField("applied"):
        expected = known[said.model, version_text(said.applied)]
        if expected != said.content_digest:
            yield f"its content is not that version's, which is {expected.hex()[:DIGEST_SHOWN]}"
    if not engine.known:
        yield "the coordinator does not hear it"


def render_findings(findings: list[Finding]) -> RenderableType:
    """The whole of `weightplane verify`."""
    if not findings:
        return Text("no engine is known")
    table = new_table("ENGINE", "HOLDS", "SHOULD HOLD", "CONTENT", "FOUND")
    for f in findings:
        found = Text("; ".join(f.problems) or "equal", style="green" if f.good else "bold red")
        add_row(table, f.engine_id, f.holds, f.wanted, f.digest[:DIGEST_SHOWN], found)
    wrong = sum(not f.good for f in findings)
    verdict = f"{wrong} of {len(findings)} engines differ" if wrong else f"{len(findings)} engines: all equal"
    return Group(table, Text(), Text(verdict, style="bold red" if wrong else "green"))


def findings_json(view: operator_pb2.FleetView, findings: list[Finding]) -> dict[str, Any]:
    """Keys are only ever added."""
    return {
        "run_id": view.run_id,
        "equal": bool(findings) and all(f.good for f in findings),
        "engines": [
            {
                "engine": f.engine_id,
                "holds": f.holds,
                "should_hold": f.wanted,
                "content_digest": f.digest,
                "equal": f.good,
                "problems": list(f.problems),
            }
            for f in findings
        ],
    }
