"""The push of bench/push.py beside what one would use without a control plane: Ray, and vLLM's own HTTP endpoints.

Each has a real vLLM engine of its own, all on this machine; in each round all of them push the same weights, in turn.
Over Ray: `put` into the object store, and a call of the actor that owns the engine, which loads layer by layer, packs
the tied head and resets the prefix cache. Over HTTP: a copy into shared memory, then pause, start, update, finish with
the label and resume, by vLLM's stock client and the same transfer engine. Neither sums or compares a byte, nor asks the
new weights to speak: the ratio is to a push without its canary, whose checksums are in it; the note says what the
canary adds.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path

from bench.harness import Row, Timed, interleave
from bench.push import Pushes
from bench.real.fleet import RUN, quiet, real_fleet
from bench.real.http_server import http_pushes
from bench.real.ray_engine import ray_pushes
from bench.real.skipped import not_quick
from bench.real.weights import Turning, model_directory, two_versions
from trainer_agent.rank import TrainerRank

DEADLINE_SECONDS = 420
ROUNDS = 9
LOG = Path("build/bench/http-server.log")


def measure(quick: bool) -> list[Row]:
    if quick:
        return not_quick("Ray, vLLM's HTTP endpoints", engines=3)
    quiet()
    model, rounds = model_directory(), ROUNDS
    versions = two_versions(model)
    weights, by_http, by_ray = Turning(versions), Turning(versions), Turning(versions)
    with ExitStack() as stack:
        fleet = stack.enter_context(real_fleet(model))
        rank = stack.enter_context(TrainerRank.join(fleet.address, source=weights.source(), run_id=RUN))
        pushes = Pushes(rank, fleet, weights)
        http = stack.enter_context(http_pushes(model, by_http.source(), LOG.absolute()))
        over_ray = stack.enter_context(ray_pushes(model))
        contenders = {
            "push": pushes.push,
            "http": lambda: http.push(by_http.turn()),
            "ray": lambda: over_ray.push(by_ray.turn()),
        }
        samples = interleave(contenders, rounds=rounds, warm_up=2)
        http.check()
    ours, canary = pushes.without_canary()[-rounds:], statistics.median(pushes.parts["canary"][-rounds:])
    return [
        _row("Ray", "object store and actor call", ours, samples["ray"], 1.2, canary),
        _row("vLLM's HTTP endpoints", "its stock client, all phases", ours, samples["http"], 1.0, canary),
    ]


def _row(name: str, what: str, ours: list[float], other: list[float], goal: float, canary: float) -> Row:
    what = f"weights in the trainer's memory to an engine that takes requests, without the canary; other: {what}"
    return Timed(name, what, ours, other, f"ours has checksums; its canary adds {canary * 1000:.0f} ms").quicker(goal)
