"""What a running server says of itself, and whether it can be an engine.

Promises that every reason why it cannot is found before anything of it is changed, and names what to start it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_agent.external.server import Server, ServerRefused
from engine_agent.external.settings import ExternalSettings
from engine_agent.external.streams import GENERATE
from engine_agent.vllm.likeness import likeness_of


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
