"""`make sweep`: every way in which some ranks can split a model: what each rank's source yields must be the checkpoint,
and what engines get from these ranks through each transport too.

    python -m tests.sweep.run [--ranks 4|8] [--only TEXT] [--no-logits] [--no-push] [--hook MODULE:FUNCTION]

Prints a line for each topology. Ends with 1 when anything else than the checkpoint was yielded or received.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.sweep.launch import Facts, make_models, run
from tests.sweep.pushes import PUSHES
from tests.sweep.topology import Topology, every

LOGIT_TOLERANCE = 1e-5
HEADER = f"{'topology':<52} {'tensors':>7} {'build s':>8} {'export s':>8} {'pushes s':>8} {'logits':>9}  outcome"


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8))
    arguments.add_argument("--only", default="", help="topologies whose name contains this")
    arguments.add_argument("--no-logits", action="store_true", help="do not compare with transformers' logits")
    arguments.add_argument("--no-push", action="store_true", help="do not push through the transports")
    arguments.add_argument("--hook", default="", help="module:function that is given each source and its topology")
    given = arguments.parse_args()
    topologies = [t for t in every(given.ranks) if given.only in t.name]
    if not topologies:
        print(f"no topology of {given.ranks} ranks has {given.only!r} in its name", file=sys.stderr)
        return 2
    print(f"{len(topologies)} topologies on {given.ranks} ranks\n{HEADER}")
    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="weightplane-sweep-") as scratch:
        directory = Path(scratch)
        make_models(directory / "models", topologies)
        how: dict[str, Any] = {"logits": not given.no_logits, "push": not given.no_push, "hook": given.hook}
        for topology, facts in run(topologies, directory, **how):
            problem = problem_of(facts)
            failed += problem is not None
            print(line(topology, facts, problem), flush=True)
    print(f"{len(topologies) - failed} passed, {failed} failed, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def problem_of(facts: Facts) -> str | None:
    """What is wrong with a topology, in one line; None if nothing is."""
    for rank, fact in enumerate(facts):
        if fact["failure"]:
            return f"rank {rank}: {_last_line(fact['failure'])}"
        if fact["wrong"] or fact["missing"] or not fact["metadata_agrees"]:
            return f"rank {rank}: wrong {fact['wrong'][:3]}, missing {fact['missing'][:3]}"
    if problem := _push_problem(facts):
        return problem
    error = worst_logit(facts)
    if error is not None and not error <= LOGIT_TOLERANCE:
        return f"logits differ from transformers' by {error:.1e}"
    return None


def _push_problem(facts: Facts) -> str | None:
    for rank, fact in enumerate(facts):
        for transport, told in fact.get("hook", {}).get("pushed", {}).items():
            if told["status"] != ["COMMITTED"] * PUSHES:
                return f"rank {rank}: {transport}: {told['status']}"
            if other := sorted(set(told["ways"].values()) - {transport}):
                return f"rank {rank}: {transport}: the plan took {', '.join(other)}"
    for engine, pushes in facts[0].get("hook", {}).get("received", {}).items():
        if len(pushes) != PUSHES:
            return f"{engine} got {len(pushes)} pushes of {PUSHES}"
        for number, got in enumerate(pushes, 1):
            if got["wrong"] or got["missing"]:
                return f"{engine}, push {number}: wrong {got['wrong'][:3]}, missing {got['missing'][:3]}"
    return None


def worst_logit(facts: Facts) -> float | None:
    errors = [fact["logit_error"] for fact in facts if fact.get("logit_error") is not None]
    return next((e for e in errors if math.isnan(e)), max(errors)) if errors else None


def line(topology: Topology, facts: Facts, problem: str | None) -> str:
    logits = "-" if (error := worst_logit(facts)) is None else f"{error:.1e}"
    refused = next((_last_line(f["logit_failure"]) for f in facts if f.get("logit_failure")), "")
    note = f"; Megatron cannot run it here: {refused}" if refused else ""
    outcome = problem or f"bit for bit on all ranks{_engines(facts)}{note}"
    build, export = (max(f.get(key, 0.0) for f in facts) for key in ("build_seconds", "export_seconds"))
    pushed = sum(told["seconds"] for told in facts[0].get("hook", {}).get("pushed", {}).values())
    names: Any = facts[0].get("names", "-")
    return f"{topology.name:<52} {names:>7} {build:>8.2f} {export:>8.2f} {pushed:>8.2f} {logits:>9}  {outcome}"


def _engines(facts: Facts) -> str:
    """By transport: the sizes of the slots whose engines got it."""
    sizes: dict[str, list[str]] = {}
    for engine in facts[0].get("hook", {}).get("received", {}):
        transport, _, size = engine.rpartition("-slot")
        sizes.setdefault(transport, []).append(size)
    return "".join(f"; {t} to {','.join(sorted(s, key=int))}" for t, s in sorted(sizes.items()))


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:160]


if __name__ == "__main__":
    sys.exit(main())
