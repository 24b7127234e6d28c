"""Tables on a terminal, all of one look. Cells are text: a name with brackets in it is no markup.

A narrow terminal wraps what is in the cells, and never a word of a heading. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text


def new_table(*columns: str) -> Table:
    """Empty; `add_row` fills it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
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
