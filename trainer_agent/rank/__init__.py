"""Inside a training process: `TrainerRank`, and what it needs to hand weights over. Nothing here may reach gRPC."""

from trainer_agent.rank.pending import PendingPush
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.trainer_rank import TrainerRank

__all__ = ["PendingPush", "PushReport", "TrainerRank"]
