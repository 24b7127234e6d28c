"""`weightplane doctor --link`: bytes really go to another process, and what does not come is found with its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.cli import doctor_links as links
from controlplane.cli.doctor_checks import Verdict
from controlplane.devices import host_id
from weightplane.v1 import engine_pb2, operator_pb2, version_pb2

GOOD, NOTE, BAD = Verdict.GOOD, Verdict.NOTE, Verdict.BAD


def segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("weightplane-doctor-*")}


def test_another_process_reads_a_segment_and_nothing_of_it_stays() -> None:
    before = segments()
    assert links.shared_memory().verdict is GOOD
    assert segments() == before


def test_a_far_end_on_another_host_is_told_from_one_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "host_id", lambda: "0" * 32)
    found = links.shared_memory()
    assert (found.verdict, "it lives on host" in found.found, "--ipc=host" in found.advice) == (BAD, True, True)


def test_bytes_that_changed_on_their_way_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_hexdigest", lambda data: "00" * 8)
    assert links.shared_memory().verdict is BAD


@pytest.mark.slow
def test_a_link_is_joined_by_another_process_and_its_probe_compared() -> None:
    found = links.broadcast("127.0.0.1")
    assert (found.verdict, found.found.startswith("another process joined")) == (GOOD, True)


def test_an_address_that_is_none_of_this_host_makes_no_link() -> None:
    found = links.broadcast("192.0.2.1")
    assert (found.verdict, "link_host" in found.advice) == (BAD, True)


def test_without_a_cuda_device_its_way_is_said_to_be_not_possible() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert links.cuda_ipc().verdict is NOTE


def test_a_checkpoint_root_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    assert links.checkpoint(tmp_path).verdict is GOOD
    assert list(tmp_path.iterdir()) == []
    assert links.checkpoint(tmp_path / "later").verdict is NOTE
    (tmp_path / "file").write_text("")
    assert links.checkpoint(tmp_path / "file").verdict is BAD


def test_an_engine_that_does_not_answer_is_named() -> None:
    assert links.inline({"e0": 0.002, "e1": 0.004}).verdict is GOOD
    found = links.inline({"e0": 0.002, "e1": "UNAVAILABLE: no"})
    assert (found.verdict, found.found) == (BAD, "e1: UNAVAILABLE: no")


def engine(name: str, host: str, endpoint: str) -> operator_pb2.EngineView:
    status = engine_pb2.EngineStatus(engine=version_pb2.EngineRef(engine_id=name))
    return operator_pb2.EngineView(status=status, known=True, host_id=host, endpoint=endpoint)


def test_an_engine_of_this_host_with_another_shm_is_noted_and_one_elsewhere_is_not() -> None:
    mine, elsewhere = engine("e0", host_id(), "127.0.0.1:1"), engine("e1", "f" * 32, "10.0.0.1:1")
    (found,) = links.sharing([mine, elsewhere])
    assert (found.verdict, found.found) == (GOOD, "1 of 2 engines share this /dev/shm")
    (found,) = links.sharing([mine, engine("e2", "f" * 32, "127.0.0.1:2")])
    assert (found.verdict, found.found.startswith("e2: at an address of this host")) == (NOTE, True)


async def test_nobody_is_asked_where_no_engine_is_heard() -> None:
    from controlplane.rpc.security import PLAIN

    (found,) = await links.of_engines(operator_pb2.FleetView(), PLAIN, 1.0)
    assert found.verdict is NOTE
