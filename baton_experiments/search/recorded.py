"""Recorded logs as workloads: trace files in every format of `baton_experiments.workloads`, and what Baton writes.

    router log   lines of `baton.router.requests`, as text or JSON, among any others; a request came `total_ms` before
                 its line was written
    records.csv  of an experiment's results: one point of it, by its arrivals within that

Must not know what becomes of the requests.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton_experiments.workloads import FORMATS, RequestShape, TraceError, Workload, read_trace
from baton_experiments.workloads.workload import Counts, Shapes

OWN_FORMATS = ("router", "records")
LOGGER = "baton.router.requests"
_HEAD_LINES = 10_000
"""Among which a log has at least one line of a request."""
_TEXT = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) \d+ [A-Z]+ "
    rf"{re.escape(LOGGER)}: request \S+ (ended|was refused): (.*)"
)
_MAX_FIELD = 1 << 24
"""All gaps of a request are in one."""
_POINT = ("placement", "chunk_tokens", "engine", "rate", "seed")
"""Columns of an experiment's records that tell its points apart."""


def read_recorded(path: Path | str, format: str | None = None, *, where: Mapping[str, str] | None = None) -> Workload:
    """The requests of a recorded log, with the times at which they came.

    `format`: `router`, `records`, or one of `baton_experiments.workloads.FORMATS`; None: told from the file. `where`:
    only rows whose fields have these values. Raises ConfigError for another format, and TraceError if the file cannot
    be read or holds no requests, some of it only while iterating.
    """
    path = Path(path)
    if format is not None and format not in (*OWN_FORMATS, *FORMATS):
        raise ConfigError("--format", "is unknown", value=format, allowed=", ".join((*OWN_FORMATS, *FORMATS)))
    kind = format or _kind(path)
    if kind == "router":
        return Workload(lambda counts: iter(_log(path, counts)), {"kind": "router log", "file": path.name})
    if kind == "records":
        chosen = dict(where or {})
        description = {"kind": "experiment", "file": path.name, "where": chosen}
        return Workload(lambda counts: iter(_records(path, chosen, counts)), description)
    workload = read_trace(path, kind if kind != "trace" else None, where=where)
    if not workload.has_times:
        raise TraceError(str(path), 0, "has no arrival times, so it cannot be replayed")
    return workload


def _kind(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
            if {"at_s", "prompt_tokens", "output_tokens"} <= set(first.strip().split(",")):
                return "records"
            if any(_fields(line) is not None for line in (first, *islice(file, _HEAD_LINES))):
                return "router"
    except OSError as e:
        raise TraceError(str(path), 0, f"cannot be read: {e.strerror or e}") from None
    return "trace"


def _fields(line: str) -> dict[str, Any] | None:
    """What a line tells of a request; None for any other line. `time`: seconds, when it was written."""
    if LOGGER not in line:
        return None
    if match := _TEXT.search(line):
        when = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1e3
        if match[3] != "ended":
            return {"time": when}
        return {"time": when} | dict(word.split("=", 1) for word in match[4].split() if "=" in word)
    try:
        tree = json.loads(line[line.index("{") :])
        if tree.get("logger") != LOGGER:
            return None
        return {**tree, "time": datetime.fromisoformat(tree["time"]).timestamp()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _log(path: Path, counts: Counts) -> list[RequestShape]:
    """In order of arrival; a log is in order of ends, so all of it is read first."""
    found: list[tuple[float, int, int]] = []
    counts |= {"without tokens": 0}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            fields = _fields(line)
            if fields is None:
                continue
            try:
                prompt, output = int(fields["prompt_tokens"]), int(fields["completion_tokens"])
                at = fields["time"] - float(fields["total_ms"]) / 1e3
            except (KeyError, ValueError, TypeError):
                counts["without tokens"] += 1  # refused, or failed before anything came of it
                continue
            if prompt < 1 or output < 1:
                counts["without tokens"] += 1
                continue
            if not math.isfinite(at):
                raise TraceError(str(path), number, f"total_ms is no time: {fields['total_ms']}")
            found.append((at, prompt, output))
    if not found:
        raise TraceError(
            str(path), 0, f"has no line of {LOGGER} that tells of an answered request; log_level: info does"
        )
    found.sort()
    return [RequestShape(at - found[0][0], prompt, output) for at, prompt, output in found]


def _records(path: Path, where: dict[str, str], counts: Counts) -> Shapes:
    counts |= {"failed": 0, "without tokens": 0}
    points: set[tuple[str, ...]] = set()
    found: list[tuple[float, int, int]] = []
    csv.field_size_limit(_MAX_FIELD)
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        columns = [name for name in _POINT if name in (rows.fieldnames or ())]
        for line, row in enumerate(rows, 2):
            if any(row.get(field) != value for field, value in where.items()):
                continue
            points.add(tuple(row[name] for name in columns))
            if len(points) > 1:
                names = " and ".join(f"{n} {v}" for n, v in zip(columns, sorted(points)[0], strict=True) if v)
                reason = f"holds more than one point; choose one with --where, such as the one of {names}"
                raise TraceError(str(path), line, reason)
            try:
                if row.get("error"):
                    counts["failed"] += 1
                    continue
                at, prompt, output = float(row["at_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
                if not math.isfinite(at):
                    raise ValueError(f"at_s is no time: {row['at_s']}")
                if prompt < 1 or output < 1:
                    counts["without tokens"] += 1
                else:
                    found.append((at, prompt, output))
            except (TypeError, ValueError) as e:
                raise TraceError(str(path), line, f"is no record of an experiment: {e}") from None
    if not found:
        raise TraceError(str(path), 0, "has no records " + ("with these values" if where else "of answered requests"))
    found.sort()
    return _shapes(found)


def _shapes(found: list[tuple[float, int, int]]) -> Iterator[RequestShape]:
    for at, prompt, output in found:
        yield RequestShape(at - found[0][0], prompt, output)
