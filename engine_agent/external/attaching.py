"""What a running server says of itself, and whether it can be an engine.

Promises that every reason why it cannot is found before anything of it is changed, and names what to start it with;
and that no label which is found there is adopted (INV-1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.core.errors import EngineDied
from controlplane.core.names import device_uuid
from engine_agent.external.receipts import UNSET
from engine_agent.external.server import Server, ServerRefused
from engine_agent.external.settings import ExternalSettings
from engine_agent.external.streams import GENERATE
from engine_agent.vllm.install import MIXTURE
from engine_agent.vllm.likeness import likeness_of

POLL_SECONDS = 0.5
"""Between looks at whether the server is there."""


class Unfit(ValueError):
    """Why this server cannot be an engine, and what would make it one."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Of one server."""

    dtype: str
    """torch's name of it."""
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    world_size: int
    prefix_cache: bool
    keeps: bool
    """It has the package's routes: it tells which tokens are out, so requests can be kept over an install."""
    likeness: str
    tokenizer: bool
    """It loaded the model's."""


async def wait_for_server(settings: ExternalSettings, engine_id: str) -> None:
    """Until it answers. A look of its own each time: a server that is not there yet is none that died.

    Raises Unfit: not within the limit.
    """
    limit, cause = settings.start_timeout_seconds, ""
    try:
        async with asyncio.timeout(limit):
            while True:
                look = Server(settings.url, engine_id, lambda _: None)
                try:
                    await look.call("GET", "/version")
                    return
                except (EngineDied, ServerRefused) as error:
                    cause = str(error)
                finally:
                    await look.close()
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise Unfit(f"it did not answer within {limit} s: {cause}") from None


async def take(server: Server, settings: ExternalSettings) -> None:
    """Make it this agent's: it stands still, under a label that no other agent made. Raises Unfit, EngineDied."""
    shown = await server.llm.label()
    if settings.transfer == "ipc" and shown.partition(".")[0] == MIXTURE:
        raise Unfit("an update of its weights broke off, and vLLM's IPC engine has no way back: start it anew")
    await server.llm.pause("abort")
    await server.llm.update_weight_version(UNSET)


async def devices_of(server: Server, settings: ExternalSettings) -> tuple[str, ...]:
    """One per worker, in rank order. Raises Unfit, EngineDied."""
    if settings.device_uuids:
        if len(settings.device_uuids) != server.world_size:
            raise Unfit(f"it has {server.world_size} workers, the settings name {len(settings.device_uuids)} devices")
        return tuple(device_uuid(text) for text in settings.device_uuids)
    try:
        workers = await server.collect("weightplane_facts", settings.call_timeout_seconds)
    except ServerRefused as refused:
        raise Unfit(
            "its workers do not know this package: install it there, and start it with "
            "--worker-extension-cls engine_agent.vllm.worker.WorkerExtension"
        ) from refused
    found = (w["device_uuid"] or f"cpu-{server.engine_id}-{w['rank']}" for w in workers)
    return tuple(device_uuid(text) for text in found)


async def read_facts(server: Server, settings: ExternalSettings) -> ServerFacts:
    """Raises Unfit, EngineDied."""
    info = await _route(server, "/server_info?config_format=json", "VLLM_SERVER_DEV_MODE=1")
    config, environment = info["vllm_config"], info["vllm_env"]
    check_config(config, environment, settings)
    await _require_tokens_in(server)
    model, world = config["model_config"], config["parallel_config"]["world_size"]
    version, device = (await server.call("GET", "/version"))["version"], config["device_config"]["device"]
    likeness = likeness_of(version, device, model["dtype"], model["quantization"], world, model["max_model_len"])
    return ServerFacts(
        dtype=str(model["dtype"]).removeprefix("torch."),
        max_model_len=model["max_model_len"],
        max_logprobs=model["max_logprobs"],
        max_num_seqs=config["scheduler_config"]["max_num_seqs"],
        world_size=world,
        prefix_cache=bool(config["cache_config"]["enable_prefix_caching"]),
        keeps=await _has_our_routes(server),
        likeness=likeness,
        tokenizer=not model.get("skip_tokenizer_init", False),
    )


def check_config(config: Mapping[str, Any], environment: Mapping[str, Any], settings: ExternalSettings) -> None:
    """Raises Unfit."""
    model, parallel, scheduler = config["model_config"], config["parallel_config"], config["scheduler_config"]
    _check_model(str(model["model"]), settings)
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if backend != settings.transfer:
        raise Unfit(
            f"its weight transfer engine is {backend!r}, the settings say {settings.transfer!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{settings.transfer}"}}'"""
        )
    if settings.transfer == "ipc" and not environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION"):
        raise Unfit("it takes no pickled handles: start it with VLLM_ALLOW_INSECURE_SERIALIZATION=1")
    wanted = {
        "--logprobs-mode processed_logprobs": model["logprobs_mode"] == "processed_logprobs",
        "--scheduling-policy priority": scheduler["policy"] == "priority",
        "--stream-interval 1": scheduler["stream_interval"] == 1,
        "--data-parallel-size 1": parallel["data_parallel_size"] == 1,
        "--api-server-count 1": parallel.get("_api_process_count", 1) == 1,
        "--max-num-seqs 2 or more": scheduler["max_num_seqs"] > 1,
        "no --speculative-config": not config.get("speculative_config"),
        "no --kv-transfer-config": not config.get(
            "kv_transfer_config"
        ),  # what a connector keeps may outlive an install
    }
    missing = [flag for flag, there in wanted.items() if not there]
    if missing:
        raise Unfit(f"start it with {', '.join(missing)}")


def _check_model(loaded: str, settings: ExternalSettings) -> None:
    same = loaded == settings.served or (
        Path(loaded).is_absolute() and Path(loaded).resolve() == settings.model.resolve()
    )
    if not same:
        raise Unfit(
            f"it loaded {loaded}, the settings say {settings.model}; where both are one model, say served = {loaded!r}"
        )


async def _route(server: Server, path: str, opened_by: str) -> Any:
    try:
        return await server.call("GET", path)
    except ServerRefused as refused:
        if refused.status == 404:
            raise Unfit(f"it has no {path.partition('?')[0]}: start it with {opened_by}") from refused
        raise


async def _require_tokens_in(server: Server) -> None:
    try:
        await server.call("POST", GENERATE, {})
    except ServerRefused as refused:
        if refused.status in (403, 404):
            raise Unfit(f"it does not serve {GENERATE}: start it with --enable-scale-out") from refused


async def _has_our_routes(server: Server) -> bool:
    try:
        await server.call("GET", "/weightplane/live")
    except ServerRefused:
        return False
    return True
