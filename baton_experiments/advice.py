"""Advice: what to change, by what limits a placement. Pure; must not know how limits were found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton_experiments.bottlenecks import BUSY, Bottleneck
from baton_experiments.comparison import TRIFLE
from baton_experiments.records import Setting
from baton_experiments.study import MAIN, SHARE, Study
from baton_experiments.words import enumerated, milliseconds, percent

LONG = 3.0
"""Times what it waits: a prompt that takes longer is late by itself."""


def helps(study: Study, found: Bottleneck) -> list[str]:
    """What to change, by what limits; nothing where the SLO is kept."""
    if found.missed <= 1 - SHARE:
        return []
    if found.evidence.get("disturbed"):
        return []  # what limits a disturbed machine is no matter of placement
    split = re.fullmatch(r"split:(\d+)\+(\d+)", found.placement)
    name = str(Setting(found.placement, None, found.engine))
    if found.limit == "failures":
        refused = found.evidence.get("error") == "overloaded"
        change = "more workers, or room for more requests to wait (`router.max_requests`)" if refused else None
        return [f"For {name}: {change}."] if change else []
    if split and _prompts_are_long(found):  # where tokens share the worker, larger chunks may help
        stages = found.evidence["mean_stages_ms"]
        return [
            f"For {name}: a prompt takes {milliseconds(stages['prefill'])} and hardly waits, so more workers would not "
            "help: faster ones would, or several GPUs for one worker, or a looser limit of TTFT."
        ]
    if split and found.limit in ("prefill compute", "decode batch"):
        return [f"For {name}: {_better_ratio(study, int(split[1]), int(split[2]), found)}."]
    sentences = []
    tried = sorted(
        {
            s.chunk_tokens
            for s in study.settings
            if (s.placement, s.engine) == (found.placement, found.engine) and s.chunk_tokens
        }
    )
    if found.limit == "prefill compute":
        sentences.append(f"For {name}: {_chunks(found, tried)}.")
    elif found.limit == "decode batch":
        sentences.append(
            f"For {name}: more workers that decode, so that each has a smaller batch (`engine.max_batch_requests`)."
        )
    elif found.limit == "KV space":
        sentences.append(f"For {name}: more KV memory (`kv_memory_mib`) on workers that decode, or more of them.")
    elif found.limit == "hand-off":
        sentences.append(
            f"For {name}: a faster link or transport (`transfer.transport`), or a smaller wire format "
            "(`transfer.wire_encoding`)."
        )
    elif found.limit == "router":
        sentences.append(f"For {name}: the router needs a faster core, or fewer processes beside it.")
    return sentences


def _chunks(found: Bottleneck, tried: Sequence[int]) -> str:
    """Of a placement whose workers do both, `tried` in order."""
    known = f"; of those tried ({', '.join(map(str, tried))}) {found.chunk_tokens} did best" if len(tried) > 1 else ""
    if found.evidence["missed_tbt"] > found.evidence["missed_ttft"]:
        if len(tried) < 2 or found.chunk_tokens == tried[0]:
            return f"smaller chunks (`engine.max_batch_tokens`) shorten the gaps, and make first tokens later{known}"
        return f"more workers, or prefill on workers of its own: smaller chunks did not do better{known}"
    if len(tried) < 2 or found.chunk_tokens == tried[-1]:
        return f"more workers; larger chunks (`engine.max_batch_tokens`) may bring first tokens earlier{known}"
    return f"more workers{known}"


def _prompts_are_long(found: Bottleneck) -> bool:
    """First tokens are late because of the prompts themselves, not of queues."""
    stages = found.evidence.get("mean_stages_ms", {})
    queued = stages.get("router_queue", 0.0) + stages.get("prefill_queue", 0.0)
    first = found.evidence["missed_ttft"] > found.evidence["missed_tbt"]
    return found.limit == "prefill compute" and first and stages.get("prefill", 0.0) > LONG * queued


def _better_ratio(study: Study, prefill: int, decode: int, found: Bottleneck) -> str:
    """Other splits that may do better, but for those that were tried and did not.

    From how busy prefill workers are, and from whether gaps are late: a decode worker is busy whenever anything runs.
    """
    busy = found.evidence.get("prefill_busy")
    why = "" if busy is None else f": prefill workers are busy {percent(busy)} of the time"
    even = "{} would share the work more evenly"
    ratios: list[tuple[int, int, str]] = []
    if found.limit == "prefill compute":
        if decode > 1 and found.evidence["missed_tbt"] == 0:
            ratios.append(
                (prefill + 1, decode - 1, even + (f"{why} and" if why else ":") + " no request's gaps are late")
            )
        ratios.append((prefill + 1, decode, f"one more prefill worker ({{}}){why}"))
    else:
        if prefill > 1 and busy is not None and busy * prefill / (prefill - 1) < BUSY:
            ratios.append((prefill - 1, decode + 1, even + why))
        ratios.append((prefill, decode + 1, f"one more decode worker ({{}}){why}"))
    tried = []
    for p, d, reason in ratios:
        placement = f"split:{p}+{d}"
        other = study.best.get((found.engine, placement))
        if other is None or found.rate not in study.rates(other):
            return reason.format(placement)
        share = study.kept(other, found.rate, MAIN)
        if share > 1 - found.missed + TRIFLE:
            return f"{placement} keeps the SLO for {percent(share)} of the requests here"
        tried.append(placement)
    return f"more workers in this ratio, as {enumerated(tried)} did no better here"
