"""How plans are made: slots, senders, transports, links.

Slots come from device UUIDs: the ranks whose devices are one engine's devices, the lowest of them leading (G1). All of
an engine's devices held by ranks: colocated. None: some rank is chosen to send. Some but not all: the engine is
a misfit and is refused at its hello, so no plan ever meets one.

Promises: the same engines and ranks give the same plan, whatever order they came in; every engine is in it once; a way
that is known not to work is not taken while another is left, and the reason says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heapreplace

from controlplane.core.engine_state import Held
from controlplane.core.errors import EngineMisfit
from controlplane.core.names import natural_key
from controlplane.core.plan import (
    CAN_BE_DELTAS,
    HOST_MEMORY,
    IN_PIECES,
    PART_TRANSPORTS,
    Apply,
    Assignment,
    EnginePlace,
    LinkFate,
    Plan,
    RankPlace,
    Transport,
)
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank

Way = tuple[EngineId, Incarnation, Transport]
"""To one life of an engine, by one transport."""

_NAMELESS = (DeviceUuid(""),)


@dataclass(frozen=True, slots=True)
class Ways:
    """How bytes may go, beside what each engine says of itself."""

    sends: frozenset[Transport] = HOST_MEMORY
    """How the trainer's ranks can send."""
    forced: Transport | None = None
    """Before all others where it is possible; where it is not, the choice is as without it."""
    fate: LinkFate = LinkFate.SHARED
    avoid: Mapping[Way, str] = field(default_factory=dict)
    """What failed before, with the cause."""
    base: Held | None = None
    """The version whose bytes the trainer still has."""
    holders: frozenset[EngineId] = frozenset()
    """Engines that hold it now, by their own report, and take deltas."""
    waiting: EngineId | None = None
    """An engine of this plan that takes whole versions. Ranks that send by device memory keep two chunks, and stand
    still until engines take the first, after go; go waits for this one's last chunk, which all ranks make together."""


def misfit(engine: EnginePlace, held: AbstractSet[DeviceUuid]) -> EngineMisfit | None:
    """Why an engine cannot be fed by the ranks that hold these devices: they hold some of its own, but not all (G4)."""
    missing = sorted((d for d in engine.device_uuids if d not in held), key=natural_key)
    if not missing or len(missing) == len(engine.device_uuids):
        return None
    return EngineMisfit(
        engine_id=engine.engine_id,
        held=len(engine.device_uuids) - len(missing),
        total=len(engine.device_uuids),
        missing=[str(d) for d in missing],
    )


def check_fit(engine: EnginePlace, ranks: Iterable[RankPlace]) -> None:
    """Raises EngineMisfit."""
    error = misfit(engine, devices_of(ranks))
    if error is not None:
        raise error


def devices_of(ranks: Iterable[RankPlace]) -> frozenset[DeviceUuid]:
    return frozenset(r.device_uuid for r in ranks)


def make_plan(
    revision: int,
    engines: Sequence[EnginePlace],
    required: frozenset[EngineId],
    ranks: Sequence[RankPlace],
    ways: Ways | None = None,
) -> Plan:
    """One assignment for each engine, in the order of engine ids. Raises EngineMisfit."""
    ways = ways or Ways()
    held = devices_of(ranks)
    for error in filter(None, (misfit(engine, held) for engine in engines)):
        raise error
    ordered = sorted(engines, key=lambda p: natural_key(p.engine_id))
    made = _assignments(ordered, required, ranks, ways)
    staged = next((a.engine.engine_id for a in made if not _can_stream(a)), None)
    if staged is not None and any(a.transport is Transport.CUDA_IPC for a in made):
        made = _assignments(ordered, required, ranks, replace(ways, waiting=staged))
    linked = [_linked(a, ways.fate) for a in _with_applies(made)]
    return Plan(revision, tuple(_with_bases(linked, ways)))


def _assignments(
    ordered: Sequence[EnginePlace], required: frozenset[EngineId], ranks: Sequence[RankPlace], ways: Ways
) -> list[Assignment]:
    """Each engine by itself: its senders, and the first way that is possible."""
    made = []
    for engine, senders, colocated in _with_senders(ordered, ranks):
        transport, reason = _transport(engine, senders, ways, colocated=colocated)
        made.append(
            Assignment(
                engine=engine,
                ranks=tuple(r.rank for r in senders),
                device_uuids=tuple(r.device_uuid for r in senders) if colocated else _NAMELESS,
                transport=transport,
                required=engine.engine_id in required,
                reason=reason,
            )
        )
    return made


def checkpoint_plan(revision: int, engines: Sequence[EnginePlace], required: frozenset[EngineId]) -> Plan:
    """Every engine reads the same directory."""
    return Plan(
        revision,
        tuple(
            Assignment(
                engine=engine,
                ranks=(),
                device_uuids=(),
                transport=Transport.CHECKPOINT,
                required=engine.engine_id in required,
                reason="a checkpoint is brought back",
            )
            for engine in sorted(engines, key=lambda p: natural_key(p.engine_id))
        ),
    )


# ---- who sends ----------------------------------------------------------------------------------


def _with_senders(
    engines: Sequence[EnginePlace], ranks: Sequence[RankPlace]
) -> Iterator[tuple[EnginePlace, Sequence[RankPlace], bool]]:
    """Each engine, its senders, and whether it is colocated. Slots first: they leave no choice, and count as load."""
    by_device = _by_device(ranks)
    slots = {e.engine_id: _slot(e, by_device) for e in engines}
    dealer = _Dealer(ranks, Counter(slot[0].rank for slot in slots.values() if slot))
    for engine in engines:
        slot = slots[engine.engine_id]
        yield engine, slot or [dealer.deal(engine)], bool(slot)


def _by_device(ranks: Sequence[RankPlace]) -> dict[DeviceUuid, RankPlace]:
    """The lowest rank of each device: one buffer is enough for the worker on it."""
    return {r.device_uuid: r for r in sorted(ranks, key=lambda r: -r.rank)}


def _slot(engine: EnginePlace, by_device: Mapping[DeviceUuid, RankPlace]) -> list[RankPlace]:
    found = (by_device[d] for d in engine.device_uuids if d in by_device)
    return sorted(found, key=lambda r: r.rank)


class _Dealer:
    """Chooses who feeds an engine on devices of its own: a rank of its host before others, then the least loaded, then
    the lowest. Fleets have thousands of both, so nobody looks at all ranks for each engine."""

    def __init__(self, ranks: Sequence[RankPlace], load: Counter[Rank]) -> None:
        self._places = {r.rank: r for r in ranks}
        self._load = load
        self._everywhere = self._heap(ranks)
        on_host: dict[str, list[RankPlace]] = {}
        for place in ranks:
            on_host.setdefault(place.host_id, []).append(place)
        self._on_host = {host: self._heap(places) for host, places in on_host.items()}

    def deal(self, engine: EnginePlace) -> RankPlace:
        heap = self._on_host.get(engine.host_id, self._everywhere)
        while heap[0][0] < self._load[heap[0][1]]:  # it was chosen meanwhile for an engine of the other kind
            heapreplace(heap, (self._load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self._load[rank] += 1
        return self._places[rank]

    def _heap(self, ranks: Iterable[RankPlace]) -> list[tuple[int, Rank]]:
        return sorted((self._load[r.rank], r.rank) for r in ranks)


# ---- by which transport -------------------------------------------------------------------------


def _transport(
    engine: EnginePlace, senders: Sequence[RankPlace], ways: Ways, *, colocated: bool
) -> tuple[Transport, str]:
    """The first that is possible, and why not those before it."""
    near = all(r.host_id == engine.host_id for r in senders)
    said = ["devices shared with the slot's ranks" if colocated else "devices of its own"]
    said.append("same host" if near else "another host")
    if near:
        wanted = [Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.INLINE]
    else:
        wanted = [Transport.BROADCAST, Transport.INLINE]
    if ways.forced is not None:
        wanted = [ways.forced, *(t for t in wanted if t is not ways.forced)]
    for transport in wanted:
        asked = ", which was asked for" if transport is ways.forced else ""
        why_not = _why_not(transport, engine, ways, near=near, colocated=colocated)
        if not why_not:
            return transport, "; ".join([*said, f"{transport.value} was asked for"] if asked else said)
        if asked or _worth_saying(transport, engine, ways):
            said.append(f"not {transport.value}{asked}: {why_not}")
    return Transport.INLINE, "; ".join([*said, "inline again, since nothing else is left"])


def _why_not(transport: Transport, engine: EnginePlace, ways: Ways, *, near: bool, colocated: bool) -> str:
    """Empty: it is possible."""
    cause = ways.avoid.get((engine.engine_id, engine.incarnation, transport))
    if cause is not None:
        return f"it failed before: {' '.join(cause.split()) or 'no cause given'}"
    if transport is Transport.INLINE:
        return ""
    if transport is Transport.SHARED_MEMORY and not near:
        return "another host"
    if transport is Transport.CUDA_IPC and not (near and colocated):
        return "other devices"
    if transport not in engine.transports:
        return "the engine does not receive it"
    if transport not in ways.sends:
        return "the trainer does not send it"
    return _why_not_as_it_comes(engine, ways) if transport is Transport.CUDA_IPC else ""


def _why_not_as_it_comes(engine: EnginePlace, ways: Ways) -> str:
    """Device memory is installed as it comes, or not at all."""
    if not engine.streaming:
        return "the engine takes whole versions, and it is installed as it comes"
    return "" if ways.waiting is None else f"{ways.waiting}, fed by the same ranks, takes whole versions"


def _worth_saying(transport: Transport, engine: EnginePlace, ways: Ways) -> bool:
    """On hosts without GPUs nobody has cuda_ipc, and nobody asks why not."""
    return transport is not Transport.CUDA_IPC or transport in engine.transports | ways.sends


def _with_applies(assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Nobody asks why an engine is not streamed to that does not ask for it.

    A leader that sends in pieces, and keeps nothing whole for somebody else, keeps two chunks, and goes on when all
    whom it feeds so have had them. Streaming engines take the first one after go, and go waits until staged ones have
    the last, which all ranks make together: beside a staged engine, whoever feeds it, such a leader streams to nobody.
    """
    staged = next((a.engine.engine_id for a in assignments if not _can_stream(a)), None)
    keep_whole = {r for a in assignments if a.transport is Transport.SHARED_MEMORY for r in a.ranks}
    for a in assignments:
        if not a.engine.streaming:
            yield a
        elif not _can_stream(a):
            yield _why_staged(a, f"{a.transport.value} brings whole versions")
        elif staged is not None and a.transport in IN_PIECES and a.leader not in keep_whole:
            yield _why_staged(a, f"rank {a.leader} sends in pieces, and {staged} of the same plan takes whole versions")
        else:
            reason = f"{a.reason}; streaming, as the engine asks: installed as it comes"
            yield replace(a, apply=Apply.STREAMING, reason=reason)


def _can_stream(a: Assignment) -> bool:
    return a.engine.streaming and a.transport in PART_TRANSPORTS


def _why_staged(a: Assignment, why: str) -> Assignment:
    return replace(a, reason=f"{a.reason}; not streaming, which the engine asks for: {why}")


# ---- links and bases ----------------------------------------------------------------------------


def _linked(a: Assignment, fate: LinkFate) -> Assignment:
    if a.transport is not Transport.BROADCAST:
        return a
    whose = "shared" if fate is LinkFate.SHARED else a.engine.engine_id
    return replace(a, link=f"{a.leader}/{whose}", fate=fate)


def _with_bases(assignments: Sequence[Assignment], ways: Ways) -> Iterator[Assignment]:
    """What goes over one link is one thing for all: a delta only if every engine of the link holds the base (INV-5)."""
    whole = {a.link for a in assignments if a.link and not _holds_base(a, ways)}
    for a in assignments:
        yield replace(a, base=ways.base) if _holds_base(a, ways) and a.link not in whole else a


def _holds_base(a: Assignment, ways: Ways) -> bool:
    return (
        a.apply is Apply.STAGED
        and a.transport in CAN_BE_DELTAS
        and len(a.ranks) == 1
        and a.engine.engine_id in ways.holders
    )
