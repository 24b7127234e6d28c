"""The process beside a node's ranks: it holds their lease and their streams, and starts and ends them."""

from trainer_agent.agent.run import run_trainer
from trainer_agent.agent.settings import TrainerSettings

__all__ = ["TrainerSettings", "run_trainer"]
