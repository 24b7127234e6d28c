"""One call of Lifecycle, from a process to an engine agent: answered, refused, lost or late."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core import errors as e
from controlplane.core.versions import Incarnation
from controlplane.sim.agent import Agent, Command
from controlplane.sim.kernel import Action, Process, Stream, connect

RPC_SECONDS = 2.0


class Call:
    """`act` happens at the agent, if it is the life that is meant. A late call may still arrive."""

    def __init__(self, caller: Process, agent: Agent, incarnation: Incarnation, act: Command) -> None:
        self._caller = caller
        self._agent = agent
        self._incarnation = incarnation
        self._act = act
        self._over = False

    def begin(self, done: Action, failed: Callable[[e.WeightplaneError], None]) -> None:
        """One of the two comes, once."""
        stream = connect(self._caller, self._agent)
        if stream is None:
            self._caller.after(0.0, lambda: failed(e.PeerLost(peer=self._agent.name, cause="nobody listens there")))
            return
        stream.on_client_end = lambda error: self._end(lambda: failed(error))
        stream.to_server(
            lambda: self._agent.command(stream, self._incarnation, self._act, lambda: self._answered(stream, done))
        )
        self._caller.after(RPC_SECONDS, lambda: self._late(stream, failed))

    def _answered(self, stream: Stream, done: Action) -> None:
        stream.cancel()
        self._end(done)

    def _late(self, stream: Stream, failed: Callable[[e.WeightplaneError], None]) -> None:
        if not self._over:
            stream.cancel()
            self._end(lambda: failed(e.DeadlineExceeded("call", self._agent.name, RPC_SECONDS)))

    def _end(self, then: Action) -> None:
        if not self._over:
            self._over = True
            then()
