"""From what is done of a plan to its folder: files, summary, report, and what a reader must be told beside the numbers.

Reads a journal; runs nothing, and computes no statistics of its own.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from baton.config import TransferConfig
from baton.errors import ConfigError
from baton.timeline import Stage
from baton_experiments.against import compare
from baton_experiments.experiment import Collected, collect, derived_slo, mean_lengths
from baton_experiments.html_report import FIGURES, write_report
from baton_experiments.journal import Journal, writing
from baton_experiments.placement import parse_placement
from baton_experiments.plan import Plan, Point
from baton_experiments.records import RequestRecord, Setting, Slo, Steps
from baton_experiments.results import Result, write_records, write_steps, write_summary
from baton_experiments.summary import summarize
from baton_experiments.words import counted, enumerated, limit_text, percent

SIMULATED = (
    "Simulated, and no real run was given to compare with: how far the simulation is off is not known here. `--against "
    "FOLDER` simulates a real run and tells it."
)
_POINT = ("placement", "chunk_tokens", "engine", "rate")
_CUT = ("requests", "clipped", "prompt_tokens_cut", "output_tokens_cut")
_NEW = ".new"
"""What is being written: it takes the place of what is there when all of it is whole."""


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
    if not collected.records:
        raise ConfigError(
            str(journal.folder), "holds no finished point of this experiment, so there is nothing to report"
        )
    if slo is None:
        raise ConfigError(
            str(journal.folder), "lacks the single requests that the SLO comes from; the same command runs them"
        )
    whole = _whole_rounds(plan, collected.missing)
    records = [r for r in collected.records if (r.seed, r.rate) in whole] if whole else collected.records
    steps: Steps = {run: some for run, some in collected.steps.items() if not whole or (run.seed, run.rate) in whole}
    config, folder = journal.config, journal.folder
    hardware = config.get("hardware") or {}
    summary = summarize(
        records, slo=slo, steps=steps, kv_blocks=hardware.get("kv_blocks"), reference=collected.reference
    )
    notes = _notes(plan, collected, whole, slo, slo_source, config, is_compared=against is not None)
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
    with writing(folder), _together(folder) as new:
        write_records(new, collected.records)
        write_steps(new, collected.steps)
        summary_path = write_summary(new, summary)
        report_path = write_report(new, records, steps, summary)
    return Outcome(summary, collected.records, folder / summary_path.name, folder / report_path.name)


@contextmanager
def _together(folder: Path) -> Iterator[Path]:
    """A folder whose files replace those of `folder` once all are whole: no old report beside new records."""
    new = folder / _NEW
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        yield new
        if (new / FIGURES).is_dir() and (folder / FIGURES).is_dir():
            for old in (folder / FIGURES).glob("*.png"):  # one that this result has none of
                old.unlink()
        for file in sorted(new.rglob("*")):
            if file.is_dir():
                (folder / file.relative_to(new)).mkdir(exist_ok=True)
            else:
                file.replace(folder / file.relative_to(new))
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _whole_rounds(plan: Plan, missing: Sequence[Point]) -> set[tuple[int, float]]:
    """(seed, rate) that every setting has done: else settings would be compared on different work."""
    lacking = {(point.seed, point.rate) for point in missing}
    return {(seed, rate) for seed in plan.seeds for rate in plan.rates} - lacking


def _unequal(plan: Plan) -> str:
    counts = ", ".join(f"{name} has {counted(count, 'worker')}" for name, count in plan.worker_counts.items())
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
    config: dict[str, Any],
    *,
    is_compared: bool,
) -> list[str]:
    hardware = config.get("hardware") or {}
    notes = [_unequal(plan)] if plan.is_unequal else []
    if plan.engine == "simulated" and not is_compared:
        notes.append(SIMULATED)
    points = len(plan.settings) * len(plan.rates) * len(plan.seeds)
    if collected.missing:
        used = "Only rates and seeds that all settings have done are in the summary" if whole else _partial(collected)
        notes.append(
            f"Not complete: {points - len(collected.missing)} of {points} points are done. {used}; the same command "
            "goes on."
        )
    if config.get("resumed_in"):
        notes.append(
            "Not all points were run on the same machine with the same versions: `environment` is that of the first, "
            "`resumed_in` in config.json those of the others."
        )
    notes += _changes(config.get("workload") or ())
    if plan.num_ramp:
        notes.append(
            f"Warm-up: a point begins and ends with {counted(plan.num_ramp, 'request')} beside the {plan.num_requests} "
            "that are measured, so that these meet a cluster that is neither filling nor emptying. They are in the "
            "records, marked, and in no figure."
        )
    notes.append(f"SLO: TTFT {limit_text(slo.ttft_ms)}, TBT {limit_text(slo.tbt_ms)} ({slo_source}).")
    if len(plan.settings) > 1:
        notes.append("Settings took turns at each rate, on the same requests.")
    failed = sum(record.error is not None for record in collected.records)
    if failed:
        notes.append(
            f"{failed} of {counted(len(collected.records), 'request')} failed; they meet no SLO and have no latency."
        )
    notes += _troubles(collected, config)
    for setting, warnings in (hardware.get("warnings") or {}).items():
        notes += [f"{setting}: {warning}" for warning in warnings]
    for name, profile in (hardware.get("profiles") or {}).items():
        notes += [f"Profile {name}: {note}" for note in profile["notes"]]
    return notes


def _partial(collected: Collected) -> str:
    """Where no rate and seed is done by all settings."""
    done: dict[Setting, set[tuple[int, float]]] = defaultdict(set)
    for record in collected.records:
        done[record.run.setting].add((record.seed, record.rate))
    lacking = {point.setting for point in collected.missing} - done.keys()
    if len(done) == 1:
        return f"Only {next(iter(done))} is in the summary"
    if all(some == next(iter(done.values())) for some in done.values()):
        return f"The summary compares those that are done, on the same work; {_names(lacking)} lacks every point"
    return "No rate and seed is done by all settings, so the summary compares them on different work"


def _names(settings: set[Setting]) -> str:
    return enumerated(sorted(map(str, settings)))


def _changes(workload: Sequence[dict[str, Any]]) -> list[str]:
    """What was cut, left out or rescaled, over all seeds; nothing of what changed nothing."""
    notes = []
    sources = [work["source"] for work in workload]
    counts = [source.get("file_counts") or {} for source in sources]
    for key in dict.fromkeys(key for some in counts for key in some if key != "requests"):
        if count := max(some.get(key, 0) for some in counts):  # of one file, which all seeds take parts of
            notes.append(f"Workload: {counted(count, 'row')} of the file left out: {key}.")
    for left_out in [source["left_out"] for source in sources if "left_out" in source][:1]:
        limit, count = left_out["max_total_tokens"], left_out["requests"]
        if count:
            notes.append(f"Workload: {counted(count, 'request')} of the file left out, of over {limit:,} tokens.")
    changes = [change for work in workload for change in work["changes"]]
    for scaled in [change for change in changes if change["change"] == "scale_lengths"][:1]:
        prompt, output = scaled["prompt_factor"], scaled["output_factor"]
        notes.append(f"Workload: lengths are rescaled, prompts by {prompt:g} and outputs by {output:g}.")
    cuts = [change for change in changes if change["change"] == "clip"]
    total = {key: sum(cut["counts"].get(key, 0) for cut in cuts) for key in _CUT}
    if total["clipped"]:
        notes.append(
            f"Workload: {total['clipped']:,} of {counted(total['requests'], 'request')} CUT, as no more than "
            f"{cuts[0]['max_model_len']:,} tokens fit a request here: {total['prompt_tokens_cut']:,} tokens of prompts "
            f"and {total['output_tokens_cut']:,} of outputs are missing, so this is not the work that was asked for."
        )
    return notes


def _troubles(collected: Collected, config: dict[str, Any]) -> list[str]:
    """Requests that did not go their way at once: what is slow about them is not what a figure's name says."""
    notes = []
    retried: dict[Setting, int] = defaultdict(int)
    stuck: dict[Setting, int] = defaultdict(int)
    lease_s = (config["cluster"].get("transfer") or {}).get("lease_s", TransferConfig().lease_s)
    for record in collected.records:
        setting = record.run.setting
        retried[setting] += record.attempts > 1
        stuck[setting] += record.stages_ms.get(str(Stage.WIRE), 0.0) >= 1e3 * lease_s
    for setting, count in retried.items():
        if count:
            notes.append(f"{setting}: {counted(count, 'request')} took more than one attempt; times include all.")
    for setting, count in stuck.items():
        if count:
            notes.append(
                f"{setting}: {counted(count, 'request')} waited for KV blocks for as long as a transfer without "
                f"progress may last, or longer (`transfer.lease_s`, {lease_s:g} s): of these the time on the wire may "
                "be that limit, not what a transfer takes."
            )
    for setting, (again, handed_over) in _computed_again(collected).items():
        if again:
            notes.append(
                f"{setting}: workers that only decode computed {counted(again, 'token')} of prompts again "
                f"({percent(again / handed_over)} of those handed over), of transfers that were given up and of "
                "requests that had lost their KV blocks."
            )
    return notes


def _computed_again(collected: Collected) -> dict[Setting, tuple[int, int]]:
    """Of settings with workers that only decode: prompt tokens which these computed, and those handed over to them.

    A prompt that was sent straight to such a worker is none of them.
    """
    found: dict[Setting, tuple[int, int]] = {}
    for setting in {run.setting for run in collected.steps}:
        if "decode" not in parse_placement(setting.placement):
            continue
        records = [record for record in collected.records if record.run.setting == setting and record.error is None]
        straight = sum(
            r.prompt_tokens for r in records if r.decode_worker == r.prefill_worker and _decodes(r.decode_worker)
        )
        handed_over = sum(r.prompt_tokens for r in records if r.decode_worker != r.prefill_worker)
        computed = sum(
            step.shape.chunk_tokens
            for run, steps in collected.steps.items()
            if run.setting == setting
            for step in steps
            if _decodes(step.worker)
        )
        if handed_over:
            found[setting] = max(0, computed - straight), handed_over
    return found


def _decodes(worker: str) -> bool:
    """Of the pool that placements call `decode`."""
    return worker.rpartition("-")[0] == "decode"
