"""What several commands have in common: whom they ask, how long they wait, where they print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

SHORTEST_SECONDS = 0.1
"""Less is no wait in which anybody could answer."""


def address(text: str) -> str:
    """As given. Refuses what is no address: that nobody answers there would be true, and no help."""
    from controlplane.rpc.addresses import split_address

    try:
        split_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Coordinator = Annotated[str, typer.Option("--coordinator", metavar="HOST:PORT", help="Whom to ask.", callback=address)]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Longest wait for an answer.", min=SHORTEST_SECONDS)
]
DEFAULT_COORDINATOR = "127.0.0.1:7070"
DEFAULT_SECONDS = 5.0
WIDTH_OF_FILES = 240
"""A pipe or a file has no width: one engine is one line there."""


def new_console() -> Console:
    """Standard output, for tables."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    return console
