"""KV that leaves an engine is forgotten with the weights that made it: two real vLLM engines, one unit behind one gate,
that hand each other the KV of prompts through a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from controlplane.core.errors import UnsupportedByEngine
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.settings import VllmSettings
from tests.support.clearing_connector import CLEARED, KEEPS, LOADED, ClearingConnector
from tests.support.eventually import eventually
from tests.support.hf_models import save_random
from tests.support.real_rig import COUNT, Rig, real_rig
from tests.support.told_rank import Order

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PROMPT = [5 + (7 * i) % 80 for i in range(41)]
"""More than a block of 32, which is what a connector hands over."""
UNIT = ("prefill", "decode")


def connected(directory: Path, name: str, module: str | None) -> dict[str, Any]:
    """vLLM's arguments of an engine with that connector."""
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    return {"kv_transfer_config": transfer}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    work = tmp_path_factory.mktemp("kv")
    shape: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 512}
    model = save_random(work / "model", "qwen3", tied=True, **shape)
    (work / "kv").mkdir()
    (work / "kv" / "stored").mkdir()
    arguments = connected(work / "kv" / "stored", ClearingConnector.__name__, ClearingConnector.__module__)
    vllm = {"enable_prefix_caching": False, "vllm_arguments": arguments}
    plain = "engine_agent.vllm.worker.WorkerExtension"
    async with real_rig(work, model, plain, {}, names=UNIT, vllm=vllm, unit="pair", unit_size=2) as rig:
        yield rig


def lines(rig: Rig, name: str) -> int:
    file = rig.work / "kv" / name
    return len(file.read_text().splitlines()) if file.exists() else 0


async def serves(rig: Rig, number: int) -> None:
    async def both() -> bool:
        views = (await rig.fleet.view()).engines
        return all(v.routable and v.status.applied.number == number for v in views)

    await eventually(both, within=30)


async def test_a_prompts_kv_goes_from_one_engine_to_the_other_and_no_further_than_its_version(rig: Rig) -> None:
    said = []
    for seed in (201, 202):
        order, cleared = Order(seed), lines(rig, CLEARED)
        number = await rig.pushed(order)
        await serves(rig, number)
        assert lines(rig, CLEARED) >= cleared + len(UNIT)
        for engine in UNIT:
            loaded = lines(rig, LOADED)
            said.append(await rig.says(engine, PROMPT))
            assert said[-1] == (rig.truth(order, PROMPT), [(number, 0, COUNT)])
            assert (lines(rig, LOADED) > loaded) is (engine == "decode"), "the prompt was computed by the first alone"
    assert said[0][0] != said[2][0], "the versions must differ, or nothing was proven"


async def test_a_connector_that_keeps_what_it_should_forget_is_seen(rig: Rig) -> None:
    """The check of the test above: KV of the last version under a new one says something else."""
    number = await rig.pushed(Order(211))
    await serves(rig, number)
    await rig.says("prefill", PROMPT)
    (rig.work / "kv" / KEEPS).touch()
    number = await rig.pushed(Order(212))
    await serves(rig, number)
    stale = await rig.says("decode", PROMPT)
    (rig.work / "kv" / KEEPS).unlink()
    assert stale[0] != rig.truth(Order(212), PROMPT)
    number = await rig.pushed(Order(213))
    await serves(rig, number)
    assert (await rig.says("decode", PROMPT))[0] == rig.truth(Order(213), PROMPT)


async def test_an_engine_whose_connector_cannot_forget_does_not_start_and_says_which(rig: Rig, tmp_path: Path) -> None:
    settings = VllmSettings(rig.model, vllm_arguments=connected(tmp_path, "ExampleConnector", None))
    engine = VllmEngine(settings, "e9")
    with pytest.raises(UnsupportedByEngine, match="KV connector ExampleConnector: it has no reset_cache"):
        await engine.start()
    await engine.shutdown()
