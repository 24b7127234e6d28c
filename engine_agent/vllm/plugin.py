"""Entry point of the `vllm.general_plugins` group: loaded in vLLM's front end, EngineCore and every worker.

Promises to be idempotent, and to import nothing of vLLM before the process's tie to its agent is made.
"""

from __future__ import annotations

from engine_agent.lineage import watch_agent

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT_NAME = "weightplane"
BACKEND = "weightplane"
"""Name of our weight transfer engine in vLLM's factory (`weight_transfer_config.backend`)."""


def register() -> None:
    """Tie this process to its agent and name our weight transfer engine to vLLM, which imports it when it is used."""
    watch_agent()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # register_engine raises on a second time
        WeightTransferEngineFactory.register_engine(BACKEND, "engine_agent.vllm.transfer", "WeightplaneTransferEngine")
