"""What the documentation is made of: pages, fenced blocks, commands, links. Read from the files, and from nothing else.

A page of another form than this reads is refused by the tests that use it, not passed over.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    ((?:pytest|python|make|weightplane) .+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_SHELL_WORD = re.compile(r"\w+=\S*\Z")
_PLACE = re.compile(
    r"(?:bench|controlplane|deploy|docs|engine_agent|examples|protos|tests|trainer_agent)/[\w./@-]*[\w/]\Z"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: str
    """Relative to the repository."""
    line: int
    kind: str
    """`sh`, `toml`, `python`, …; empty where the fence says nothing."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page, as a reader types it."""

    place: str
    text: str
    shown: bool = False
    """It stands in a recorded session, after `$`."""

    @property
    def words(self) -> list[str]:
        """Without the variables that are set before it, and without comments."""
        words = shlex.split(self.text, comments=True)
        while words and _SHELL_WORD.match(words[0]):
            words.pop(0)
        return words

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def page_name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(*kinds: str, page: str | None = None) -> list[Block]:
    """Of all pages, or of one; of these kinds, or of all."""
    chosen = [p for p in PAGES if page is None or page_name(p) == page]
    return [block for p in chosen for block in _blocks(p) if not kinds or block.kind in kinds]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        indent = len(found["indent"])
        body = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
        yield Block(page_name(page), text[: found.start()].count("\n") + 1, found["kind"], body)


def commands() -> Iterator[Command]:
    """Of every `sh` block, those that stand indented by themselves, and those that sessions show after `$`."""
    for block in blocks("sh"):
        text = block.text.replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        yield from (Command(str(block), line) for line in lines if line and not line.startswith("#"))
    for page in PAGES:
        for found in _INDENTED.finditer(_prose(page)):
            yield Command(page_name(page), found[1])
    for block in blocks("text"):
        lines = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        yield from (Command(str(block), line, shown=True) for line in lines)


def inline_code(page: Path) -> list[str]:
    """What stands between single backquotes, outside fences."""
    return _INLINE.findall(_prose(page))


def places(page: Path) -> list[str]:
    """Files and folders of the repository that its prose names."""
    return [code for code in inline_code(page) if _PLACE.match(code)]


def links(page: Path) -> list[str]:
    """Targets of its links, pictures too."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _prose(page)))


def anchors(page: Path) -> set[str]:
    """What its headings are called in links, by GitHub's rule."""
    seen: dict[str, int] = {}
    names: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())
