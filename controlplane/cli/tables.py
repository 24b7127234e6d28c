"""Tables on a terminal, all of one look. Cells are text: a name with brackets in it is no markup.

On a narrow terminal columns stand closer, then texts of several words are wrapped; short words and headings stay whole.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

WHOLE = 12
"""Longest word that is never cut."""
TEXT = 20
"""As wide a column of longer texts should be at least; else all stand closer."""


class _Fitting(Table):
    """Two spaces between columns; one where a column would be too narrow else."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        each = [[str(column.header), *map(str, column.cells)] for column in self.columns]
        wanted = sum(min(TEXT, max(map(len, texts))) for texts in each)
        if wanted + 2 * (len(each) - 1) > options.max_width:
            self.padding = (0, 1, 0, 0)
        for column, texts in zip(self.columns, each, strict=True):
            column.no_wrap = all(" " not in text and len(text) <= WHOLE for text in texts)
        yield from super().__rich_console__(console, options)


def new_table(*columns: str) -> Table:
    """Empty; `add_row` fills it."""
    table = _Fitting(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", min_width=max(map(len, column.split())))
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], where_said: Collection[str]) -> Table:
    """Those columns that are in `where_said` only where a row says something in them."""
    rows = list(rows)
    shown = [i for i, name in enumerate(columns) if name not in where_said or any(len(row[i]) for row in rows)]
    table = new_table(*(columns[i] for i in shown))
    for row in rows:
        add_row(table, *(row[i] for i in shown))
    return table
