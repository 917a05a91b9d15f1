"""From records to `summary.json`: points, goodput under each definition, verdict. Pure; must not know files.

points    one per setting and rate, pooled over seeds
goodput   one per setting and definition: the rate at 90 and 99 % with its interval
verdict   see `baton_experiments.verdict`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from baton_experiments.bottlenecks import Bottleneck, bottleneck
from baton_experiments.columns import Columns, distribution
from baton_experiments.goodput import DEFINITIONS, SHARES, Reference, attainment, splitwise_slack
from baton_experiments.records import RequestRecord, Setting, Slo, Steps
from baton_experiments.study import MAIN, Study
from baton_experiments.verdict import verdict

_INTERVALS = (
    ("ttft_ms", "ttft", (0.5, 0.9, 0.99)),
    ("tbt_ms", "tbt", (0.5, 0.9, 0.99)),
    ("tpot_ms", "tpot", (0.5, 0.9)),
)


def summarize(
    records: Iterable[RequestRecord],
    *,
    slo: Slo,
    steps: Steps | None = None,
    kv_blocks: Mapping[str, int] | None = None,
    reference: Reference | None = None,
    replicates: int = 1000,
) -> dict[str, Any]:
    """Plain data with the keys `points`, `goodput`, `verdict`, `slo`, `definitions`.

    `steps`: of each run, to name what limits it. `kv_blocks`: how many a worker has, by id; without it nobody can say
    that KV space is short. `reference`: what requests take that run alone, for Splitwise's slowdowns; None:
    estimated from the records. Same arguments, same result: replicates come from a fixed seed.
    """
    study = Study(records, slo, steps=steps, kv_blocks=kv_blocks, reference=reference, replicates=replicates)
    limits = {key: bottleneck(study, *key) for key in study.columns}
    source = getattr(study.reference, "source", "given") if study.reference is not None else None
    return {
        "slo": msgspec.to_builtins(slo),
        "points": [_point(study, setting, rate, limits[setting, rate]) for setting, rate in study.columns],
        "goodput": [_goodput(study, s, name) for s in study.settings for name in DEFINITIONS],
        "verdict": verdict(study, limits),
        "definitions": {d.name: {"label": d.label, "meaning": d.meaning} for d in DEFINITIONS.values()},
        "uncontended_reference": source,
        "warmup_requests": study.num_warmup,
    }


def _point(study: Study, setting: Setting, rate: float, limit: Bottleneck) -> dict[str, Any]:
    """`ttft_ms`, `tbt_ms`, `tpot_ms` (a request's mean gap) are distributions; `intervals` those of their percentiles.

    `goodput_share`: of requests that meet the SLO by DistServe's definition; `attainment`: by each.
    `output_tokens_per_s`: all tokens over the time from the first arrival to the last token, summed over seeds.
    """
    columns = study.columns[setting, rate]
    good = DEFINITIONS["vllm"].good
    assert good is not None
    seconds = columns.seconds()
    failed = int((~columns.done).sum())
    reference = study.reference
    return {
        "placement": setting.placement,
        "chunk_tokens": setting.chunk_tokens,
        "engine": setting.engine,
        "rate": rate,
        "seeds": [int(seed) for seed in np.unique(columns.seed)],
        "requests": len(columns),
        "errors": failed,
        "best": study.best[setting.engine, setting.placement] == setting,
        "ttft_ms": distribution(columns.select("ttft")[0]),
        "tbt_ms": distribution(columns.gaps),
        "tpot_ms": distribution(columns.select("tpot")[0]),
        "intervals": _intervals(study, setting, rate),
        "mean_ms": {name: _mean(columns.select(name)[0]) for name in ("ttft", "tpot", "latency")},
        "goodput_share": study.kept(setting, rate, MAIN),
        "attainment": {name: _number(attainment(columns, study.slo, name, reference)) for name in DEFINITIONS},
        "splitwise_slack": {k: _number(v) for k, v in splitwise_slack(columns, reference).items()}
        if reference
        else None,
        "good_requests_per_s": float(good(columns, study.slo).sum()) / seconds if seconds > 0 else None,
        "output_tokens_per_s": float(columns.output_tokens[columns.done].sum()) / seconds if seconds > 0 else None,
        "stages_ms": _stages(columns),
        "kv_bytes": int(columns.kv_bytes[columns.done].sum()),
        "bottleneck": {"limit": limit.limit, "sentence": limit.sentence, "votes": limit.votes},
        "error": {"failed_share": failed / len(columns), "against_real": None},
    }


def _intervals(study: Study, setting: Setting, rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: {f"p{share * 100:g}": study.quantile_interval(setting, rate, name, share) for share in shares}
        for key, name, shares in _INTERVALS
    }
    found["goodput_share"] = study.bootstrap.interval(study.share_replicates(setting, rate, MAIN))
    return found


def _goodput(study: Study, setting: Setting, definition: str) -> dict[str, Any]:
    """By share: `rate`, `interval` (95 %; an end of None: beyond the rates tried), `at_least` (kept at every rate).

    Splitwise's definition has percentiles of its own, so both its rates are the same.
    """
    found = {f"{share * 100:g}": study.goodput_of(setting, definition, share) for share in SHARES}
    return {
        "placement": setting.placement,
        "chunk_tokens": setting.chunk_tokens,
        "engine": setting.engine,
        "definition": definition,
        "best": study.best[setting.engine, setting.placement] == setting,
        "rate": {share: g.rate for share, g in found.items()},
        "interval": {share: g.interval for share, g in found.items()},
        "at_least": {share: g.at_least for share, g in found.items()},
        "interval_over": study.bootstrap.method,
    }


def _stages(columns: Columns) -> dict[str, float]:
    done = columns.done
    means = {name: float(values[done].mean()) for name, values in columns.stages.items() if done.any()}
    if means:
        means["residual"] = float(columns.residual[done].mean())
    return {name: value for name, value in means.items() if value}


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(values.mean()) if values.size else None


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if np.isfinite(value) else None
