"""docs/security.md: its commands run, and its files of settings are taken."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from controlplane.config import load
from controlplane.rpc.security.tokens import Tokens
from engine_agent.daemon.settings import EngineSettings

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def commands() -> list[list[str]]:
    """Those that need no fleet, in their order."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("weightplane")]


def test_its_commands_make_what_its_settings_name(tmp_path: Path) -> None:
    for words in commands():
        command = [sys.executable, "-m", "controlplane.cli.main", *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, cwd=tmp_path, check=True, timeout=150, capture_output=True, env=environment)
    assert len(commands()) == 3
    assert Tokens(tmp_path / "tokens.toml")
    [settings] = re.findall(r"^ *```toml\n(.*?)^ *```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "engine.toml").write_text(settings)
    engine = load(EngineSettings, tmp_path / "engine.toml", {"engine_id": "engine-0"})
    assert all(path is not None and path.exists() for path in (engine.tls.ca, engine.tls.cert, engine.tls.key))
