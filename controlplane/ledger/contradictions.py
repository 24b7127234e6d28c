"""What cannot be true of a ledger's rows, if only coordinators wrote them.

A fact that was never written (an empty digest, an update without outcomes, the numbers that a floor gave up)
contradicts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from controlplane.core.engine_state import Stage
from controlplane.core.update_transaction import Phase

Row = dict[str, Any]
_SERVED_PHASES = (Phase.COMMITTED.value, Phase.DEGRADED.value)
_OPEN_PHASES = (Phase.PREPARING.value, Phase.GO.value)


class Rows:
    """A dump, by what the rules ask for."""

    def __init__(self, tables: dict[str, list[Row]]) -> None:
        self.tables = tables
        self.updates: dict[int, Row] = {u["number"]: u for u in tables["updates"]}
        self.outcomes: dict[str, list[Row]] = {}
        for row in tables["update_engines"]:
            if row["lost"] is not None:
                self.outcomes.setdefault(row["update_id"], []).append(row)
        self.coordinator_term = next(int(m["value"]) for m in tables["meta"] if m["key"] == "coordinator_term")
        self.leased: dict[str, int] = {lease["model"]: lease["term"] for lease in tables["leases"]}
        self.floor_terms: dict[str, int] = {}
        for floor in tables["floor_terms"]:
            self.floor_terms[floor["model"]] = max(floor["term"], self.floor_terms.get(floor["model"], 0))

    def term(self, model: str) -> int:
        """The highest that was given, or given up."""
        return max(self.leased.get(model, 0), self.floor_terms.get(model, 0))

    def may_be_committed(self, number: int) -> bool:
        """Number 0 needs no update; and a copy that was accepted does not know what the lost one committed."""
        if number == 0 or any(f["known_number"] < number <= f["number"] for f in self.tables["floors"]):
            return True
        update = self.updates.get(number)
        return update is not None and _committed(update)

    def digest(self, number: int) -> str:
        """Of the contents, where it is known."""
        return str(self.updates[number]["content_digest"]) if number in self.updates else ""


def contradictions(tables: dict[str, list[Row]]) -> list[str]:
    """Each in a sentence; empty if all can be true. `tables` is what `inspect.dump` gives."""
    rows = Rows(tables)
    return [sentence for rule in _RULES for sentence in rule(rows)]


def _committed(update: Row) -> bool:
    return update["phase"] in _SERVED_PHASES or bool(update["rolled"])


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)


def _served(rows: Rows) -> Iterator[str]:
    for served in rows.tables["served"]:
        model, number = served["model"], served["number"]
        if not rows.may_be_committed(number):
            yield f"{model}: number {number} is served, but no update committed it"
        if _differ(served["content_digest"], rows.digest(number)):
            yield f"{model}: number {number} is served with other contents than its update's"


def _frozen(rows: Rows) -> Iterator[str]:
    """A model is trained, or served as it was loaded: never both."""
    frozen = {served["model"] for served in rows.tables["served"] if served["number"] == 0}
    trained = rows.leased.keys() | {u["model"] for u in rows.updates.values()}
    for model in sorted(frozen & trained):
        yield f"{model}: it is served as it was loaded, though it has a trainer"


def _ordinals(rows: Rows) -> Iterator[str]:
    commits = Counter(u["model"] for u in rows.updates.values() if _committed(u))
    for model in rows.tables["models"]:
        if model["ordinal"] < commits[model["model"]]:
            yield f"{model['model']}: ordinal {model['ordinal']} after {commits[model['model']]} commits"


def _terms(rows: Rows) -> Iterator[str]:
    for update in rows.updates.values():
        if update["term"] > rows.term(update["model"]):
            yield f"update {update['update_id']}: its term {update['term']} was never given"


def _one_open_update(rows: Rows) -> Iterator[str]:
    still_open = Counter(u["model"] for u in rows.updates.values() if u["phase"] in _OPEN_PHASES)
    for model, count in still_open.items():
        if count > 1:
            yield f"{model}: {count} updates are open at once"


def _decisions(rows: Rows) -> Iterator[str]:
    """INV-9: a commit rests on an engine that applied; what is served already is never aborted."""
    for update in rows.updates.values():
        name, outcomes = f"update {update['update_id']}", rows.outcomes.get(update["update_id"], [])
        applied = any(o["stage"] == Stage.APPLIED.value and not o["lost"] for o in outcomes)
        rolled = bool(update["rolled"])
        needs_one = update["phase"] == Phase.COMMITTED.value or (update["phase"] == Phase.DEGRADED.value and not rolled)
        if needs_one and outcomes and not applied:
            yield f"{name}: it is {update['phase']}, but none of its {len(outcomes)} engines applied it"
        if update["phase"] == Phase.FAILED.value and rolled:
            yield f"{name}: it failed, but the fleet served it already"
        if outcomes and update["phase"] in _OPEN_PHASES:
            yield f"{name}: it has outcomes, but no decision"


def _one_content(rows: Rows) -> Iterator[str]:
    """INV-6: one version is one content."""
    for update in rows.updates.values():
        for o in rows.outcomes.get(update["update_id"], []):
            if o["stage"] == Stage.APPLIED.value and _differ(o["content_digest"], update["content_digest"]):
                yield f"update {update['update_id']}: {o['engine_id']} applied other contents than the update's"


def _restores(rows: Rows) -> Iterator[str]:
    for update in rows.updates.values():
        restored = update["restores_number"]
        if restored is None:
            continue
        name = f"update {update['update_id']}"
        if restored >= update["number"]:
            yield f"{name}: number {update['number']} restores {restored}, which came later"
        elif not rows.may_be_committed(restored):
            yield f"{name}: it restores number {restored}, but no update committed it"
        elif _committed(update) and _differ(update["content_digest"], rows.digest(restored)):
            yield f"{name}: its contents are not those of number {restored}, which it restores"


def _layouts(rows: Rows) -> Iterator[str]:
    known = {layout["digest"] for layout in rows.tables["layouts"]}
    for update in rows.updates.values():
        if update["layout_digest"] and update["layout_digest"] not in known:
            yield f"update {update['update_id']}: its layout was never seen"


def _checkpoints(rows: Rows) -> Iterator[str]:
    for kept in rows.tables["checkpoints"]:
        name, update = f"checkpoint {kept['name']} of {kept['model']}", rows.updates.get(kept["number"])
        if not rows.may_be_committed(kept["number"]):
            yield f"{name}: no update committed number {kept['number']}"
        if update is None:
            continue
        if (update["model"], update["term"]) != (kept["model"], kept["term"]):
            yield f"{name}: number {kept['number']} is version {update['term']}.{kept['number']} of {update['model']}"
        if _differ(kept["content_digest"], update["content_digest"]):
            yield f"{name}: its contents are not those of number {kept['number']}"
        if _differ(kept["layout_digest"], update["layout_digest"]):
            yield f"{name}: its layout is not that of number {kept['number']}"


def _kept_engines(rows: Rows) -> Iterator[str]:
    for kept in rows.tables["kept_engines"]:
        if not rows.may_be_committed(kept["number"]):
            yield f"{kept['engine_id']}: it stays at number {kept['number']}, but no update committed it"
        elif _differ(kept["content_digest"], rows.digest(kept["number"])):
            yield f"{kept['engine_id']}: it stays at number {kept['number']} with other contents than its update's"


def _floors(rows: Rows) -> Iterator[str]:
    for floor in rows.tables["floors"]:
        if floor["coordinator_term"] > rows.coordinator_term:
            yield f"coordinator term {rows.coordinator_term} is below the accepted floor {floor['coordinator_term']}"
        terms = {t["model"]: t["term"] for t in rows.tables["floor_terms"] if t["floor_id"] == floor["id"]}
        for number, update in rows.updates.items():
            if number <= floor["known_number"]:
                continue
            if number <= floor["number"]:
                yield f"number {number} was given, though it is not above the accepted floor {floor['number']}"
            if update["term"] < terms.get(update["model"], 0):
                yield f"update {update['update_id']}: its term {update['term']} is below the accepted floor"


_RULES: tuple[Callable[[Rows], Iterator[str]], ...] = (
    _served,
    _frozen,
    _ordinals,
    _terms,
    _one_open_update,
    _decisions,
    _one_content,
    _restores,
    _layouts,
    _checkpoints,
    _kept_engines,
    _floors,
)
