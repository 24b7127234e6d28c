"""L5: what an engine of a killed agent left is gone before the next one starts, and nobody else is touched."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controlplane.processes import start_time
from engine_agent.vllm.leftovers import Leftovers

MAPS = (
    "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); "
    "print('up', flush=True); time.sleep(60)"
)


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/psm_weightplane_test_{secrets.token_hex(6)}")
    path.write_bytes(b"\0" * 4096)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def process(segment: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", MAPS, str(segment)], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "up\n"
        yield made
        made.kill()


def noted(path: Path, process: subprocess.Popen[str]) -> None:
    Leftovers(path).note([psutil.Process(process.pid)])


def test_l5_a_process_and_its_memory_are_gone_after_a_sweep(
    tmp_path: Path, process: subprocess.Popen[str], segment: Path
) -> None:
    note = tmp_path / "e0.processes.json"
    noted(note, process)
    Leftovers(note).sweep()
    assert start_time(process.pid) is None
    assert not segment.exists()
    assert not note.exists()


def test_l5_memory_of_a_dead_process_is_removed(tmp_path: Path, process: subprocess.Popen[str], segment: Path) -> None:
    noted(tmp_path / "note", process)
    process.kill()
    process.wait()
    Leftovers(tmp_path / "note").sweep()
    assert not segment.exists()


@pytest.mark.parametrize("field", ["boot", "lives"])
def test_another_process_of_that_number_and_what_it_maps_are_left_alone(
    tmp_path: Path, process: subprocess.Popen[str], segment: Path, field: str
) -> None:
    """A pid is used again, after a boot or before it."""
    note = tmp_path / "note"
    noted(note, process)
    changed = {"boot": "another", "lives": {str(process.pid): 1}}[field]
    note.write_text(json.dumps(json.loads(note.read_text()) | {field: changed}))
    Leftovers(note).sweep()
    assert process.poll() is None
    assert segment.exists()


def test_a_note_that_names_other_files_removes_none_of_them(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    note, precious = tmp_path / "note", tmp_path / "precious"
    precious.touch()
    noted(note, process)
    note.write_text(json.dumps(json.loads(note.read_text()) | {"segments": [str(precious)]}))
    Leftovers(note).sweep()
    assert precious.exists()


def test_no_note_or_a_broken_one_stops_no_start(tmp_path: Path) -> None:
    Leftovers(tmp_path / "none").sweep()
    (tmp_path / "broken").write_text("{")
    Leftovers(tmp_path / "broken").sweep()
