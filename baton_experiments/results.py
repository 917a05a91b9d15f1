"""The folder that an experiment leaves, written and read.

    config.json        plan, resolved configuration, profile, workload, hardware, versions, commit
    records.parquet    a row per request, warm-up included: as its client saw it, each stage of its timeline a column
    records.csv        the same for programs without Parquet; gaps between tokens are joined by spaces
    steps.parquet      a row per engine step, where steps were recorded
    summary.json       points, goodput, verdict, engine, config, and what else a reader must know
    journal/           what the experiment goes on from (`baton_experiments.journal`)

Must not know how any of it was measured.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from baton.errors import ConfigError
from baton.step_log import StepRecord, StepShape
from baton.timeline import Stage
from baton_experiments.records import RequestRecord, Run, Steps

RECORDS, RECORDS_CSV, STEPS, SUMMARY = "records.parquet", "records.csv", "steps.parquet", "summary.json"

_STAGE_COLUMNS = {str(stage): f"{stage}_ms" for stage in Stage}
_RUN = pa.schema(
    [
        ("placement", pa.string()),
        ("chunk_tokens", pa.int64()),
        ("rate", pa.float64()),
        ("seed", pa.int64()),
        ("engine", pa.string()),
    ]
)
_RECORD = pa.schema(
    [
        *_RUN,
        ("index", pa.int64()),
        ("warmup", pa.bool_()),
        ("at_s", pa.float64()),
        ("received_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("ttft_ms", pa.float64()),
        ("latency_ms", pa.float64()),
        *((column, pa.float64()) for column in _STAGE_COLUMNS.values()),
        ("residual_ms", pa.float64()),
        ("prefill_worker", pa.string()),
        ("decode_worker", pa.string()),
        ("kv_bytes", pa.int64()),
        ("attempts", pa.int64()),
        ("error", pa.string()),
        ("tbt_ms", pa.list_(pa.float64())),
    ]
)
_STEP = pa.schema(
    [
        *_RUN,
        ("worker", pa.string()),
        ("start_s", pa.float64()),
        ("seconds", pa.float64()),
        *((f"shape_{name}", pa.int64()) for name in StepShape._fields),
        ("kv_blocks", pa.int64()),
        ("num_running", pa.int64()),
        ("num_waiting", pa.int64()),
    ]
)


class Result(msgspec.Struct):
    """A folder, read back."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[RequestRecord]
    steps: dict[Run, list[StepRecord]]


def write_records(folder: Path, records: Sequence[RequestRecord]) -> None:
    """Both files of them."""
    rows = [_record_row(record) for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema=_RECORD), folder / RECORDS, compression="zstd")
    with (folder / RECORDS_CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _RECORD.names)
        writer.writeheader()
        for row in rows:
            writer.writerow(row | {"tbt_ms": " ".join(f"{gap:.3f}" for gap in row["tbt_ms"])})


def write_steps(folder: Path, steps: Steps) -> None:
    with pq.ParquetWriter(folder / STEPS, _STEP, compression="zstd") as writer:
        for run, some in steps.items():
            columns: list[Sequence[Any]] = [[value] * len(some) for value in run]
            columns.append([step.worker for step in some])
            columns.append([step.start_s for step in some])
            columns.append([step.seconds for step in some])
            shapes = [step.shape for step in some]
            columns += [[shape[i] for shape in shapes] for i in range(len(StepShape._fields))]
            columns.append([step.kv_blocks for step in some])
            columns.append([step.num_running for step in some])
            columns.append([step.num_waiting for step in some])
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _STEP, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=_STEP))


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """As JSON, whatever has no number in it null."""
    path = folder / SUMMARY
    path.write_text(json.dumps(plain(summary), indent=1, allow_nan=False), encoding="utf-8")
    return path


def read_records(folder: Path) -> list[RequestRecord]:
    """Raises ConfigError if there are none."""
    return [_record(row) for row in _read(folder / RECORDS, _RECORD).to_pylist()]


def read_steps(folder: Path) -> dict[Run, list[StepRecord]]:
    """By run, each in order. Empty where none were recorded; ConfigError if there is no such file."""
    steps: dict[Run, list[StepRecord]] = defaultdict(list)
    columns = _read(folder / STEPS, _STEP).to_pydict()
    runs = zip(*(columns[name] for name in _RUN.names), strict=True)
    shapes = zip(*(columns[f"shape_{name}"] for name in StepShape._fields), strict=True)
    rest = (columns[name] for name in ("kv_blocks", "num_running", "num_waiting"))
    rows = zip(runs, columns["worker"], columns["start_s"], columns["seconds"], shapes, *rest, strict=True)
    for run, worker, start_s, seconds, shape, *load in rows:
        steps[Run(*run)].append(StepRecord(worker, start_s, seconds, StepShape(*shape), *load))
    return dict(steps)


def read_result(folder: Path) -> Result:
    """Raises ConfigError if `folder` holds no result of an experiment."""
    from baton_experiments.journal import read_config

    config = read_config(folder)
    if config is None:
        raise ConfigError(str(folder), "holds no result of an experiment: it has no config.json")
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(str(folder / SUMMARY), f"cannot be read: {e}") from e
    if not isinstance(summary, dict):
        raise ConfigError(str(folder / SUMMARY), "is not the summary of an experiment")
    return Result(folder, config, summary, read_records(folder), read_steps(folder))


def plain(value: Any) -> Any:
    """What JSON can say of it: no tuples, no numbers that are none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return plain(msgspec.to_builtins(value))


def _read(file: Path, schema: pa.Schema) -> pa.Table:
    """Its columns, which must be those of `schema`."""
    try:
        return pq.read_table(file).select(schema.names).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as e:
        raise ConfigError(str(file), f"cannot be read: {str(e).splitlines()[0]}") from e


def _record_row(record: RequestRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in _RECORD.names if name in record.__struct_fields__}
    return row | {column: record.stages_ms.get(stage) for stage, column in _STAGE_COLUMNS.items()}


def _record(row: dict[str, Any]) -> RequestRecord:
    stages = {stage: ms for stage, column in _STAGE_COLUMNS.items() if (ms := row.pop(column)) is not None}
    return RequestRecord(**row, stages_ms=stages)
