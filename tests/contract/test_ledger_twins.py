"""The file and its twin in memory say the same after any records that a coordinator might write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    CheckpointGone,
    CheckpointKept,
    EngineAsked,
    EngineForgotten,
    EngineKept,
    EngineKnown,
    EngineReleased,
    FloorRaised,
    FrozenServed,
    ModelRecord,
    Record,
    Recovered,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, TrainerId, UpdateId, WeightVersion
from controlplane.ledger import Ledger, MemoryLedger, SqliteLedger

RUN = RunId("run")

numbers = st.integers(0, 6)
models = st.sampled_from([ModelName("policy"), ModelName("critic")])
terms = st.integers(1, 5).map(Term)
engine_ids = st.sampled_from([EngineId("e0"), EngineId("e1")])
update_ids = numbers.map(lambda n: UpdateId(f"u{n}"))
digests = st.sampled_from([b"", b"1" * 32, b"2" * 32])
versions = st.integers(1, 6).map(lambda n: WeightVersion(n, Term(n)))  # two terms never share a number
# Only commits are written with a served set, and after one something is served.
served = st.lists(versions, min_size=1, max_size=2, unique_by=lambda v: v.number).map(
    lambda found: tuple(sorted(found))
)
asked = st.builds(EngineAsked, engine_ids, st.just(Incarnation("i")), st.booleans())
engines = st.lists(asked, max_size=2, unique_by=lambda a: a.engine_id).map(tuple)
floors = st.lists(st.tuples(models, terms), max_size=2, unique_by=lambda t: t[0]).map(tuple)


@st.composite
def begun(draw: st.DrawFn) -> UpdateBegan:
    version, restores = draw(versions), draw(st.none() | versions)
    update_id, request_id = UpdateId(f"u{version.number}"), f"r{version.number}"
    return UpdateBegan(
        update_id,
        request_id,
        draw(models),
        version,
        draw(st.none() | numbers),
        draw(engines),
        draw(digests),
        1,
        restores,
    )


records: st.SearchStrategy[Record] = st.one_of(
    st.builds(TermGiven, models, terms, st.just(TrainerId("t")), st.just(Incarnation("i"))),
    st.builds(EngineKnown, engine_ids, models),
    st.builds(EngineForgotten, engine_ids),
    begun(),
    st.builds(UpdateWentGo, update_ids),
    st.builds(UpdateRolled, update_ids, models, served, numbers, digests),
    st.builds(
        UpdateDecided,
        update_ids,
        models,
        st.sampled_from([Phase.COMMITTED, Phase.FAILED]),
        st.just(""),
        served,
        numbers,
        digests,
    ),
    st.builds(FrozenServed, models, digests),
    st.builds(CheckpointKept, models, versions, st.just("c"), digests, digests, numbers, numbers, numbers),
    st.builds(CheckpointGone, models, numbers),
    st.builds(EngineKept, engine_ids, models, versions, digests),
    st.builds(EngineReleased, engine_ids),
    st.builds(FloorRaised, numbers, terms, floors, st.just("ada")),
)
HOUR = 3600.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(records, records, st.just(7 * HOUR), st.none()), max_size=25))
def test_the_twins_recover_the_same(steps: list[Record | float | None]) -> None:
    """A step is a record to save, seconds that go by, or None: a restart."""
    now = 1_800_000_000.0
    with TemporaryDirectory() as directory:
        twins: list[Ledger] = [
            SqliteLedger(Path(directory) / "ledger.sqlite", lambda: now),
            MemoryLedger(lambda: now),
        ]
        assert twins[0].open(RUN) == twins[1].open(RUN)
        for step in [*steps, None]:
            if step is None:
                for twin in twins:
                    twin.close()
                assert found(twins[0]) == found(twins[1])
            elif isinstance(step, float):
                now += step
            else:
                assert taken(twins[0], step) == taken(twins[1], step), step
        twins[0].close()


def found(ledger: Ledger) -> Recovered:
    """A model of which nothing is known is as good as none."""
    recovered = ledger.open(RUN)
    return replace(recovered, models={m: r for m, r in recovered.models.items() if r != ModelRecord()})


def taken(ledger: Ledger, record: Record) -> bool:
    try:
        ledger.save(record)
    except LedgerError:
        return False
    return True
