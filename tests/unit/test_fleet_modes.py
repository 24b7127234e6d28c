"""Updates by quorum and rolling ones: when they go, what they serve meanwhile, and what they end as."""

from __future__ import annotations

from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Stage
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from tests.support.fleet_core import POLICY, TTL, Fleet


def of_policy(policy: UpdatePolicy, names: tuple[str, ...] = ("e0", "e1", "e2")) -> tuple[Fleet, dict[str, int]]:
    """A fleet with a first version committed."""
    f = Fleet(policy=policy)
    engines = {name: f.engine(name) for name in names}
    f.trainer()
    f.push("u0", engines)
    return f, engines


def test_a_quorum_goes_without_the_one_that_refused_and_commits_without_the_one_that_failed() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=1))
    update = f.begin("u1")
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.READY)
    assert update.phase.value == "preparing", "the third may still get ready"
    f.stage(engines["e2"], "e2", update, Stage.READY)
    assert update.phase.value == "go"
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    f.stage(engines["e2"], "e2", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))
    assert "e0 aborted" in update.cause
    assert "e1 failed" in update.cause


def test_a_quorum_that_cannot_be_reached_any_more_fails_at_once() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=2))
    update = f.begin("u1")
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert update.phase is Phase.FAILED


def test_at_the_deadline_a_quorum_goes_without_the_slow() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=2))
    update = f.begin("u1")
    for name in ("e0", "e1"):
        f.stage(engines[name], name, update, Stage.READY)
    for _ in range(40):
        f.now += TTL - 1
        for name, session in engines.items():
            f.report(session, name)
        f.handle(events.Tick())
    assert update.outcomes[EngineId("e2")].lost
    assert update.phase is Phase.GO


def test_rolling_serves_both_versions_from_the_first_engine_to_the_last() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    old = f.served[0]
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    assert list(f.served) == [old]
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert [*f.served, f.core.model(POLICY).ordinal] == [old, update.version, 2]
    for name in ("e1", "e2"):
        f.stage(engines[name], name, update, Stage.APPLIED)
    assert (update.phase, f.served, f.core.model(POLICY).ordinal) == (Phase.COMMITTED, (update.version,), 2)


def test_a_rolling_update_whose_second_engine_fails_is_not_taken_back() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    f.stage(engines["e2"], "e2", update, Stage.ABORTED)
    assert (update.phase, f.served) == (Phase.DEGRADED, (update.version,))


def test_a_rolling_update_that_nobody_alive_holds_any_more_leaves_the_old_version_served() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING), ("e0", "e1"))
    old = f.served[0]
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e0", incarnation="i2")
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert f.served == (old, update.version)


def test_a_restart_in_the_middle_of_a_rolling_update_knows_that_both_are_served() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    old = f.served[0]
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    again = Fleet(f.ledger, UpdatePolicy(Mode.ROLLING))
    assert again.served == (old, update.version)
    assert again.core.updates[update.update_id].rolled
