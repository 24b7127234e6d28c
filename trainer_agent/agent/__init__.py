"""The process beside a node's ranks: it holds their lease and their streams, and starts and ends them.

A push from the outside in: `pusher` (all ranks asked), `push` (one attempt), `streams` (all engines), `stream` (one),
`ways` (one transport's frames). A transport is added in `ways`, what a refusal means in `reasons`. Nothing here may
take a stream's fate for what an engine holds (INV-8), call memory free on less than an agent's own word (INV-12), or
leave ranks without an answer.
"""

from trainer_agent.agent.run import run_trainer
from trainer_agent.agent.settings import TrainerSettings

__all__ = ["TrainerSettings", "run_trainer"]
