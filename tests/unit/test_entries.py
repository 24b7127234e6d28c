"""Modules that run as processes of their own, by `python -m`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("controlplane", "engine_agent", "trainer_agent")
GUARD = 'if __name__ == "__main__":'
LOADED = "import sys; [__import__(entry.rpartition('.')[0]) for entry in sys.argv[1:]]; print(*sys.modules)"


def entries() -> list[str]:
    """Each module of the product that has a main of its own."""
    files = (f for package in PRODUCT for f in (ROOT / package).rglob("*.py") if GUARD in f.read_text())
    return sorted(".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files)


def test_no_package_imports_the_modules_in_it_that_run_by_themselves() -> None:
    """Such a module would be there twice, and Python says so on the terminal of whoever starts it."""
    there = entries()
    assert {"controlplane.cli.main", "trainer_agent.shim"} <= set(there)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-c", LOADED, *there]
    loaded = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert set(there) & set(loaded.stdout.split()) == set()
