"""A fleet as the coordinator tells of it, with one of everything to be seen; and how a terminal shows it."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType

from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2

NOW = 1_000_000.0


def version(term: int, number: int) -> version_pb2.WeightVersion:
    return version_pb2.WeightVersion(term=term, number=number)


def at(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(NOW + seconds))


def engine(name: str, word: str, *, known: bool = True, seen: float = -1, **fields: object) -> operator_pb2.EngineView:
    status = engine_pb2.EngineStatus(
        engine=version_pb2.EngineRef(engine_id=name, incarnation=f"{name}-1"),
        model="policy",
        word=word,
        **fields,  # type: ignore[arg-type]
    )
    return operator_pb2.EngineView(
        status=status, known=known, report_time=at(seen), endpoint=f"127.0.0.1:70{name[-1]}0", routable=known
    )


def outcome(name: str, stage: int, **fields: object) -> fleet_pb2.EngineOutcome:
    return fleet_pb2.EngineOutcome(
        engine=version_pb2.EngineRef(engine_id=name, incarnation="1"),
        stage=engine_pb2.UpdateStage.ValueType(stage),
        **fields,  # type: ignore[arg-type]
    )


def trainers() -> list[operator_pb2.TrainerView]:
    """One that holds the lease, and one that held it before."""
    return [
        operator_pb2.TrainerView(
            trainer_id="trainer-0",
            model="policy",
            term=2,
            connected=True,
            rank_count=2,
            lease_expire_time=at(9),
            status=fleet_pb2.TrainerStatus(term=2, step=6, phase="train"),
        ),
        operator_pb2.TrainerView(
            trainer_id="trainer-1", model="policy", term=1, rank_count=2, lease_expire_time=at(-60)
        ),
        operator_pb2.TrainerView(
            trainer_id="trainer-2", model="policy", term=1, rank_count=2, lease_expire_time=at(-60), left=True
        ),
        operator_pb2.TrainerView(
            trainer_id="trainer-3",
            model="policy",
            term=2,
            rank_count=4,
            connected=True,
            lease_expire_time=at(9),
            status=fleet_pb2.TrainerStatus(
                term=2,
                step=6,
                phase="train",
                lost_ranks=[
                    fleet_pb2.LostRank(rank=2, cause="process 71 ended"),
                    fleet_pb2.LostRank(rank=0, cause="it closed the connection"),
                ],
            ),
        ),
    ]


def updates() -> list[fleet_pb2.UpdateState]:
    """One under way, and one that a failure and a loss degraded."""
    return [
        fleet_pb2.UpdateState(
            update_id="u-8",
            model="policy",
            version=version(2, 8),
            step=6,
            phase=fleet_pb2.UPDATE_PHASE_PREPARING,
            engines=[
                outcome("engine-0", engine_pb2.UPDATE_STAGE_RECEIVING, required=True),
                outcome("engine-1", 0),
            ],
        ),
        fleet_pb2.UpdateState(
            update_id="u-7",
            model="policy",
            version=version(2, 7),
            step=5,
            phase=fleet_pb2.UPDATE_PHASE_DEGRADED,
            cause="one engine failed",
            engines=[
                outcome("engine-0", engine_pb2.UPDATE_STAGE_APPLIED),
                outcome("engine-2", engine_pb2.UPDATE_STAGE_FAILED, error_reason="INSTALL_FAILED"),
                outcome("engine-3", engine_pb2.UPDATE_STAGE_READY, lost=True),
            ],
        ),
    ]


def whole_fleet() -> operator_pb2.FleetView:
    hold = engine_pb2.Hold(kind=engine_pb2.HOLD_KIND_OPERATOR, owner="ann")
    poison = engine_pb2.Hold(kind=engine_pb2.HOLD_KIND_POISONED)
    return operator_pb2.FleetView(
        run_id="run-a",
        coordinator_term=3,
        state=fleet_pb2.FleetState(
            models=[fleet_pb2.ModelState(model="policy", term=2, served=[version(2, 7)], ordinal=5)]
        ),
        engines=[
            engine("engine-0", "serving", applied=version(2, 7), gate_open=True, live_requests=4),
            engine("engine-1", "held", applied=version(2, 7), holds=[hold], waiting_requests=2),
            engine("engine-2", "poisoned", holds=[poison]),
            engine("engine-3", "serving", applied=version(2, 7), gate_open=True, known=False, seen=-42),
            engine("engine-4", "empty"),
        ],
        trainers=trainers(),
        updates=updates(),
    )


def shown(what: RenderableType, width: int = 150) -> str:
    console = Console(width=width, no_color=True, force_terminal=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
