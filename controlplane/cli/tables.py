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
UNBOUNDED = 10_000


class _Fitting(Table):
    """Two spaces between columns; one where it would not fit else."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = self.__rich_measure__(console, options.update(width=UNBOUNDED)).maximum
        if natural > options.max_width:
            self.padding = (0, 1, 0, 0)
            for column in self.columns:
                column.no_wrap = _is_short(str(column.header)) and all(_is_short(str(c)) for c in column.cells)
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


def _is_short(text: str) -> bool:
    return " " not in text and len(text) <= WHOLE
