"""How long the coordinator's event loop stands still for a plan: 10,000 engines, 20,000 ranks.

Plain calls of the planner, in this process: from the places of engines and ranks to the plan and its digest. Three
fleets: engines of two devices each, which two ranks hold; engines on other hosts that the ranks reach over broadcast
links; and the same as deltas. `linear` in the note: a tenth of the fleet takes so much of a tenth of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.harness import Row, interleave, spread
from controlplane.core.engine_state import Held
from controlplane.core.plan import EnginePlace, Plan, RankPlace, Transport
from controlplane.core.planner import Ways, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, WeightVersion

ENGINES = 10_000
RANKS_OF_AN_ENGINE = 2
GOAL_SECONDS = 1.0
QUICK_DEADLINE_SECONDS = 60
DEVICES_OF_A_HOST = 8
SENDS = frozenset({Transport.SHARED_MEMORY, Transport.INLINE, Transport.BROADCAST})


def measure(quick: bool) -> list[Row]:
    fleets: dict[str, Callable[[int], Callable[[], None]]] = {
        "colocated": lambda n: _planned(n, colocated=True, ways=Ways()),
        "broadcast": lambda n: _planned(n, colocated=False, ways=Ways(sends=SENDS, forced=Transport.BROADCAST)),
        "deltas": lambda n: _planned(n, colocated=False, ways=_deltas(n)),
    }
    contenders = {name: make(ENGINES) for name, make in fleets.items()}
    small = {f"{name} small": make(ENGINES // 10) for name, make in fleets.items()}
    samples = interleave(contenders | small, rounds=3 if quick else 15)
    return [_row(name, samples[name], samples[f"{name} small"]) for name in fleets]


def _row(name: str, taken: list[float], small: list[float]) -> Row:
    found, linear = spread(taken), spread(taken).median / spread(small).median / 10
    return Row(
        name=f"{name}, {ENGINES:,} engines, {ENGINES * RANKS_OF_AN_ENGINE:,} ranks",
        what="plan and digest, from places in memory",
        ours=found.median,
        other=None,
        unit="s",
        ratio=None,
        goal=f"<= {GOAL_SECONDS:g} s",
        met=found.median <= GOAL_SECONDS,
        note=f"worst {found.worst:.2f} s; {linear:.2f} x linear from a tenth of the fleet",
        samples={"ours": taken},
    )


def _planned(engines: int, *, colocated: bool, ways: Ways) -> Callable[[], None]:
    places = [_engine(i, colocated) for i in range(engines)]
    ranks = [_rank(i) for i in range(engines * RANKS_OF_AN_ENGINE)]
    random.Random(0).shuffle(places)
    required = frozenset(place.engine_id for place in places)

    def plan() -> None:
        made: Plan = make_plan(1, places, required, ranks, ways)
        assert len(made.assignments) == engines
        assert len(made.digest) == 32

    return plan


def _engine(i: int, colocated: bool) -> EnginePlace:
    first = i * RANKS_OF_AN_ENGINE
    owner = "gpu" if colocated else "other"
    return EnginePlace(
        engine_id=EngineId(f"engine-{i}"),
        incarnation=Incarnation(f"life-{i}"),
        endpoint=f"host-{i}:7071",
        host_id=f"{'host' if colocated else 'engine-host'}-{first // DEVICES_OF_A_HOST}",
        device_uuids=tuple(DeviceUuid(f"{owner}-{first + d}") for d in range(RANKS_OF_AN_ENGINE)),
        transports=SENDS,
    )


def _rank(i: int) -> RankPlace:
    return RankPlace(Rank(i), f"host-{i // DEVICES_OF_A_HOST}", DeviceUuid(f"gpu-{i}"))


def _deltas(engines: int) -> Ways:
    """Three of four engines hold the base."""
    base = Held(WeightVersion(1, Term(7)), b"digest" * 5 + b"00")
    holders = frozenset(EngineId(f"engine-{i}") for i in range(engines) if i % 4)
    return Ways(sends=SENDS, forced=Transport.BROADCAST, base=base, holders=holders)
