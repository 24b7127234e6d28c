"""What a fleet file would start, as a table or as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from controlplane.cli.up.settings import CheckedFleet, CheckedTrainer
from engine_agent.daemon.settings import EngineSettings


def show(plan: CheckedFleet, *, as_json: bool) -> None:
    """On stdout."""
    if as_json:
        engines = [{**_row(e), "devices": _devices(e)} for e in plan.engines]
        trainers = [_trainer(t) | {"beside": list(_beside(plan, t))} for t in plan.trainers]
        top = {"coordinator": plan.coordinator.listen, "run_id": plan.coordinator.run_id}
        print(json.dumps({**top, "engines": engines, "trainers": trainers}, indent=2))
        return
    table = Table(box=None)
    for name in ("engine", "group", "model", "serves", "unit", "devices"):
        table.add_column(name, no_wrap=True)
    table.add_column("weights", overflow="fold")
    for engine in plan.engines:
        cells = _row(engine) | {"serves": "as number 0" if engine.initial == "serve" else "nothing yet"}
        weights = cells.pop("weights")
        table.add_row(*(text or "–" for text in cells.values()), ", ".join(_devices(engine)) or "any", weights)
    console = Console(highlight=False)
    where = f"coordinator at {plan.coordinator.listen}"
    console.print(f"run {plan.coordinator.run_id}: {where}, {len(plan.engines)} engines")
    console.print(table)
    if plan.trainers:
        console.print(_trainers(plan))


def _trainers(plan: CheckedFleet) -> Table:
    table = Table(box=None)
    for name in ("trainer", "model", "ranks", "beside"):
        table.add_column(name, no_wrap=True)
    table.add_column("runs", overflow="fold")
    for trainer in plan.trainers:
        cells = _trainer(trainer)
        runs = cells.pop("runs")
        table.add_row(*cells.values(), ", ".join(_beside(plan, trainer)) or "–", runs)
    return table


def _trainer(trainer: CheckedTrainer) -> dict[str, str]:
    settings = trainer.settings
    row = {"trainer_id": settings.trainer_id, "model": settings.model, "ranks": str(settings.nproc_per_node)}
    return row | {"runs": " ".join(trainer.command)}


def _beside(plan: CheckedFleet, trainer: CheckedTrainer) -> tuple[str, ...]:
    return next(t.beside for t in plan.file.trainers if t.name == trainer.settings.trainer_id)


def _row(engine: EngineSettings) -> dict[str, str]:
    return {
        "engine_id": engine.engine_id,
        "group": engine.group,
        "model": engine.model,
        "serves": engine.initial,
        "unit": engine.unit,
        "weights": str(engine.vllm.model) if engine.vllm else engine.backend,
    }


def _devices(engine: EngineSettings) -> list[str]:
    return [str(d) for d in engine.cpu_devices] or list(engine.vllm.visible_devices if engine.vllm else ())
