"""vLLM's own API app over the agent's engine. Nothing of it is written here; what it reaches is its engine client's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane.core.errors import EngineDied
from engine_agent.life.engine_life import EngineLife
from engine_agent.openai_door.answers import App
from engine_agent.openai_door.settings import OpenAiSettings
from engine_agent.vllm.engine import VllmEngine

TASKS = ("generate",)


async def api_app(life: EngineLife, engine: VllmEngine, settings: OpenAiSettings) -> App:
    """Of a life whose engine has started. Raises EngineDied: the app could not be made as the settings ask for it."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from engine_agent.openai_door.engine_client import GatedEngineClient

    client = GatedEngineClient(life, engine)
    try:
        arguments = _arguments(str(client.model_config.model), life.core.state.model, settings.arguments)
        app: Any = build_app(arguments, TASKS, client.model_config)
        await init_app_state(client, app.state, arguments, TASKS)
    except Exception as error:  # vLLM raises whatever its settings raised
        cause = f"the OpenAI door cannot open: {type(error).__name__}: {error}"
        raise EngineDied(engine_id=life.core.state.engine_id, cause=cause) from error
    made: App = app
    return made


def _arguments(model: str, name: str, more: Mapping[str, Any]) -> Any:
    """As vLLM's server would have them from its command line. Raises ValueError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    unknown = [key for key in more if not hasattr(arguments, key)]
    if unknown:
        raise ValueError(f"vLLM's server has no argument {unknown[0]}")
    own = {"model": model, "served_model_name": [name], "disable_log_stats": True}
    for key, value in {**more, **own}.items():
        setattr(arguments, key, value)
    return arguments
