"""The documentation without running it: links lead somewhere, settings are taken, code compiles and names what exists,
commands and options are there."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import weightplane
from controlplane.cli.main import app
from controlplane.cli.up.settings import checked
from controlplane.config import load
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.rollout.sample import Sample
from engine_agent.daemon.settings import EngineSettings
from tests.support import documents
from tests.support.documents import PAGES, REPOSITORY, Block, blocks, page_name
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.rank import PendingPush, PushReport

LOADERS = {"engine": EngineSettings, "trainer": TrainerSettings, "coordinator": CoordinatorSettings}
"""By the name in the first line of a TOML block, `# engine.toml`."""
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "engine": {"engine_id": "engine-0"},
    "trainer": {"coordinator": "coordinator:7070"},
    "coordinator": {},
}
"""What a page that shows a part of a file leaves out."""
NOT_OURS = ("slime",)
"""Projects whose code pages show and that are not installed; a test beside them runs those blocks."""
OURS: dict[str, Any] = {
    "rank": weightplane.TrainerRank,
    "rollouts": weightplane.RolloutClient,
    "ahead": weightplane.RolloutsAhead,
    "guard": weightplane.LagGuard,
}
"""What a variable of this name is, where a page does not say how it was made."""
RETURNED = {cls.__name__: cls for cls in (weightplane.TrainerRank, PushReport, PendingPush, Sample)}
RUN_ELSEWHERE = {
    ("docs/operations.md", "def train(rank, model, rollouts, steps)"): "tests/integration/test_time_sharing.py",
}
"""Blocks whose own test runs them, with other things under these names."""


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in documents.links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_name(page)}: {link}"
        if anchor:
            assert anchor in documents.anchors(target), f"{page_name(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    gone = [place for place in documents.places(page) if not (REPOSITORY / place).exists()]
    assert not gone, page_name(page)


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set[Path](), [REPOSITORY / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in documents.links(page)]
        waiting += [target for target in targets if target in PAGES]
    assert not [page_name(page) for page in PAGES if page not in reached and page.parent.name == "docs"]


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_the_daemons_take_the_settings_that_a_page_shows(block: Block, tmp_path: Path) -> None:
    named = re.match(r"# *(\w+)\.toml\b", block.text)
    assert named, f"{block}: its first line says which file it is, such as # engine.toml"
    file = tmp_path / f"{named[1]}.toml"
    file.write_text(block.text)
    if named[1] == "fleet":
        assert checked(file).engines
    else:
        assert named[1] in LOADERS, f"{block}: no daemon reads {named[1]}.toml"
        missing = {k: v for k, v in GIVEN[named[1]].items() if k not in tomllib.loads(block.text)}
        load(LOADERS[named[1]], file, missing)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_of_a_page_is_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


# ---- Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_of_a_page_compiles_and_names_what_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    _check_imports(tree)
    if not any(block.page == page and mark in block.text for page, mark in RUN_ELSEWHERE):
        problems = list(_unknown_names(tree))
        assert not problems, f"{block}: {problems}"


def test_what_another_test_is_said_to_run_is_there() -> None:
    for (page, mark), test in RUN_ELSEWHERE.items():
        assert (REPOSITORY / test).exists()
        assert [b for b in blocks("python", page=page) if mark in b.text], (page, mark)


def _check_imports(tree: ast.Module) -> None:
    """By reading files: to import vLLM takes longer than all other tests of this module."""
    for node in ast.walk(tree):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in NOT_OURS:
            modules = [node.module]
            text = _source(node.module)
            for name in node.names:
                assert re.search(rf"^\s*(class |def |async def |\"|'|)\b{name.name}\b", text, re.M), (
                    node.module,
                    name.name,
                )
        assert all(_source(module) is not None for module in modules)


def _source(module: str) -> str:
    """The text of a module that is installed, which is not imported."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None, f"{top} is not installed"
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    files = [
        f for root in roots for f in (root.joinpath(*rest, "__init__.py"), root.joinpath(*rest).with_suffix(".py"))
    ]
    files += [Path(spec.origin)] if spec.origin and not rest else []
    found = [file for file in files if file.is_file()]
    assert found, f"there is no {module}"
    return found[0].read_text()


def _unknown_names(tree: ast.Module) -> Iterator[str]:
    """Attributes and keywords that what a page calls does not have."""
    names = OURS | dict.fromkeys(_of_others(tree))
    names |= _bound(tree, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := _known(node.value, names)) and not hasattr(owner, node.attr):
            yield f"{owner.__name__} has no {node.attr}"
        if isinstance(node, ast.Call) and (called := _known(node.func, names)):
            takes = inspect.signature(called).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                yield from (f"{called.__name__} takes no {k.arg}" for k in node.keywords if k.arg not in takes)


def _of_others(tree: ast.Module) -> Iterator[str]:
    """Names that a block imports from another project, and may share with ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in NOT_OURS:
            yield from (name.asname or name.name for name in node.names)


def _bound(tree: ast.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Variables that hold what a class or method of ours returns, by its annotation."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.With | ast.AsyncWith):
            pairs = [(item.context_expr, item.optional_vars) for item in node.items]
        elif isinstance(node, ast.Assign):
            pairs = [(node.value, node.targets[0])]
        for value, target in pairs:
            call = value.value if isinstance(value, ast.Await) else value
            made = _returned(_known(call.func, names | found)) if isinstance(call, ast.Call) else None
            if isinstance(target, ast.Name):
                found[target.id] = made
    return found


def _returned(called: Any) -> Any:
    if called is None or inspect.isclass(called):
        return called
    return RETURNED.get(str(inspect.signature(called).return_annotation))


def _known(node: ast.expr, names: dict[str, Any]) -> Any:
    """The public name, or the class or method of ours, that an expression stands for; else None."""
    if isinstance(node, ast.Name):
        if node.id in names:
            return names[node.id]
        return getattr(weightplane, node.id) if node.id in weightplane.__all__ else None
    if isinstance(node, ast.Attribute) and (owner := _known(node.value, names)):
        return getattr(owner, node.attr, None)
    return None


# ---- commands -----------------------------------------------------------------------------------


COMMAND: Any = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_in_a_pages_prose_exist_with_their_options(page: Path) -> None:
    for code in documents.inline_code(page):
        words = code.split()
        if words[0] == "weightplane" and len(words) > 1:
            _check_command(words[1:], f"{page_name(page)}: {code}")
        if words[0] == "make" and len(words) > 1 and words[1].islower():
            assert words[1] in TARGETS, f"{page_name(page)}: {code}"


def _check_command(words: list[str], place: str) -> None:
    command = COMMAND
    options = _options(command)
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            name = word.partition("=")[0].rstrip("].,")
            assert name in options or not name.strip("-…"), f"{place}: no {name}"
        elif hasattr(command, "commands") and word.strip("[]|").isidentifier() and not word.isupper():
            names = word.split("|")
            assert all(name in command.commands for name in names), f"{place}: no command {word}"
            command = command.commands[names[0]]
            options |= _options(command)


def _options(command: Any) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
