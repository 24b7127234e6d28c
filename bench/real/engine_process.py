"""An engine agent with real vLLM as it always is, whose workers can also be told what `bench.real.worker` has.

    python -m bench.real.engine_process SETTINGS

SETTINGS is JSON. Each line on standard input is a call, `{"method": ..., "args": [...]}`; each answer is a line on
standard output, once the call is over. The agent ends when standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm import engine, launch
from engine_agent.vllm.settings import VllmSettings

WORKER = "bench.real.worker.MeasuredWorker"


def settings_of(told: dict[str, Any]) -> EngineSettings:
    vllm = VllmSettings(model=Path(told.pop("model")), **told.pop("vllm"))
    return EngineSettings(state_dir=Path(told.pop("state_dir")), vllm=vllm, **told)


def measured() -> list[Any]:
    """Make engines with workers that can be measured; the list gets vLLM's object of each."""
    llms: list[Any] = []
    starting: Any = launch
    arguments, started = starting.engine_arguments, starting.launch

    def extended(*given: Any, **more: Any) -> dict[str, Any]:
        return dict(arguments(*given, **more), worker_extension_cls=WORKER)

    async def noted(*given: Any) -> Any:
        llms.append(await started(*given))
        return llms[-1]

    starting.engine_arguments = extended
    setattr(engine, "launch", noted)  # noqa: B010 - it has imported the name
    return llms


async def serve(settings: EngineSettings) -> int:
    llms, stop = measured(), asyncio.Event()
    agent = asyncio.create_task(run_engine(settings, stop))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM's own lines are no answers
    while line := await asyncio.to_thread(sys.stdin.readline):
        call = json.loads(line)
        answer = await llms[-1].collective_rpc(call["method"], args=tuple(call["args"]))
        print(json.dumps(answer[0]), file=answers, flush=True)
    stop.set()
    return await agent


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(settings_of(json.loads(sys.argv[1])))))
