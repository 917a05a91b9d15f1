"""Tables of measured times: how files of them are read, and what they say between their points.

Between two points a table is linear, below its first it is flat, beyond its last it goes on as between the last two,
but never falls. Plain arithmetic. Must not know what was measured.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from baton.errors import ConfigError


class Row:
    """One line of a CSV file, which is asked for its fields and names the place of those that are wrong."""

    __slots__ = ("_fields", "place")

    def __init__(self, place: str, fields: dict[str, str]):
        self.place = place
        self._fields = fields

    def __contains__(self, column: str) -> bool:
        return column in self._fields

    def text(self, column: str) -> str:
        return self._fields[column]

    def number(self, column: str, *, scale: float = 1.0) -> float:
        """Finite and not negative, times `scale`. Raises ConfigError."""
        text = self._fields[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(self.place, f"{column} is no time or size", value=text, allowed="a number, >= 0")
        return value * scale

    def count(self, column: str) -> int:
        """A whole number that is not negative. Raises ConfigError."""
        value = self.number(column)
        if value != int(value):
            raise ConfigError(self.place, f"{column} is no whole number", value=self._fields[column])
        return int(value)


def read_rows(path: Path, columns: Iterable[str]) -> list[Row]:
    """All lines of a CSV file that has these columns, in order. Raises ConfigError that names file, line and reason."""
    header, lines = _read(path)
    missing = [column for column in columns if column not in header]
    if missing:
        raise ConfigError(f"{path}:1", f"has no column {missing[0]}", allowed=f"it has {', '.join(header) or 'none'}")
    rows = []
    for number, line in lines:
        if len(line) != len(header):
            raise ConfigError(f"{path}:{number}", f"has {len(line)} fields, the header {len(header)}")
        rows.append(Row(f"{path}:{number}", dict(zip(header, line, strict=True))))
    if not rows:
        raise ConfigError(str(path), "holds no measurements, only a header")
    return rows


def header_of(path: Path) -> frozenset[str]:
    """The columns of a CSV file; empty for what is none."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return frozenset(next(csv.reader(file), []))
    except (OSError, UnicodeDecodeError, csv.Error):
        return frozenset()


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            return header, [(reader.line_num, line) for line in reader if line]
    except OSError as e:
        raise ConfigError(str(path), f"cannot be read: {e.strerror or e}") from None
    except (UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(str(path), f"is no CSV file: {e}") from None


class Curve(msgspec.Struct, frozen=True):
    """One number that depends on another."""

    xs: tuple[float, ...]
    """Rising."""
    ys: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Of the values at one place, the median counts."""
        by_x: defaultdict[float, list[float]] = defaultdict(list)
        for x, y in points:
            by_x[x].append(y)
        xs = tuple(sorted(by_x))
        return cls(xs, tuple(float(median(by_x[x])) for x in xs))

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        low, share = place(xs, x)
        return _between(ys[low], ys[low + 1], share)

    def plus(self, other: Curve, times: float = 1.0) -> Curve:
        """This and `times` the other, at the points of both."""
        xs = sorted({*self.xs, *other.xs})
        return Curve(tuple(xs), tuple(self(x) + times * other(x) for x in xs))

    def scaled(self, factor: float) -> Curve:
        return Curve(self.xs, tuple(y * factor for y in self.ys))


class Plane(msgspec.Struct, frozen=True):
    """One number that depends on two: a curve for each row."""

    rows: tuple[float, ...]
    """Rising."""
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> Plane:
        """Of `(row, column, value)`.

        Published tables are unions of sweeps. Rows that begin later than others are of one that covers a part of the
        range: below it they would be flat, so they are left out.
        """
        table: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
        for row, column, value in points:
            table[row].append((column, value))
        curves = {row: Curve.of(values) for row, values in table.items()}
        first = min(curve.xs[0] for curve in curves.values())
        rows = tuple(sorted(row for row, curve in curves.items() if curve.xs[0] == first))
        return cls(rows, tuple(curves[row] for row in rows))

    def __call__(self, row: float, column: float) -> float:
        low, share = place(self.rows, row)
        here = self.curves[low](column)
        return here if not share else _between(here, self.curves[low + 1](column), share)


def place(axis: Sequence[float], x: float) -> tuple[int, float]:
    """The point of a rising axis that `x` follows, and how far on the way to the next one it is.

    Before the first: the first. Beyond the last: the last but one, and a share above 1.
    """
    if x <= axis[0] or len(axis) == 1:
        return 0, 0.0
    low = min(bisect_right(axis, x), len(axis) - 1) - 1
    return low, (x - axis[low]) / (axis[low + 1] - axis[low])


def _between(low: float, high: float, share: float) -> float:
    """Beyond `high` (a share above 1) it does not fall."""
    return high if share > 1 and high < low else low + share * (high - low)


def common_axes(columns_of: dict[float, frozenset[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rows that reach from end to end of the one with the most columns, and the columns that all of these have."""
    widest = max(columns_of.values(), key=lambda columns: (len(columns), max(columns)))
    low, high = min(widest), max(widest)
    rows = tuple(sorted(row for row, columns in columns_of.items() if low in columns and high in columns))
    common = frozenset.intersection(*(columns_of[row] for row in rows))
    return rows, tuple(sorted(common))


def rising(points: Iterable[tuple[float, float]], *, least: float = 0.9) -> tuple[Curve, list[float]]:
    """A curve without the points that fall below `least` of the one before, and where those were."""
    curve = Curve.of(points)
    kept, dropped = [(curve.xs[0], curve.ys[0])], []
    for x, y in zip(curve.xs[1:], curve.ys[1:], strict=True):
        if y < least * kept[-1][1]:
            dropped.append(x)
        else:
            kept.append((x, y))
    return Curve.of(kept), dropped
