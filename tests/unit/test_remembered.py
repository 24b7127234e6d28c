"""INV-7: what an agent has seen outlives it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from controlplane.core.errors import LedgerError
from engine_agent.life.remembered import SECTOR_BYTES, Memory, Remembered
from tests.support.eventually import PATIENCE_SECONDS


def test_what_was_saved_is_there_for_the_next_life(tmp_path: Path) -> None:
    Memory(tmp_path / "deep" / "e0.json", "run", "policy").save(Remembered(term=3, coordinator_term=2, number=41))
    assert Memory(tmp_path / "deep" / "e0.json", "run", "policy").load() == Remembered(3, 2, 41)


def test_numbers_that_grew_are_there_for_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "e0.json"
    memory = Memory(path, "run", "policy")
    for number in (7, 8, 1000, 1001):
        memory.save(Remembered(term=3, coordinator_term=2, number=number, lives=1))
        assert Memory(path, "run", "policy").load() == Remembered(3, 2, number, 1)
    memory.save(Remembered(term=4, coordinator_term=2, number=1001, lives=1))
    assert Memory(path, "run", "policy").load() == Remembered(4, 2, 1001, 1)
    assert Memory(path, "other", "policy").load() == Remembered()
    assert Memory(path, "other", "policy").begin_life()[0] == Remembered(lives=1)


def test_a_number_is_written_over_in_place_and_one_sector_long(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    for number in (1, 2):
        memory.save(Remembered(number=number))
    note = tmp_path / "e0.number.json"
    inode = note.stat().st_ino
    memory.save(Remembered(number=3))
    assert (note.stat().st_ino, note.stat().st_size) == (inode, SECTOR_BYTES)


def test_a_number_of_a_run_with_a_long_name_is_noted_too(tmp_path: Path) -> None:
    long = "r" * SECTOR_BYTES
    for run, numbers in ((long, (1, 2, 3)), ("run", (1, 2))):
        memory = Memory(tmp_path / "e0.json", run, "policy")
        for number in numbers:
            memory.save(Remembered(number=number))
        assert Memory(tmp_path / "e0.json", run, "policy").load().number == numbers[-1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "run"}', '{"run_id": "run", "number": "many"}'])
def test_a_damaged_number_is_an_error_and_never_a_zero(tmp_path: Path, content: str) -> None:
    Memory(tmp_path / "e0.json", "run", "policy").save(Remembered(number=5))
    (tmp_path / "e0.number.json").write_text(content)
    with pytest.raises(LedgerError):
        Memory(tmp_path / "e0.json", "run", "policy").load()


def test_nothing_was_seen_before_the_first_save(tmp_path: Path) -> None:
    assert Memory(tmp_path / "e0.json", "run", "policy").load() == Remembered()


def test_l7_another_runs_terms_say_nothing_here(tmp_path: Path) -> None:
    Memory(tmp_path / "e0.json", "run", "policy").save(Remembered(term=9))
    assert Memory(tmp_path / "e0.json", "other", "policy").load() == Remembered()


def test_a_term_belongs_to_a_model_and_the_rest_to_the_run(tmp_path: Path) -> None:
    Memory(tmp_path / "e0.json", "run", "policy").save(Remembered(term=9, coordinator_term=4, number=41))
    assert Memory(tmp_path / "e0.json", "run", "critic").load() == Remembered(0, 4, 41)
    assert Memory(tmp_path / "e0.json", "run", "policy").load() == Remembered(9, 4, 41)
    Memory(tmp_path / "e0.json", "run", "critic").save(Remembered(term=2, coordinator_term=4, number=42))
    assert Memory(tmp_path / "e0.json", "run", "policy").load() == Remembered(0, 4, 42)


def test_a_file_of_before_models_were_noted_is_of_the_model_that_asks(tmp_path: Path) -> None:
    (tmp_path / "e0.json").write_text('{"run_id": "run", "term": 9, "coordinator_term": 4, "number": 41}')
    assert Memory(tmp_path / "e0.json", "run", "policy").load() == Remembered(9, 4, 41)


def test_l2_lives_are_counted_on_the_disk_also_those_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "e0.json"
    remembered, number = Memory(path, "run", "policy").begin_life()
    assert (remembered, number) == (Remembered(lives=1), 0)  # perhaps a disk before this one counted further
    Memory(path, "run", "policy").save(Remembered(3, 2, 41, lives=1))
    assert Memory(path, "run", "policy").begin_life() == (Remembered(3, 2, 41, lives=2), 2)
    assert Memory(path, "run", "critic").begin_life() == (Remembered(0, 2, 41, lives=3), 3)
    assert Memory(path, "other", "policy").begin_life()[1] == 0


def test_a_file_of_before_lives_were_counted_counts_from_one(tmp_path: Path) -> None:
    (tmp_path / "e0.json").write_text('{"run_id": "run", "term": 9, "coordinator_term": 4, "number": 41}')
    assert Memory(tmp_path / "e0.json", "run", "policy").begin_life() == (Remembered(9, 4, 41, lives=1), 1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "run", "surprise": 1}'])
def test_a_damaged_file_is_an_error_and_never_a_zero(tmp_path: Path, content: str) -> None:
    (tmp_path / "e0.json").write_text(content)
    with pytest.raises(LedgerError):
        Memory(tmp_path / "e0.json", "run", "policy").load()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "not-a-directory").write_text("")
    with pytest.raises(LedgerError):
        Memory(tmp_path / "not-a-directory" / "e0.json", "run", "policy").save(Remembered(term=1))


# ---- the number, beside an install --------------------------------------------------------------


def noted(tmp_path: Path) -> int:
    """As an agent that starts anew would find it."""
    return Memory(tmp_path / "e0.json", "run", "policy").load().number


def test_inv7_a_number_that_was_put_off_is_on_the_disk_before_its_version_is_claimed(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    memory.save(Remembered(term=3, number=1))
    assert memory.put_off(Remembered(term=3, number=2))
    assert noted(tmp_path) == 1, "a thread is to write it"
    memory.remember(Remembered(term=3, number=2))
    assert noted(tmp_path) == 2, "whether the thread came to it or not"
    memory.write_number()
    assert noted(tmp_path) == 2


def test_a_number_that_a_thread_wrote_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    memory.save(Remembered(number=1))
    assert memory.put_off(Remembered(number=2))
    memory.write_number()
    assert noted(tmp_path) == 2
    monkeypatch.setattr("engine_agent.life.remembered._overwrite", lambda *_: pytest.fail("nothing is to be written"))
    memory.remember(Remembered(number=2))


def test_inv7_terms_are_never_put_off_nor_is_anything_while_something_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    assert not memory.put_off(Remembered(number=1)), "nothing was saved yet"
    memory.save(Remembered(term=3, number=1))
    assert not memory.put_off(Remembered(term=4, number=2))
    assert not memory.put_off(Remembered(term=3, number=1))
    with monkeypatch.context() as patched:
        patched.setattr("engine_agent.life.remembered._overwrite", _no_room)
        memory.remember(Remembered(term=3, number=2))
        assert not memory.put_off(Remembered(term=3, number=3))
    memory.settle()
    assert noted(tmp_path) == 2


def test_a_number_that_a_thread_could_not_write_is_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    for number in (1, 2):
        memory.save(Remembered(number=number))
    assert memory.put_off(Remembered(number=3))
    with monkeypatch.context() as patched:
        patched.setattr("engine_agent.life.remembered._overwrite", _no_room)
        memory.write_number()
    assert noted(tmp_path) == 2
    memory.settle()
    assert noted(tmp_path) == 3


def test_the_loop_does_not_wait_for_a_thread_that_writes_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path / "e0.json", "run", "policy")
    for number in (1, 2):
        memory.save(Remembered(number=number))
    assert memory.put_off(Remembered(number=3))
    writes, may_end = threading.Event(), threading.Event()

    def slowly(*_: object) -> bool:
        writes.set()
        return may_end.wait(PATIENCE_SECONDS)

    monkeypatch.setattr("engine_agent.life.remembered._overwrite", slowly)
    thread = threading.Thread(target=memory.write_number)
    thread.start()
    assert writes.wait(PATIENCE_SECONDS)
    loop = threading.Thread(target=memory.settle_soon, daemon=True)
    loop.start()
    loop.join(1.0)
    assert not loop.is_alive()
    may_end.set()
    thread.join()


def _no_room(*_: object) -> bool:
    raise OSError(28, "No space left on device")
