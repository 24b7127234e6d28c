"""vLLM's engine cores of a further node, without a front end: `python -m engine_agent.vllm.headless JSON`.

A process of its own, since vLLM takes over the main thread's signals and its children are spawned from it. Promises to
end when the member that started it ends, and its cores with it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine_agent.lineage import watch_agent
from engine_agent.vllm import environment
from engine_agent.vllm.engine_log import EngineLog
from engine_agent.vllm.settings import Nodes, VllmSettings, engine_arguments

SHUTDOWN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Headless:
    """What the cores of one further node are told."""

    settings: VllmSettings
    nodes: Nodes


def settings_to_json(settings: VllmSettings) -> str:
    """For a member: all but what names things of the head's own node."""
    plain = asdict(replace(settings, visible_devices=(), device_uuids=(), vllm_arguments={}))
    return json.dumps(plain | {"model": str(settings.model), "vllm_arguments": dict(settings.vllm_arguments)})


def headless_from_json(text: str) -> Headless:
    told = json.loads(text)
    fields: dict[str, Any] = told["settings"]
    tuples = {name: tuple(fields[name]) for name in ("device_uuids", "visible_devices")}
    settings = VllmSettings(**fields | tuples | {"model": Path(fields["model"])})
    return Headless(settings, Nodes(told["address"], told["port"], told["first_core"]))


def main() -> None:
    watch_agent()
    told = headless_from_json(sys.argv[1])
    gpu, log = environment.gpu_present(), EngineLog(told.settings.log_level)
    environment.apply(environment.engine_environment(told.settings, gpu=gpu, log_config=log.config, base=os.environ))
    try:
        _serve(engine_arguments(told.settings, gpu=gpu, nodes=told.nodes))
    finally:
        log.remove()


def _serve(arguments: dict[str, Any]) -> None:
    """As vLLM's own `serve --headless` does, for as long as the cores live."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
    parallel = config.parallel_config
    manager = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=False,
    )
    try:
        manager.monitor_engine_liveness()
    finally:
        manager.shutdown(timeout=SHUTDOWN_SECONDS)


if __name__ == "__main__":
    main()
