"""The rank's end of the local socket: deadlines, last words, and stops that do not count."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.core.errors import DeadlineExceeded, PeerLost, ShapeMismatch, StaleTerm, error_classes
from tests.support.rank_agent import Agent, fence
from trainer_agent import wire
from trainer_agent.rank.link import Patience, RankLink
from weightplane.local.v1 import rank_pb2

LEAVE = rank_pb2.RankRequest(leave=rank_pb2.Leave())


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "s")
    yield made
    made.close()


def joined(term: int) -> rank_pb2.Joined:
    return rank_pb2.Joined(term=term, run_id="r")


def test_messages_come_whole_and_in_order_however_they_were_cut(agent: Agent) -> None:
    data = b"".join(wire.encode(rank_pb2.RankResponse(joined=joined(n))) for n in (1, 2))
    agent.connection.sendall(data[:5])
    assert agent.link.poll() is None
    agent.connection.sendall(data[5:])
    assert [agent.link.receive(Patience(5), "p", "w").joined.term for _ in range(2)] == [1, 2]


def test_waiting_for_nothing_ends_with_what_was_waited_for(agent: Agent) -> None:
    with pytest.raises(DeadlineExceeded, match=r"push: waited 0\.1 s for the plan"):
        agent.link.receive(Patience(0.1), "push", "the plan")


def test_an_agent_that_reads_nothing_is_noticed(agent: Agent) -> None:
    big = rank_pb2.RankRequest(push_failed=rank_pb2.PushFailed(cause="x" * (3 << 20)))
    with pytest.raises(DeadlineExceeded, match="the trainer agent"):
        agent.link.send(big, Patience(0.2))


def test_what_the_agent_said_last_is_heard_before_its_end(agent: Agent) -> None:
    agent.say(error=fence())
    agent.connection.close()
    with pytest.raises(StaleTerm) as raised:
        agent.link.send(LEAVE, Patience(1))
    assert (raised.value.got, raised.value.current) == (1, 2)
    with pytest.raises(StaleTerm):
        agent.link.poll()


def test_an_agent_that_vanished_without_a_word_is_a_lost_peer(agent: Agent) -> None:
    agent.connection.close()
    with pytest.raises(PeerLost, match="the trainer agent"):
        agent.link.receive(Patience(1), "push", "the plan")


def test_nobody_at_the_socket_is_a_deadline_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="join"):
        RankLink(tmp_path / "nobody", Patience(0.2))


def test_waiting_stops_when_the_agent_cannot_come_any_more(tmp_path: Path) -> None:
    def gone() -> None:
        raise PeerLost(peer="the spawned trainer agent", cause="exit code 1")

    with pytest.raises(PeerLost, match="exit code 1"):
        RankLink(tmp_path / "nobody", Patience(60), gone)


def test_time_spent_stopped_is_not_counted(agent: Agent) -> None:
    class Stopped:
        """A poll during which the process was stopped for an hour: it returns late, with nothing."""

        def poll(self, _timeout: float) -> list[object]:
            return []

    patience = Patience(10)
    patience.wait(Stopped())  # type: ignore[arg-type]
    assert 9 <= patience.left < 10


def test_a_forked_child_cannot_use_it_and_does_not_keep_it_open(agent: Agent) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            agent.link.send(LEAVE, Patience(1))
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    agent.link.send(LEAVE, Patience(1))
    assert agent.connection.recv(100) == wire.encode(LEAVE)


def test_a_large_message_goes_out_whole_while_the_agent_reads_slowly(agent: Agent) -> None:
    big = rank_pb2.RankRequest(push_failed=rank_pb2.PushFailed(cause="x" * (3 << 20)))
    got = bytearray()

    def read() -> None:
        while len(got) < len(wire.encode(big)):
            got.extend(agent.connection.recv(65536))

    reader = threading.Thread(target=read)
    reader.start()
    agent.link.send(big, Patience(20))
    reader.join(20)
    assert bytes(got) == wire.encode(big)


def test_every_error_of_the_tree_survives_the_local_protocol() -> None:
    ours = [c for c in error_classes() if c.__module__ == ShapeMismatch.__module__]
    for cls in ours:
        assert type(wire.typed_error(cls.reason, {}, "text")) is cls
    shape = ShapeMismatch(name="w", expected=(2, 3), got=(3,))
    again = wire.typed_error(shape.reason, shape.metadata(), str(shape))
    assert str(again) == str(shape)


def test_an_unknown_reason_keeps_its_text() -> None:
    error = wire.typed_error("REMOTE", {"code": "UNAVAILABLE", "text": "connection refused"}, "")
    assert str(error) == "UNAVAILABLE: connection refused"
