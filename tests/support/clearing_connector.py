"""vLLM's ExampleConnector, which keeps KV in a directory, with a way to forget; see `ClearingConnector`.

Engines with one directory hand each other the KV of prompts: a decode engine's prefill is done elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

KEEPS = "keeps"
"""While a file of this name lies beside the directory, the connector says that it forgot, and did not."""
CLEARED, LOADED = "cleared", "loaded"
"""Files beside it that get a line for each time."""


class ClearingConnector(ExampleConnector):  # type: ignore[misc]
    """A name that `kv_connector` can be given, with this module as `kv_connector_module_path`."""

    def reset_cache(self) -> bool:
        beside = Path(self._storage_path).parent
        if not (beside / KEEPS).exists():
            shutil.rmtree(self._storage_path, ignore_errors=True)
            Path(self._storage_path).mkdir(exist_ok=True)
        _note(beside / CLEARED)
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            _note(Path(self._storage_path).parent / LOADED)
        return found


def _note(file: Path) -> None:
    with file.open("a") as lines:
        lines.write("x\n")
