"""Trace files that people have, read one row at a time into request shapes.

    azure          Azure LLM inference traces of 2023 and 2024, CSV: TIMESTAMP (UTC, down to 100 ns), ContextTokens,
                   GeneratedTokens
    burstgpt       BurstGPT, CSV: Timestamp (s), Request tokens, Response tokens; without a response the request failed,
                   and is left out
    splitwise      splitwise-sim, CSV: arrival_timestamp (s), prompt_size, token_size
    vidur          Vidur, CSV: arrived_at or arrived_at_s (s) or neither, num_prefill_tokens, num_decode_tokens
    mooncake       Mooncake, JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per prompt block)
    llmservingsim  LLMServingSim's workloads and measured runs, JSON lines: arrival_time_ns (ns) or arrival_time (s),
                   input_toks, output_toks
    distserve      DistServe's simulator, JSON array: start_time (s), prompt_len, output_len
    sharegpt       ShareGPT, JSON array or lines, no times: the first message and its answer, as in vLLM's benchmark,
                   counted by a tokenizer

Times become seconds since the first row; they are read as whole nanoseconds, so that no digit of a date is lost.
A file may be gzipped, begin with a byte order mark, have either kind of line end, and lack the last one.

A row that is not what the format says raises `TraceError` with file, line and reason, or is counted and left out.
Must not know what becomes of the requests.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.workloads.request import RequestShape
from baton_experiments.workloads.workload import Counts, Shapes, Workload

CountTokens = Callable[[str], int]
Record = Mapping[str, Any]

_MAX_TOKENS = 2**31 - 1
_MAX_BLOCK_ID = 2**63 - 1
_MAX_NS = 10**21
_CHUNK = 1 << 16
_HEADER_ROWS = 100
"""Where the first object of a JSON file is broken, a format is looked for in so many."""
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_SECONDS = re.compile(r"(\d+)(?:\.(\d{1,9})0*)?", re.ASCII)


class TraceError(ConfigError):
    """A trace file is not what it should be. `file`, `line` (counted from 1; 0: the file as a whole) and `reason`."""

    def __init__(self, file: str, line: int, reason: str):
        super().__init__(f"{file}:{line}" if line else file, reason)
        self.file, self.line, self.reason = file, line, reason

    def __reduce__(self) -> tuple[object, ...]:
        return TraceError, (self.file, self.line, self.reason)


class _BadRow(Exception):
    """This row is malformed, for this reason."""


class _Broken(Exception):
    """Nothing after `line` can be read, for this reason."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


class _LeftOut(Exception):
    """This row is well-formed and not a request; the word is what to count it under."""


class _Row(msgspec.Struct, gc=False):
    time_ns: int | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Options(msgspec.Struct, frozen=True):
    count_tokens: CountTokens
    block_size: int


class Format(msgspec.Struct, frozen=True):
    """How one kind of file is recognised and read."""

    kind: str
    """csv or json."""
    fields: tuple[str, ...]
    """Columns, or keys of the first object, that make it this format."""
    parse: Callable[[Record, _Options], _Row]
    times: str
    """Unit and field of the arrival times, for the description."""


def read_trace(
    path: Path | str,
    format: str | None = None,
    *,
    skip_malformed: bool = False,
    count_tokens: CountTokens | None = None,
    block_size: int = 512,
    where: Mapping[str, str] | None = None,
) -> Workload:
    """The requests of a trace file, in its order, read anew at each iteration and never held.

    `format`: a name of `FORMATS`; None takes it from the header. `skip_malformed` leaves malformed rows out and
    counts them, in the workload's description. `count_tokens` gives the tokens of a text, for ShareGPT; without
    it they are estimated at 4 tokens for 3 words, and the description says so. `block_size`: tokens per hash id, for
    Mooncake. `where`: only rows whose fields have these values, such as {"Log Type": "API log"}.

    Raises TraceError if the file cannot be read or its format not be told, and while iterating for a malformed row.
    """
    path = Path(path)
    if block_size < 1:
        raise ConfigError("block_size", "must be positive", value=block_size, allowed=">= 1")
    name = detect_format(path) if format is None else format
    if name not in FORMATS:
        raise ConfigError("format", "is unknown", value=name, allowed=", ".join(FORMATS))
    header = _header(path, FORMATS[name].kind)
    _require_fields(path, name, header)
    has_times = name != "sharegpt" and (name != "vidur" or not {"arrived_at", "arrived_at_s"}.isdisjoint(header))
    if missing := [field for field in where or () if FORMATS[name].kind == "csv" and field not in header]:
        raise TraceError(str(path), 1, f"has no column {missing[0]!r} to choose rows by; it has {', '.join(header)}")
    options = _Options(count_tokens or estimate_tokens, block_size)
    description: dict[str, Any] = {
        "kind": "trace",
        "file": path.name,
        "format": name,
        "times": FORMATS[name].times if has_times else "none",
        "where": dict(where or {}),
        "malformed": "left out" if skip_malformed else "refused",
    }
    if name == "sharegpt":
        description["lengths"] = "counted by a tokenizer" if count_tokens else "estimated: 4 tokens for 3 words"
    if name == "mooncake":
        description["block_size"] = block_size
    source = partial(_shapes, path, FORMATS[name], options, dict(where or {}), skip_malformed)
    return Workload(source, description, has_times=has_times)


def detect_format(path: Path | str) -> str:
    """The format that a file's header or first object is of. Raises TraceError if it is none, or not readable."""
    path = Path(path)
    for kind in ("json", "csv"):
        header = _header(path, kind)
        for name, format in FORMATS.items():
            if format.kind == kind and header.issuperset(format.fields):
                return name
    raise TraceError(str(path), 1, f"is of no known format by its header; name one of {', '.join(FORMATS)}")


def estimate_tokens(text: str) -> int:
    """4 tokens for 3 words, rounded up: OpenAI's rule of thumb for English text. For other languages it is far off."""
    return -(-len(text.split()) * 4 // 3)


def _shapes(
    path: Path, format: Format, options: _Options, where: dict[str, str], skip_malformed: bool, counts: Counts
) -> Shapes:
    first = last = None
    if skip_malformed:
        counts["malformed"] = 0
    with _opened(path) as (file, position):
        for line, record in _records(file, format.kind, position):
            try:
                if isinstance(record, _BadRow):
                    raise record
                if any(str(record.get(field)) != value for field, value in where.items()):
                    continue
                row = format.parse(record, options)
                at = row.time_ns if row.time_ns is not None else 0
                if first is None or last is None:
                    first = at
                elif at < last:
                    raise _BadRow("arrives before the row above it; sort the file by time")
            except _BadRow as e:
                if not skip_malformed:
                    raise TraceError(str(path), line, str(e)) from None
                counts["malformed"] += 1
                continue
            except _LeftOut as e:
                counts[str(e)] = counts.get(str(e), 0) + 1
                continue
            last = at
            yield RequestShape(
                (at - first) / 1e9,
                row.prompt_tokens,
                row.output_tokens,
                row.blocks,
                options.block_size if row.blocks else 0,
            )


# Files.


class _Position:
    line = 0


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.TextIOBase, _Position]]:
    """The text of a file, gzipped or not; what goes wrong while it is read becomes a TraceError."""
    position = _Position()
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            binary: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
                yield file, position
    except _Broken as e:
        raise TraceError(str(path), e.line, str(e)) from None
    except UnicodeDecodeError as e:
        raise TraceError(
            str(path), position.line + 1, f"this line or one soon after is not UTF-8 text: {e.reason}"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise TraceError(str(path), position.line + 1, f"about here the gzip data is damaged or cut: {e}") from None
    except OSError as e:
        raise TraceError(str(path), 0, f"cannot be read: {e.strerror or e}") from None


def _header(path: Path, kind: str) -> set[str]:
    """Columns of the first line, or keys of the first whole object; empty if it is not of this kind."""
    with _opened(path) as (file, position):
        if kind == "csv":
            try:
                return {name.strip() for name in next(csv.reader(file), [])}
            except csv.Error:
                return set()
        rows = (record for _, record in islice(_records(file, kind, position), _HEADER_ROWS))
        return next((set(record) for record in rows if not isinstance(record, _BadRow)), set())


def _require_fields(path: Path, name: str, header: set[str]) -> None:
    missing = [field for field in FORMATS[name].fields if field not in header]
    if missing:
        found = f"it has {', '.join(sorted(header))}" if header else f"it is no {FORMATS[name].kind.upper()}, or empty"
        raise TraceError(str(path), 1, f"has no {missing[0]!r}, which the format {name} needs; {found}")


def _records(file: io.TextIOBase, kind: str, position: _Position) -> Iterator[tuple[int, Record | _BadRow]]:
    return _csv_records(file, position) if kind == "csv" else _json_records(file, position)


def _csv_records(file: io.TextIOBase, position: _Position) -> Iterator[tuple[int, Record | _BadRow]]:
    rows = csv.reader(file)
    header = [name.strip() for name in next(rows, [])]
    while True:
        position.line = rows.line_num
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as e:
            yield line, _BadRow(f"is not CSV: {e}")
            continue
        if not row:
            continue
        if len(row) != len(header):
            yield line, _BadRow(f"has {len(row)} fields, the header {len(header)}")
        else:
            yield line, dict(zip(header, row, strict=True))


def _json_records(file: io.TextIOBase, position: _Position) -> Iterator[tuple[int, Record | _BadRow]]:
    """Objects of a JSON array or of JSON lines, with the line each begins on."""
    start = file.read(1)
    while start.isspace():
        position.line += start == "\n"
        start = file.read(1)
    if start == "[":
        yield from _array_records(file, position)
        return
    line = start + file.readline()
    while line:
        position.line += 1
        if line.strip():
            yield position.line, _parsed(line)
        line = file.readline()


def _parsed(text: str) -> Record | _BadRow:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as e:
        return _BadRow(
            f"is not JSON: {e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else f"is not JSON: {e}"
        )
    return record if isinstance(record, dict) else _BadRow("is not a JSON object")


def _array_records(file: io.TextIOBase, position: _Position) -> Iterator[tuple[int, Record | _BadRow]]:
    """After the `[`. Holds one object at a time; after a broken one nothing tells where the next begins."""
    decoder = json.JSONDecoder()
    buffer, line, wanted = "", position.line + 1, _CHUNK
    while True:
        stripped = buffer.lstrip(" \t\r\n,")
        line += buffer.count("\n", 0, len(buffer) - len(stripped))
        buffer, position.line = stripped, line - 1
        if buffer.startswith("]"):
            return
        try:
            record, end = decoder.raw_decode(buffer)
        except json.JSONDecodeError as e:
            more = file.read(wanted) if _may_go_on(e) else ""
            if not more:
                reason = f"is not JSON from here: {e.msg}" if buffer else "ends within its array"
                raise _Broken(line, reason) from None
            buffer += more
            wanted = len(buffer)  # doubles, so that a large object is not decoded from its start many times
            continue
        except (ValueError, RecursionError) as e:
            raise _Broken(line, f"is not JSON from here: {e}") from None
        yield line, record if isinstance(record, dict) else _BadRow("is not a JSON object")
        line += buffer.count("\n", 0, end)
        buffer, wanted = buffer[end:], _CHUNK


def _may_go_on(error: json.JSONDecodeError) -> bool:
    """Whether more text might mend it: it is at the end, give or take an escape, or in an open string."""
    return error.pos >= len(error.doc) - len(r"\u0000\u0000") or error.msg.startswith("Unterminated string")


# Fields.


def _field(record: Record, *names: str) -> Any:
    for name in names:
        if name in record and record[name] is not None:
            return record[name]
    raise _BadRow(f"has no {names[0]}")


def _tokens(record: Record, name: str, *, least: int = 1) -> int:
    value = _field(record, name)
    try:
        if isinstance(value, bool):
            raise ValueError
        tokens = int(value)
        if tokens != value and not isinstance(value, str):
            raise ValueError
    except (ValueError, OverflowError, TypeError):
        raise _BadRow(f"{name} is not a whole number of tokens: {value!r}") from None
    if not least <= tokens <= _MAX_TOKENS:
        raise _BadRow(f"{name} must be at least {least} and less than 2^31: {value!r}")
    return tokens


def _seconds(record: Record, *names: str, per_second: int = 1) -> int:
    """A time in seconds, or `per_second` to a second, as nanoseconds."""
    value = _field(record, *names)
    name = next(name for name in names if record.get(name) is not None)
    scale = 10**9 // per_second
    try:
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, int):
            time_ns = value * scale
        elif isinstance(value, float):
            whole = math.floor(value)
            time_ns = whole * scale + round((value - whole) * scale)
        elif match := _SECONDS.fullmatch(value.strip()):
            time_ns = (int(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))) // per_second
        else:
            seconds = Decimal(value.strip())
            if not abs(seconds) * 10**9 < _MAX_NS:
                raise ValueError
            time_ns = round(seconds * scale)
        if not abs(time_ns) < _MAX_NS:
            raise ValueError
    except (ValueError, ArithmeticError, AttributeError):
        raise _BadRow(f"{name} is not a time in numbers: {value!r}") from None
    return time_ns


def _date(record: Record, name: str) -> int:
    """A date and time, UTC unless it names an offset, as nanoseconds since the year 1."""
    value = _field(record, name)
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        year, month, day, hour, minute, second = map(int, match.groups()[:6])
        if hour > 23 or minute > 59 or second > 60:
            raise ValueError
        days = date(year, month, day).toordinal()
    except ValueError:
        raise _BadRow(f"{name} is not a date and time such as 2023-11-16 18:15:46.6805900: {value!r}") from None
    time_s = ((days * 24 + hour) * 60 + minute) * 60 + second
    if match[8]:
        offset = (int(match[9]) * 60 + int(match[10])) * 60
        time_s -= offset if match[8] == "+" else -offset
    return time_s * 10**9 + int((match[7] or "").ljust(9, "0"))


# Formats.


def _azure(record: Record, options: _Options) -> _Row:
    return _Row(_date(record, "TIMESTAMP"), _tokens(record, "ContextTokens"), _tokens(record, "GeneratedTokens"))


def _burstgpt(record: Record, options: _Options) -> _Row:
    time_ns = _seconds(record, "Timestamp")
    prompt, output = _tokens(record, "Request tokens", least=0), _tokens(record, "Response tokens", least=0)
    if prompt == 0 or output == 0:
        raise _LeftOut("failed")
    return _Row(time_ns, prompt, output)


def _splitwise(record: Record, options: _Options) -> _Row:
    return _Row(_seconds(record, "arrival_timestamp"), _tokens(record, "prompt_size"), _tokens(record, "token_size"))


def _vidur(record: Record, options: _Options) -> _Row:
    timed = "arrived_at" in record or "arrived_at_s" in record
    time_ns = _seconds(record, "arrived_at", "arrived_at_s") if timed else None
    return _Row(time_ns, _tokens(record, "num_prefill_tokens"), _tokens(record, "num_decode_tokens"))


def _mooncake(record: Record, options: _Options) -> _Row:
    time_ns = _seconds(record, "timestamp", per_second=1000)
    prompt, output = _tokens(record, "input_length"), _tokens(record, "output_length")
    blocks = _field(record, "hash_ids")
    if not isinstance(blocks, list) or not all(type(b) is int and 0 <= b <= _MAX_BLOCK_ID for b in blocks):
        raise _BadRow("hash_ids is not a list of whole numbers from 0 to 2^63 - 1")
    most = -(-prompt // options.block_size)
    if len(blocks) > most:
        size = options.block_size
        raise _BadRow(f"hash_ids names {len(blocks)} blocks of {size} tokens, input_length {prompt} has {most}")
    return _Row(time_ns, prompt, output, tuple(blocks))


def _llmservingsim(record: Record, options: _Options) -> _Row:
    if "sub_requests" in record:
        raise _BadRow("is a session whose calls wait for one another; arrivals here are not made to wait")
    if record.get("arrival_time_ns") is not None:
        time_ns = _seconds(record, "arrival_time_ns", per_second=10**9)
    else:
        time_ns = _seconds(record, "arrival_time")
    return _Row(time_ns, _tokens(record, "input_toks"), _tokens(record, "output_toks"))


def _distserve(record: Record, options: _Options) -> _Row:
    return _Row(_seconds(record, "start_time"), _tokens(record, "prompt_len"), _tokens(record, "output_len"))


def _count(message: Any, options: _Options) -> int:
    text = message.get("value") if isinstance(message, dict) else None
    if not isinstance(text, str):
        raise _BadRow("conversations holds a message without a text `value`")
    return options.count_tokens(text)


def _sharegpt(record: Record, options: _Options) -> _Row:
    messages = _field(record, "conversations")
    if not isinstance(messages, list):
        raise _BadRow("conversations is not a list")
    if len(messages) < 2:
        raise _LeftOut("without an answer")
    prompt, output = (_count(message, options) for message in messages[:2])
    if prompt < 1 or output < 1:
        raise _LeftOut("empty")
    return _Row(None, prompt, output)


FORMATS: dict[str, Format] = {
    "azure": Format("csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, "TIMESTAMP, date and time, UTC"),
    "burstgpt": Format("csv", ("Timestamp", "Request tokens", "Response tokens"), _burstgpt, "Timestamp, s"),
    "splitwise": Format("csv", ("arrival_timestamp", "prompt_size", "token_size"), _splitwise, "arrival_timestamp, s"),
    "vidur": Format("csv", ("num_prefill_tokens", "num_decode_tokens"), _vidur, "arrived_at, s"),
    "mooncake": Format("json", ("timestamp", "input_length", "output_length", "hash_ids"), _mooncake, "timestamp, ms"),
    "llmservingsim": Format(
        "json", ("input_toks", "output_toks"), _llmservingsim, "arrival_time_ns, ns; arrival_time, s"
    ),
    "distserve": Format("json", ("start_time", "prompt_len", "output_len"), _distserve, "start_time, s"),
    "sharegpt": Format("json", ("conversations",), _sharegpt, "none"),
}
