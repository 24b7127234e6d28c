"""The commands of the documentation, run as a reader types them: against a real coordinator and real engine agents with
in-memory engines, or alone in a directory with the page's files. `tests/support/documented_commands.py` says which."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.documented_commands import ELSEWHERE, PAGES_WITH_A_TEST, RUN, Elsewhere, Run, how, plain
from tests.support.documents import REPOSITORY, Command, blocks
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights

SECONDS = 240
"""For all of one test: four are usual."""


def commands() -> list[Command]:
    return [c for c in documents.commands() if c.place.partition(":")[0] not in PAGES_WITH_A_TEST and c.words]


def to_run(where: str) -> Iterator[tuple[Run, Command]]:
    """Each different command once."""
    found = {plain(c): (rule, c) for c in commands() if isinstance(rule := how(c), Run) and rule.where == where}
    yield from sorted(found.values(), key=lambda pair: RUN.index(pair[0]))


def test_every_command_of_the_documentation_is_run_by_a_test_or_target_that_is_named() -> None:
    unlisted = [str(c) for c in commands() if how(c) is None]
    assert not unlisted, "add them to tests/support/documented_commands.py"


def test_the_table_of_commands_has_nothing_that_no_page_shows() -> None:
    used = [how(c) for c in commands()]
    assert not [rule for rule in (*RUN, *ELSEWHERE) if rule not in used]


def test_who_is_said_to_run_a_command_is_there() -> None:
    for by in {e.by for e in ELSEWHERE} | set(PAGES_WITH_A_TEST.values()):
        assert "/" not in by or (REPOSITORY / by).exists(), by
    for rule in (e for e in ELSEWHERE if e.shows):
        assert rule.shows in (REPOSITORY / rule.by).read_text(), rule
    for command in commands():
        if isinstance(how(command), Elsewhere):
            files = [word for word in command.words if re.match(r"(tests|bench)/", word)]
            assert all((REPOSITORY / file.partition("::")[0]).exists() for file in files), str(command)


async def run(chosen: Sequence[tuple[Run, Command]], directories: Sequence[Path], *, fleet: str = "") -> None:
    """Each must end as the table says; `fleet` is the coordinator's address."""
    asked = [
        [str(directory), words_of(rule, command, fleet)]
        for (rule, command), directory in zip(chosen, directories, strict=True)
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.run_commands", json.dumps(asked)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TERM": "dumb"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    for (rule, command), (code, said) in zip(chosen, json.loads(out), strict=True):
        assert code in rule.code, f"{command}\nended with {code}:\n{said}"
        assert rule.says in said, f"{command}\nsaid:\n{said}"


def words_of(rule: Run, command: Command, fleet: str) -> list[str]:
    words = [fleet if word == "HOST:PORT" else word for word in command.words]
    asks = fleet and words[0] == "weightplane" and "--addr" not in words
    return [*words, *rule.more.split(), *(("--coordinator", fleet) if asks else ())]


def files_of(command: Command, directory: Path, fleet: str = "127.0.0.1:7070") -> Path:
    """A directory with the files that the command's page shows, or those that come with the repository."""
    directory.mkdir()
    (directory / "fleet.toml").write_text((REPOSITORY / "deploy" / "fleet.toml").read_text())
    for block in blocks("toml", "python", page=command.place.partition(":")[0]):
        if named := re.match(r"# *(\w+\.(toml|py))\b", block.text):
            (directory / named[1]).write_text(block.text.replace("127.0.0.1:7070", fleet))
    return directory


async def test_commands_that_need_no_fleet_do_what_their_page_says(tmp_path: Path) -> None:
    chosen = list(to_run("alone"))
    places = [files_of(command, tmp_path / str(i)) for i, (_, command) in enumerate(chosen)]
    await run(chosen, places)


async def test_commands_that_look_at_a_fleet_and_act_on_it_do_what_their_page_says(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(state_dir=tmp_path / "weightplane-state")
        for engine in ("engine-0", "engine-1"):
            fleet.start_engine(engine)
        await fleet.wait_for_engines(2)
        await fleet.take_lease()
        await fleet.push(Weights())
        chosen = [*to_run("fleet"), *to_run("ends")]
        places = [files_of(c, tmp_path / str(i), fleet.address) for i, (_, c) in enumerate(chosen)]
        await run(chosen, places, fleet=fleet.address)
    finally:
        await fleet.close()
    chosen = list(to_run("after"))
    await run(chosen, [tmp_path] * len(chosen))


@pytest.mark.parametrize("words", ["weightplane frobnicate", "weightplane statuses", "make everything"])
def test_a_command_that_nobody_runs_is_found(words: str) -> None:
    assert how(Command("a page", words)) is None
