"""From what is done of a plan to its folder: files, summary, report, and what a reader must be told beside the numbers.

Reads a journal; runs nothing, and computes no statistics of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.against import compare
from baton_experiments.experiment import Collected, collect, derived_slo, mean_lengths
from baton_experiments.html_report import write_report
from baton_experiments.journal import Journal
from baton_experiments.plan import Plan, Point
from baton_experiments.records import RequestRecord, Slo, Steps
from baton_experiments.results import Result, write_records, write_steps, write_summary
from baton_experiments.summary import summarize

_POINT = ("placement", "chunk_tokens", "engine", "rate")


class Outcome(msgspec.Struct):
    """What was written."""

    summary: dict[str, Any]
    records: list[RequestRecord]
    summary_path: Path
    report_path: Path


def slo_of(plan: Plan, journal: Journal, collected: Collected) -> tuple[Slo | None, str]:
    """What requests are judged by, and where that is from."""
    given = plan.slo(None)
    if given is not None:
        return given, "as given"
    limit = journal.config.get("max_model_len")
    if limit is None:
        return None, ""
    prompt, _ = mean_lengths(plan, limit)
    reference = collected.reference
    slo = plan.slo(derived_slo(reference, prompt))
    return slo, (
        f"TTFT 5 times what a prompt of the mean length ({prompt:.0f} tokens) takes that is alone in a cluster, "
        "TBT 2.5 times such a request's, where not given"
    )


def write_outcome(plan: Plan, journal: Journal, *, against: Result | None = None) -> Outcome:
    """Of all points that are done. Raises ConfigError where none is.

    `against`: a real run of the same plan, for a simulated one.
    """
    collected = collect(plan, journal)
    slo, slo_source = slo_of(plan, journal, collected)
    if not collected.records or slo is None:
        raise ConfigError(
            str(journal.folder), "holds no finished point of this experiment, so there is nothing to report"
        )
    whole = _whole_rounds(plan, collected.missing)
    records = [r for r in collected.records if (r.seed, r.rate) in whole] if whole else collected.records
    steps: Steps = {run: some for run, some in collected.steps.items() if not whole or (run.seed, run.rate) in whole}
    config, folder = journal.config, journal.folder
    hardware = config.get("hardware") or {}
    write_records(folder, collected.records)
    write_steps(folder, collected.steps)
    summary = summarize(
        records, slo=slo, steps=steps, kv_blocks=hardware.get("kv_blocks"), reference=collected.reference
    )
    notes = _notes(plan, collected, whole, slo, slo_source, hardware)
    summary |= {
        "engine": {"kind": plan.engine, **hardware},
        "config": {"cluster": config["cluster"], "plan": msgspec.to_builtins(plan), "profile": config["profile"]},
        "slo": {**msgspec.to_builtins(slo), "source": slo_source},
        "workload": config.get("workload"),
        "environment": config.get("environment"),
        "notes": notes,
        "complete": not collected.missing,
        "unequal": plan.worker_counts if plan.is_unequal else None,
    }
    if plan.is_unequal:
        _flag(summary["verdict"], _unequal(plan))
    if against is not None:
        summary["against"] = {"folder": str(against.folder), **compare(records, against.records, slo)}
        _note_errors(summary["points"], summary["against"]["points"])
        notes.append(summary["against"]["sentence"])
    summary_path = write_summary(folder, summary)
    report_path = write_report(folder, records, steps, summary)
    return Outcome(summary, collected.records, summary_path, report_path)


def _whole_rounds(plan: Plan, missing: Sequence[Point]) -> set[tuple[int, float]]:
    """(seed, rate) that every setting has done: else settings would be compared on different work."""
    lacking = {(point.seed, point.rate) for point in missing}
    return {(seed, rate) for seed in plan.seeds for rate in plan.rates} - lacking


def _unequal(plan: Plan) -> str:
    counts = ", ".join(f"{placement} has {count} workers" for placement, count in plan.worker_counts.items())
    return f"UNEQUAL RESOURCES: {counts}. What follows compares goodputs per worker."


def _flag(verdict: dict[str, Any], warning: str) -> None:
    """Wherever the verdict is read."""
    verdict["sentence"] = f"{warning} {verdict['sentence']}"
    verdict["sentences"] = [warning, *verdict["sentences"]]


def _note_errors(points: list[dict[str, Any]], compared: list[dict[str, Any]]) -> None:
    """At each simulated point how far it is off."""
    found = {tuple(point[name] for name in _POINT): point["figures"] for point in compared}
    for point in points:
        figures = found.get(tuple(point[name] for name in _POINT))
        if figures is not None:
            point["error"]["against_real"] = {
                name: {"relative": figure["error"], "within": figure["within"]} for name, figure in figures.items()
            }


def _notes(
    plan: Plan,
    collected: Collected,
    whole: set[tuple[int, float]],
    slo: Slo,
    slo_source: str,
    hardware: dict[str, Any],
) -> list[str]:
    notes = [_unequal(plan)] if plan.is_unequal else []
    points = len(plan.settings) * len(plan.rates) * len(plan.seeds)
    if collected.missing:
        used = (
            "Only rates and seeds that all settings have done are in the summary"
            if whole
            else "No rate and seed is done by all settings, so the summary compares them on different work"
        )
        notes.append(
            f"Not complete: {points - len(collected.missing)} of {points} points are done. {used}; the same command "
            "goes on."
        )
    if plan.num_ramp:
        notes.append(
            f"Warm-up: a point begins and ends with {plan.num_ramp} requests beside its {plan.num_requests} measured "
            "ones, so that these meet a cluster that is neither filling nor emptying. They are in the records, marked, "
            "and in no figure."
        )
    notes.append(f"SLO: TTFT {slo.ttft_ms:g} ms, TBT {slo.tbt_ms:g} ms ({slo_source}).")
    if len(plan.settings) > 1:
        notes.append("Settings took turns at each rate, on the same requests.")
    failed = sum(record.error is not None for record in collected.records)
    if failed:
        notes.append(f"{failed} of {len(collected.records)} requests failed; they meet no SLO and have no latency.")
    for setting, warnings in (hardware.get("warnings") or {}).items():
        notes += [f"{setting}: {warning}" for warning in warnings]
    for name, profile in (hardware.get("profiles") or {}).items():
        notes += [f"Profile {name}: {note}" for note in profile["notes"]]
    return notes
