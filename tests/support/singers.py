"""Engines of one likeness whose canaries say what a test tells them to."""

from __future__ import annotations

import math
from dataclasses import replace

from controlplane.core.canary import Canary
from controlplane.core.engine_state import Held, Progress, Stage
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import EngineId
from tests.support.fleet_core import Fleet

ANSWERS = {"right": (-1.0, -2.0), "near": (-1.02, -2.0), "wrong": (-1.0, -2.5), "none": (-1.0, math.nan)}


class Singers(Fleet):
    """Engines of one likeness, which say what they are told to."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.by_name = {f"e{i}": self.engine(f"e{i}") for i in range(count)}
        for record in self.core.engines.values():
            record.place = replace(record.place, likeness="alike")
        self.trainer()

    def go(self, update_id: str) -> UpdateTransaction:
        update = self.begin(update_id)
        for name, session in self.by_name.items():
            self.stage(session, name, update, Stage.READY)
        return update

    def say(self, name: str, update: UpdateTransaction, answer: str) -> None:
        if self.states[name].progress is not None and update.outcomes[EngineId(name)].ended:
            return
        progress = Progress(update.update_id, update.version, Stage.APPLIED)
        held, canary = Held(update.version, b"d"), Canary(ANSWERS[answer])
        self.report(self.by_name[name], name, progress=progress, weights=held, canary=canary)
