"""The head of an engine of two nodes, as a process: `python -m tests.support.engine_of_nodes MODEL LISTEN ADDRESS`.

It serves for members on LISTEN, starts the engine, pushes three updates, and prints what both cores say to each, one
line of JSON per update. Then it waits for its member to be lost, and says so.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from controlplane.core.errors import EngineDied
from controlplane.core.sampling import SamplingSettings
from controlplane.rpc.security import ServerSecurity
from controlplane.rpc.server import start_server
from engine_agent.daemon.building import members_of, services_of
from engine_agent.daemon.settings import EngineSettings
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.further_nodes import FurtherNodes
from tests.support.staging import stage
from tests.support.tiny_engine import tiny_settings, trained

MARK = "SAID "
UPDATES = (1, 2, 3)
PROMPT = [5, 6, 7, 8]
TOKENS = 8


async def main() -> None:
    from safetensors.torch import load_file

    model, listen, address = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    vllm = tiny_settings(model, data_parallel_size=2, further_nodes=1, node_address=address, start_timeout_seconds=120)
    settings = EngineSettings("engine-0", vllm=vllm)
    members = members_of(settings)
    assert members is not None
    services = services_of(EngineLifeHolder(), settings, asyncio.Event(), members)
    server = await start_server(listen, services, ServerSecurity(insecure=True))  # a network of its own
    engine = VllmEngine(vllm, "engine-0", further=FurtherNodes(members, vllm, "engine-0"))
    facts = await engine.start()
    say(world_size=facts.world_size, local_pids=len(facts.pids))
    state = load_file(model / "model.safetensors")
    for seed in UPDATES:
        await engine.quiesce()
        with stage(trained(state, seed), str(seed)) as staged:
            await engine.install(staged)
        await engine.canary()
        await engine.resume()
        say(update=seed, cores=await asyncio.gather(*(speak(engine, f"{seed}-{i}") for i in range(2))))
    try:
        while True:
            await engine.probe()
            await asyncio.sleep(0.1)
    except EngineDied as error:
        say(died=str(error))
    await engine.shutdown()
    await server.stop()


def say(**what: object) -> None:
    print(MARK + json.dumps(what), flush=True)


async def speak(engine: VllmEngine, name: str) -> tuple[list[int], object]:
    """Two requests at once go to two cores."""
    tokens: list[int] = []
    spans: object = ()
    async for delta in engine.generate(
        name, PROMPT, SamplingSettings(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    ):
        tokens += delta.token_ids
        spans = delta.engine_spans
    return tokens, spans


if __name__ == "__main__":
    asyncio.run(main())
