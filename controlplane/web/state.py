"""A view of the fleet as the page gets it: the messages of `Operator.GetFleet` as JSON, less what it does not show.

Promises that its cost follows what changes: messages of decided updates and of plans are turned into JSON once.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from weightplane.v1 import fleet_pb2, operator_pb2

UPDATES_SHOWN = 12
"""The newest."""
OUTCOMES_SHOWN = 800
"""Of them all together, but for the newest's: a page takes a whole state twice a second."""
_FINAL = (fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED, fleet_pb2.UPDATE_PHASE_FAILED)

Json = dict[str, Any]


class PageState:
    """Makes the page's JSON. Not for two threads at once."""

    def __init__(self) -> None:
        self._updates: dict[str, Json] = {}
        self._plans: dict[str, Json] = {}

    def render(self, view: operator_pb2.FleetView) -> str:
        """One line."""
        slim = operator_pb2.FleetView()
        slim.CopyFrom(view)
        del slim.updates[:], slim.plans[:], slim.checkpoints[:]
        for engine in slim.engines:
            engine.status.ClearField("canary")
            del engine.status.conditions[:]  # the coordinator's own are beside the status, and say more
        shown = _plain(slim)
        shown["updates"] = self._shown_updates(view)
        shown["plans"] = self._shown_plans(view)
        return json.dumps(shown, separators=(",", ":"))

    def _shown_updates(self, view: operator_pb2.FleetView) -> list[Json]:
        known, self._updates = self._updates, {}
        shown: list[Json] = []
        room = OUTCOMES_SHOWN
        for update in view.updates[:UPDATES_SHOWN]:
            room -= len(update.engines)
            if shown and room < 0:
                break
            made = known.get(update.update_id) or _plain(update)
            if update.phase in _FINAL:
                self._updates[update.update_id] = made
            shown.append(made)
        return shown

    def _shown_plans(self, view: operator_pb2.FleetView) -> list[Json]:
        self._plans = {p.update_id: self._plans.get(p.update_id) or _plain(p) for p in view.plans}
        return list(self._plans.values())


def _plain(message: Message) -> Json:
    made: Json = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return made
