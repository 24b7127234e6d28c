"""The systemd units in deploy/: what systemd itself says of them, and that they restart no fenced trainer."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))
NEVER = {
    "weightplane-coordinator": {ExitCode.USAGE, ExitCode.CONFIG, ExitCode.LEDGER},
    "weightplane-engine@": {ExitCode.USAGE, ExitCode.CONFIG},
    "weightplane-trainer@": {ExitCode.USAGE, ExitCode.CONFIG, ExitCode.FENCED, ExitCode.LEASE_HELD},
}


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.stem)
def test_inv7_a_unit_is_not_started_again_after_what_a_restart_does_not_help(unit: Path) -> None:
    parsed = configparser.ConfigParser(strict=True, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(unit)
    prevented = {int(code) for code in parsed["Service"]["RestartPreventExitStatus"].split()}
    assert prevented == NEVER[unit.stem]


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed here")
    name = unit.name.replace("@", "@policy")
    program = tmp_path / "weightplane"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / name).write_text(unit.read_text().replace("/opt/weightplane/bin/weightplane", str(program)))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = [line for line in ended.stderr.splitlines() if name in line or str(tmp_path) in line]
    assert (ended.returncode, said) == (0, []), ended.stderr
