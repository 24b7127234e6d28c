"""Hosts an engine and does nothing more: `python -m tests.support.vllm_agent_process MODEL NOTE [CORES]`.

It prints the pids of the engine's processes, as JSON on one line, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from engine_agent.vllm.engine import VllmEngine, VllmSettings

MARK = "ENGINE-PIDS "


async def main() -> None:
    settings = VllmSettings(
        Path(sys.argv[1]),
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        data_parallel_size=int(sys.argv[3]) if len(sys.argv) > 3 else 1,
    )
    facts = await VllmEngine(settings, "engine-of-a-process", note=Path(sys.argv[2])).start()
    print(MARK + json.dumps(facts.pids), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
