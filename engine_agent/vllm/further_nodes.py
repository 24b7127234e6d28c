"""What the vLLM engine asks of its further nodes: start with it, hold what it installs, end with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from controlplane.core.errors import InstallFailed, PeerLost
from engine_agent.engine import SegmentSpan, StagedWeights
from engine_agent.members.head import MemberLink, Members
from engine_agent.vllm.headless import settings_to_json
from engine_agent.vllm.settings import Nodes, VllmSettings
from weightplane.local.v1 import member_pb2 as pb


class FurtherNodes:
    """Of one life of one engine. The agent's node has the first cores, each member the next ones."""

    def __init__(self, members: Members, settings: VllmSettings, engine_id: str) -> None:
        self._members = members
        self._settings = settings
        self._engine_id = engine_id
        self._links: list[MemberLink] = []

    async def meet(self) -> Nodes:
        """Have every member start its cores; they wait for the front end. Raises DeadlineExceeded, PeerLost."""
        self._links = await self._members.gather(self._settings.start_timeout_seconds)
        nodes = Nodes(self._settings.node_address, _free_port(self._settings.node_address))
        told, each = settings_to_json(self._settings), self._settings.cores_each
        for i, link in enumerate(self._links, start=1):
            await link.launch(pb.Launch(settings=told, address=nodes.address, port=nodes.port, first_core=i * each))
        return nodes

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """A member that is lost takes weights with it: the engine is told, and dies."""
        for link in self._links:
            link.lost.add_done_callback(partial(_tell, on_lost, link.peer))

    @asynccontextmanager
    async def holding(self, staged: StagedWeights, device_uuids: Sequence[str]) -> AsyncIterator[StagedWeights]:
        """The same version, with the bytes on every node, until the block ends: handles are keyed by host and device,
        and each worker's list names files of its own host. Raises InstallFailed: nothing was touched."""
        try:
            chunks = dict(staged.chunks)
            for i, link in enumerate(self._links, start=1):
                chunks |= await self._put(link, staged, self._of_node(device_uuids, i))
        except (OSError, PeerLost) as error:
            raise InstallFailed(self._engine_id, staged.label, False, str(error)) from error
        try:
            yield replace(staged, chunks=chunks)
        finally:
            await asyncio.gather(*(link.drop() for link in self._links), return_exceptions=True)

    def _of_node(self, device_uuids: Sequence[str], node: int) -> Sequence[str]:
        each = len(device_uuids) // (1 + len(self._links))
        return device_uuids[node * each : (node + 1) * each]

    async def _put(
        self, link: MemberLink, staged: StagedWeights, device_uuids: Sequence[str]
    ) -> dict[str, Sequence[SegmentSpan]]:
        """One copy for all workers of the node: whole tensors are staged, the same for every device."""
        spans = next((staged.chunks[u] for u in (*device_uuids, "") if u in staged.chunks), None)
        if spans is None:
            raise OSError(f"no chunks for devices {', '.join(device_uuids)} of member {link.peer}")
        return dict.fromkeys(device_uuids, await link.put(spans))

    def release(self) -> None:
        self._members.release()


def _tell(on_lost: Callable[[str], object], peer: str, lost: asyncio.Future[str]) -> None:
    on_lost(f"its member {peer} is gone: {lost.result()}")


def _free_port(address: str) -> int:
    """vLLM wants a number beforehand, and binds it itself."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
