"""A Ray cluster of several nodes on this machine, each at a loopback address of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: nothing of ours goes through it."""
SHUT_OFF = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


class Nodes:
    """The cluster's nodes, by Ray's id. The head has no room for processes."""

    def __init__(self) -> None:
        cluster = import_module("ray.cluster_utils").Cluster
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        self._cluster: Any = cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self._last_host = 1

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the living ones."""
        return tuple(self._nodes)

    def add(self, cpus: int, gpus: int = 0) -> str:
        """One more, alive."""
        self._last_host += 1
        node = self._cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            node_ip_address=f"127.0.0.{self._last_host}",
            object_store_memory=OBJECT_STORE_BYTES,
            wait=True,
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Its raylet and workers, without a word."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    before = {name: os.environ.get(name) for name in SHUT_OFF}
    os.environ.update(SHUT_OFF)
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
