"""Inside a training process: `TrainerRank`, and what it needs to hand weights over.

A push from the outside in: `trainer_rank` (until the fleet decided), `pushes` (one attempt), `feed` (the iteration),
`exporter` (tensors into chunks), `senders` (chunks on their way, one file a transport). Nothing here may reach gRPC,
start a thread, wait without a deadline, stop in the middle of an iteration in which other ranks go on, or write memory
that somebody may still read (INV-12).
"""

from trainer_agent.rank.pending import PendingPush
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.trainer_rank import TrainerRank

__all__ = ["PendingPush", "PushReport", "TrainerRank"]
