"""Runs a plan on an engine, point by point, into a journal; and collects from there what is done.

    plan ─► schedule ─► for each group of settings: up ─► single requests ─► its points ─► journal
                                                                               └─► `collect` ─► results

A point that is in the journal is not run again. Whatever ends a run, Ctrl-C included, leaves whole points only.
"""

from __future__ import annotations

import itertools
import time
from functools import cache
from typing import Any

import msgspec
import numpy as np

from baton.errors import RequestFailedError
from baton.step_log import StepRecord
from baton_experiments.columns import Columns
from baton_experiments.engine import Engine, Label, Stage
from baton_experiments.goodput import LinearReference
from baton_experiments.journal import ALONE, Journal, Played
from baton_experiments.plan import Plan, Point
from baton_experiments.records import RequestRecord, Run, Setting, Slo
from baton_experiments.work import Work
from baton_experiments.workloads import RequestShape
from baton_experiments.workloads import plan as with_prompts

TTFT_SLACK = 5.0
TBT_SLACK = 2.5
"""The SLO where none is given: so many times what a request takes that has a cluster to itself."""
ALONE_OUTPUT = 16
"""Tokens of such a request, at most."""
ALONE_LENGTHS = (0.25, 1.0, 1.0, 2.0)
"""Prompts of such requests, as shares of the work's mean."""


class Watch:
    """Who looks on. Does nothing; override what is of interest."""

    def say(self, text: str) -> None:
        """A stage, in a line of text."""

    def skip(self, point: Point, planned_s: float, took_s: float) -> None:
        """A former run has done this point."""

    def begin(self, point: Point, planned_s: float) -> None: ...

    def on_record(self, record: RequestRecord) -> None:
        """A request of the present point has ended."""

    def end(self, point: Point, planned_s: float, took_s: float) -> None: ...


class Collected(msgspec.Struct):
    """What is done of a plan."""

    records: list[RequestRecord]
    steps: dict[Run, list[StepRecord]]
    alone: list[RequestRecord]
    """Of requests that had a cluster to themselves."""
    missing: list[Point]

    @property
    def reference(self) -> LinearReference | None:
        """What requests take that are alone."""
        if not self.alone:
            return None
        source = "requests that were alone in a cluster"
        return LinearReference.estimated([Columns.of(self.alone)], quantile=0.5, source=source)


def run(plan: Plan, engine: Engine, journal: Journal, watch: Watch) -> None:
    """Run every point that `journal` lacks. Raises what the engine raises; what is done is in the journal then."""
    groups = engine.groups(plan.settings)
    group_of = {setting: number for number, group in enumerate(groups) for setting in group}
    done = journal.names
    points = plan.schedule(groups)
    for point in points:
        if point.name in done:
            watch.skip(point, planned_s(plan, point), journal.read(point.name).took_s)
    for number, stretch in itertools.groupby(points, key=lambda point: group_of[point.setting]):
        todo = [point for point in stretch if point.name not in done]
        wanted = {point.setting for point in todo}
        wanted |= {setting for setting in groups[number] if _alone_name(setting) not in journal.names}
        if not wanted:
            continue
        with engine.up([setting for setting in groups[number] if setting in wanted], watch.say) as stage:
            _note(plan, journal, stage)
            for setting in groups[number]:
                if setting in wanted and _alone_name(setting) not in journal.names:
                    watch.say(f"single requests on {setting}")
                    journal.keep(_alone_name(setting), _alone(plan, setting, engine, stage, journal))
            for point in todo:
                watch.begin(point, planned_s(plan, point))
                played = _play(plan, point, engine, stage, journal, watch)
                journal.keep(point.name, played)
                watch.end(point, planned_s(plan, point), played.took_s)


def collect(plan: Plan, journal: Journal) -> Collected:
    """All that is done of it."""
    collected = Collected([], {}, [], [])
    done = journal.names
    for setting in plan.settings:
        if _alone_name(setting) in done:
            collected.alone += journal.read(_alone_name(setting)).records
    for point in plan.schedule():
        if point.name not in done:
            collected.missing.append(point)
            continue
        played = journal.read(point.name)
        collected.records += played.records
        setting = point.setting
        key = Run(setting.placement, setting.chunk_tokens, point.rate, point.seed, setting.engine)
        collected.steps[key] = played.steps
    return collected


def derived_slo(reference: LinearReference | None, prompt_tokens: float) -> Slo | None:
    """From what single requests take, of a prompt of the work's mean length; three digits. None without any."""
    if reference is None:
        return None
    ttft = float(reference.ttft(np.array([round(prompt_tokens)]))[0])
    return Slo(ttft_ms=_rounded(TTFT_SLACK * ttft), tbt_ms=_rounded(TBT_SLACK * max(reference.tbt_ms, 1e-6)))


def planned_s(plan: Plan, point: Point) -> float:
    """From the start of a point to its last arrival."""
    return _last_arrival_s(plan.work, point.rate, point.seed, _num_played(plan))


@cache
def _last_arrival_s(work: Work, rate: float, seed: int, num_requests: int) -> float:
    """Asked for time and again, and a trace is a file to read."""
    shapes = work.of(rate=rate, seed=seed, num_requests=num_requests, max_model_len=1 << 30)
    return max(shape.at_s for shape in shapes)


def mean_lengths(plan: Plan, max_model_len: int) -> tuple[float, float]:
    """Of prompts and outputs, in tokens, over all seeds."""
    shapes = [
        (shape.prompt_tokens, shape.output_tokens)
        for seed in plan.seeds
        for shape in plan.work.of(
            rate=plan.rates[0], seed=seed, num_requests=_num_played(plan), max_model_len=max_model_len
        )
    ]
    prompt, output = np.mean(np.array(shapes), axis=0)
    return float(prompt), float(output)


def _note(plan: Plan, journal: Journal, stage: Stage) -> None:
    """What is known only once clusters are up. The longest request stays that of the first ones, so the work does."""
    limit = journal.config.get("max_model_len") or stage.max_model_len
    hardware = _merged(journal.config.get("hardware") or {}, stage.details)
    workload = journal.config.get("workload") or [
        plan.work.described(rate=plan.rates[0], seed=seed, num_requests=_num_played(plan), max_model_len=limit)
        for seed in plan.seeds
    ]
    journal.note(max_model_len=limit, hardware=hardware, workload=workload)


def _num_played(plan: Plan) -> int:
    return plan.num_requests + 2 * plan.num_ramp


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Workers of several groups of settings side by side."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _alone(plan: Plan, setting: Setting, engine: Engine, stage: Stage, journal: Journal) -> Played:
    limit = journal.config["max_model_len"]
    prompt, output = mean_lengths(plan, limit)
    output_tokens = max(2, min(ALONE_OUTPUT, round(output), limit // 2))
    shapes = [
        RequestShape(0.0, max(1, min(round(share * prompt), limit - output_tokens)), output_tokens)
        for share in ALONE_LENGTHS
    ]
    requests = list(with_prompts(shapes, vocab_size=engine.vocab_size, seed=0, salt="alone"))
    started = time.monotonic()
    records = stage.alone(setting, requests, Label(setting, rate=0.0, seed=0, first=0, end=len(requests)))
    failed = next((record.error for record in records if record.error is not None), None)
    if failed is not None:
        raise RequestFailedError(f"{setting} cannot serve a single request: {failed}")
    return Played(records, [], time.monotonic() - started)


def _play(plan: Plan, point: Point, engine: Engine, stage: Stage, journal: Journal, watch: Watch) -> Played:
    requests = plan.work.requests(
        rate=point.rate,
        seed=point.seed,
        num_requests=_num_played(plan),
        max_model_len=journal.config["max_model_len"],
        vocab_size=engine.vocab_size,
    )
    label = Label(point.setting, point.rate, point.seed, plan.num_ramp, plan.num_ramp + plan.num_requests)
    started = time.monotonic()
    records, steps = stage.play(point.setting, requests, label, watch.on_record)
    return Played(records, list(steps), time.monotonic() - started)


def _alone_name(setting: Setting) -> str:
    return setting.file_name + ALONE


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
