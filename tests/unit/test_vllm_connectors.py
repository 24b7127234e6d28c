"""Which KV connectors may be beside weights that change."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.errors import UnsupportedByEngine
from engine_agent.vllm.connectors import check_connector


def config(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": module,
        "kv_connector_extra_config": extra,
    }


CLEARS = config("ClearingConnector", "tests.support.clearing_connector")


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        CLEARS,
        config("SimpleCPUOffloadConnector"),
        config("OffloadingConnector"),
        config("MultiConnector", connectors=[CLEARS, config("OffloadingConnector")]),
    ],
    ids=["none", "one of ours", "offload", "offloading", "several"],
)
def test_those_that_forget_are_taken(allowed: dict[str, Any] | None) -> None:
    check_connector("e0", allowed)


@pytest.mark.parametrize(
    "refused", [config("ExampleConnector"), config("MultiConnector", connectors=[CLEARS, config("ExampleConnector")])]
)
def test_those_that_do_not_are_refused_by_name(refused: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedByEngine, match=r"e0.*KV connector ExampleConnector"):
        check_connector("e0", refused)
