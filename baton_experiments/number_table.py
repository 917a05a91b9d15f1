"""A table for terminals that never cuts a number: what does not fit beside goes below.

A number that is cut reads as another one, so no cell of such a table ends in an ellipsis. Must not know what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

_UNLIMITED = 100_000
"""Columns of a terminal."""


class _Column(msgspec.Struct):
    name: str
    group: str
    is_key: bool
    is_right: bool
    cells: list[str] = msgspec.field(default_factory=list)

    def head(self, *, grouped: bool) -> list[str]:
        return [*([self.group] if grouped and self.group else []), *self.name.split("\n")]


class NumberTable:
    """Like `rich.table.Table`, of plain text. Key columns come first, and again in each part of a table that is split.

    Where it is wider than the terminal, groups of columns move into a part of their own; a group that is too wide even
    so is split as well.
    """

    def __init__(self, title: str):
        self.title = title
        self.caption: str | None = None
        self._columns: list[_Column] = []

    def add_column(self, name: str, *, group: str = "", is_key: bool = False, is_right: bool = True) -> None:
        """`group`: columns of one name follow each other under it; without one a column is a group of its own."""
        self._columns.append(_Column(name, group, is_key, is_right))

    def add_row(self, *cells: str) -> None:
        for column, cell in zip(self._columns, cells, strict=True):
            column.cells.append(cell)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts(console, options)
        for number, columns in enumerate(parts):
            table = self._table(columns)
            table.title = self.title if number == 0 else None
            table.caption = self.caption if number == len(parts) - 1 else None
            yield table

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[_Column]]:
        keys = [column for column in self._columns if column.is_key]
        values = [(number, column) for number, column in enumerate(self._columns) if not column.is_key]

        def fits(columns: Sequence[_Column]) -> bool:
            whole = options.update(max_width=_UNLIMITED)
            return Measurement.get(console, whole, self._table([*keys, *columns])).maximum <= options.max_width

        parts: list[list[_Column]] = [[]]
        for _, members in groupby(values, key=lambda pair: pair[1].group or pair[0]):
            group = [column for _, column in members]
            if fits([*parts[-1], *group]):
                parts[-1] += group
                continue
            parts.append([])
            for column in group:
                if parts[-1] and not fits([*parts[-1], column]):
                    parts.append([])
                parts[-1].append(column)
        return [[*keys, *part] for part in parts if part] or [keys]

    def _table(self, columns: Sequence[_Column]) -> Table:
        """Its first columns wrap where there is no room beside a number, its numbers never."""
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        heads, before = [], ""
        for column in columns:
            heads.append(column.head(grouped=column.group != before))
            before = column.group
        lines = max(map(len, heads), default=0)
        for column, head in zip(columns, heads, strict=True):
            width = max(map(cell_len, [*head, *column.cells]), default=0)
            table.add_column(
                "\n".join([""] * (lines - len(head)) + head),
                justify="right" if column.is_right else "left",
                no_wrap=not column.is_key,
                min_width=None if column.is_key else width,
                overflow="fold",
            )
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        return table
