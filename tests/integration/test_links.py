"""Links, both ends for real: what is made, who is met, what is left when they go."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import torch

from controlplane import collectives
from controlplane.core.errors import LinkFailed, UpdateAborted
from engine_agent.receivers.links import PROBE_BYTES as ENGINE_PROBE_BYTES
from engine_agent.receivers.links import EngineLinks, LinkPlace, ReceiverLink
from tests.support.eventually import eventually_blocking
from trainer_agent.parts import Part
from trainer_agent.rank import links as sender_links
from trainer_agent.rank.links import PROBE_BYTES, Links, SenderLink
from trainer_agent.transports import BROADCAST
from weightplane.v1 import weight_update_pb2

pytestmark = pytest.mark.timeout(240)
HOST = "127.0.0.1"
LIMIT_SECONDS = 2.0
"""Of an operation, where nobody comes to its end: enough to connect on a busy machine."""
PROMPTLY = 20.0
"""Seconds; an operation of gloo alone waits for 30."""
SHARED = weight_update_pb2.LINK_FATE_SHARED


def part(name: str = "0/shared", engines: int = 2, incarnation: str = "i") -> Part:
    return Part(
        ranks=(0,),
        transport=BROADCAST,
        engines=tuple((f"e{i}", incarnation) for i in range(engines)),
        link=name,
        fate=SHARED,
    )


def place_of(link: SenderLink, position: int, term: int = 1) -> LinkPlace:
    return LinkPlace(link.link_id, link.rendezvous, 1 + len(link.engine_ids), position, term)


def nothing() -> None:
    """Between two looks."""


class Engines:
    """The other ends, each in its thread."""

    def __init__(self, count: int = 2) -> None:
        self.links = [EngineLinks(f"e{i}") for i in range(count)]

    def join(self, link: SenderLink, term: int = 1) -> list[threading.Thread]:
        return [started(ends.take(place_of(link, position, term)).join) for position, ends in enumerate(self.links, 1)]

    def receive(self, byte_count: int) -> tuple[list[bytearray], list[threading.Thread]]:
        """One broadcast at each of them."""
        buffers = [bytearray(byte_count) for _ in self.links]
        threads = [
            started(lambda ends=ends, b=b: joined(ends).receive(memoryview(b)))  # type: ignore[misc]
            for ends, b in zip(self.links, buffers, strict=True)
        ]
        return buffers, threads

    def close(self) -> None:
        for ends in self.links:
            ends.close()


def joined(ends: EngineLinks) -> ReceiverLink:
    assert ends._link is not None
    return ends._link


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def connected(engines: int = 2, name: str = "0/shared") -> Iterator[tuple[Links, SenderLink, Engines]]:
    links, others = Links(), Engines(engines)
    links.prepare([part(name, engines)], HOST)
    link = links.of(part(name, engines))
    joining = others.join(link)
    links.meet(nothing)
    end(joining)
    try:
        yield links, link, others
    finally:
        links.close()
        others.close()


def send(link: SenderLink, others: Engines, index: int) -> list[bytearray]:
    data = torch.full((1 << 16,), index % 251, dtype=torch.uint8)
    buffers, receiving = others.receive(len(data))
    link.send(index, data, nothing)
    link.wait_sent(index, nothing)
    end(receiving)
    return buffers


def test_both_ends_agree_on_the_probe() -> None:
    assert PROBE_BYTES == ENGINE_PROBE_BYTES


def test_a_link_carries_every_byte_to_every_engine_over_any_number_of_updates() -> None:
    with connected() as (links, link, others):
        for index in range(5):
            assert [set(b) for b in send(link, others, index)] == [{index}, {index}]
        links.prepare([part()], HOST)
        assert links.of(part()) is link, "nothing changed, so it is kept"


def test_a_replan_with_other_members_closes_the_link_and_the_new_one_has_another_id() -> None:
    with connected() as (links, link, _):
        links.prepare([part(incarnation="j")], HOST)
        assert links.of(part(incarnation="j")).link_id != link.link_id
        links.prepare([], HOST)
        assert len(links) == 0


def test_g3_fifty_replans_leave_processes_sockets_groups_and_memory_as_they_were() -> None:
    replan(20)  # what torch makes once for a process is made here, and the allocator's room for threads
    before = eventually_blocking(held)  # asked as below, within a loop that has descriptors of its own
    replan(50)

    def as_before() -> bool:
        assert all(now <= then for now, then in zip(held()[:3], before[:3], strict=True)), (held(), before)
        return True

    eventually_blocking(as_before)
    assert held()[3] - before[3] < 20 << 20, "memory"


def replan(times: int) -> None:
    for _ in range(times):
        with connected() as (_, link, others):
            send(link, others, 1)


def held() -> tuple[int, int, int, int]:
    """Descriptors, threads, child processes, resident bytes."""
    gc.collect()
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), len(me.children()), me.memory_info().rss


def test_g6_a_member_of_an_earlier_link_is_met_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each link's keys are its own: who comes late for the last one is not taken for a member of this one."""
    monkeypatch.setattr(sender_links, "JOIN_SECONDS", 0.5)
    links = Links()
    links.prepare([part(engines=1)], HOST)
    earlier = links.of(part(engines=1))
    links.prepare([part(engines=1, incarnation="j")], HOST)
    now = links.of(part(engines=1, incarnation="j"))
    late = EngineLinks("e0")
    stale = LinkPlace(earlier.link_id, now.rendezvous, 2, 1, 1)
    joining = started(lambda: _quietly(late.take(stale).join))
    links.meet(nothing)
    assert isinstance(now.error, LinkFailed)
    assert (now.error.engine_id, now.error.stage) == ("e0", "join")
    links.close()
    late.close()
    end([joining])


def _quietly(work: Callable[[], None]) -> None:
    with suppress(LinkFailed, UpdateAborted):
        work()


def test_g7_a_later_term_frees_what_the_link_of_an_earlier_writer_holds() -> None:
    with connected(engines=1) as (_, link, others):
        others.links[0].heard(1)
        assert not joined(others.links[0]).left, "the writer's own term"
        receiver = joined(others.links[0])
        others.links[0].heard(2)
        assert receiver.left
        with pytest.raises(LinkFailed, match="left before"):
            others.links[0].take(place_of(link, 1))


def test_leaving_ends_a_broadcast_under_way_at_once_on_both_sides() -> None:
    """An engine that leaves does not hold the sender until gloo's timeout, nor a sender the engine."""
    with connected(engines=1) as (_, link, others):
        link.send(0, torch.zeros(8 << 20, dtype=torch.uint8), nothing)  # nobody receives it
        others.close()
        began = time.monotonic()
        with pytest.raises(LinkFailed, match=r"e0 failed \(bytes\)"):
            link.wait_sent(0, nothing)
        assert not link.busy
        assert time.monotonic() - began < 10
    with connected(engines=1) as (links, _, others):
        failed: list[Exception] = []
        waiting = started(
            lambda: failed.append(_error_of(lambda: joined(others.links[0]).receive(memoryview(bytearray(9)))))
        )
        links.close()
        end([waiting])
        assert [e.reason for e in failed if isinstance(e, LinkFailed)] == ["LINK_FAILED"]


def _error_of(work: Callable[[], None]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing failed")


def test_an_engine_that_does_not_reach_the_sender_says_so_at_once() -> None:
    with pytest.raises(LinkFailed, match=r"e0 failed \(connect\): no answer at 127.0.0.1:1"):
        EngineLinks("e0").take(LinkPlace("id", f"{HOST}:1", 2, 1, 1)).join()


def test_an_address_of_another_host_is_no_place_to_listen_at() -> None:
    with pytest.raises(LinkFailed, match=r"cannot listen at 192\.0\.2\.1"):
        Links().prepare([part()], "192.0.2.1")


def test_a_forked_child_keeps_no_socket_of_a_link() -> None:
    """It would hide its parent's death from the engines."""
    with connected(engines=1) as (_, link, _):
        ours = set(link._open_group.sockets._found()) | set(link._store_sockets._found())
        assert len(ours) >= 3, "the store's listener and connection, and the group's"
        assert _in_child(lambda: all(_closed(d) for d in ours))


def _closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _in_child(claim: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if claim() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_an_engine_that_stops_in_the_middle_of_the_bytes_ends_the_link_at_the_operations_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "OPERATION_SECONDS", LIMIT_SECONDS)
    with connected() as (_, link, others):
        large = torch.zeros(
            64 << 20, dtype=torch.uint8
        )  # more than sockets hold: who does not receive stops the sender
        target = bytearray(len(large))
        receiving = started(lambda: joined(others.links[0]).receive(memoryview(target)))
        began = time.monotonic()
        link.send(0, large, nothing)
        with pytest.raises(LinkFailed) as raised:
            link.wait_sent(0, nothing)
        assert time.monotonic() - began < PROMPTLY
        assert (raised.value.stage, raised.value.engine_id) == ("bytes", "e0, e1")
        link.wait_still(0, nothing)
        others.links[0].close()
        end([receiving])


def test_a_sender_that_stops_in_the_middle_of_the_bytes_is_given_up_at_the_operations_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "OPERATION_SECONDS", LIMIT_SECONDS)
    with connected(1) as (_, _, others):
        began = time.monotonic()
        with pytest.raises(LinkFailed, match="bytes"):
            joined(others.links[0]).receive(memoryview(bytearray(1 << 16)))
        assert time.monotonic() - began < PROMPTLY
