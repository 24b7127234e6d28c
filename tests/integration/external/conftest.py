"""A recorded server on a small model, and agents that attach themselves to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from engine_agent.external.engine import ExternalEngine, ExternalSettings
from tests.support.external_engine import STATE
from tests.support.recording_server import RecordingServer, good_config, recording_server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(STATE, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 256, "tie_word_embeddings": False}))
    return directory


@pytest.fixture
async def server(model: Path) -> AsyncIterator[RecordingServer]:
    async with recording_server(RecordingServer(good_config(str(model)))) as running:
        yield running


@pytest.fixture
async def attach(server: RecordingServer, model: Path) -> AsyncIterator[Any]:
    async with AsyncExitStack() as ends:

        async def attached(**settings: Any) -> ExternalEngine:
            engine = ExternalEngine(ExternalSettings(server.url, model, **settings), "e0")
            ends.push_async_callback(engine.shutdown)
            await engine.start()
            return engine

        yield attached
