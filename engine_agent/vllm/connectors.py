"""Connectors that carry KV between engines or keep it outside of one: which may be beside weights that change.

Refuses by name those that have no way to forget: after an install they would hand out KV that other weights computed,
and nothing would show it. vLLM calls `reset_cache` of each when an install clears the caches, and takes one that has
none for cleared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from controlplane.core.errors import UnsupportedByEngine


def check_connector(engine_id: str, config: Any) -> None:
    """`config` is vLLM's KVTransferConfig, or its fields, or None.

    Raises UnsupportedByEngine, and whatever importing the connector raises.
    """
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**config) if isinstance(config, dict) else config
    if config is None or config.kv_connector is None:
        return
    forgetless = [cls.__name__ for cls in _classes(config) if not _forgets(cls)]
    if forgetless:
        what = (
            f"KV connector {', '.join(forgetless)}: it has no reset_cache, and would keep KV of weights that are gone"
        )
        raise UnsupportedByEngine(engine_id, what)


def _classes(config: Any) -> Iterator[type]:
    """Of a connector that is made of several: those."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    found = KVConnectorFactory.get_connector_class(config)
    if not issubclass(found, MultiConnector):
        yield found
        return
    for part in config.kv_connector_extra_config.get("connectors", []):
        yield from _classes(KVTransferConfig(**part))


def _forgets(connector: type) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return getattr(connector, "reset_cache", None) is not KVConnectorBase_V1.reset_cache
