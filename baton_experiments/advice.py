"""Advice: what to change, by what limits a placement. Pure; must not know how limits were found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton_experiments.bottlenecks import Bottleneck
from baton_experiments.records import Setting
from baton_experiments.study import SHARE, Study
from baton_experiments.words import percent


def helps(study: Study, found: Bottleneck) -> list[str]:
    """What to change, by what limits; nothing where the SLO is kept."""
    if found.missed <= 1 - SHARE:
        return []
    if found.evidence.get("disturbed"):
        return []  # what limits a disturbed machine is no matter of placement
    split = re.fullmatch(r"split:(\d+)\+(\d+)", found.placement)
    name = str(Setting(found.placement, None, found.engine))
    sentences = []
    if split:
        ratio = _better_ratio(int(split[1]), int(split[2]), found)
        if ratio:
            sentences.append(f"For {name}: {ratio}.")
    tried = sorted(
        {
            s.chunk_tokens
            for s in study.settings
            if (s.placement, s.engine) == (found.placement, found.engine) and s.chunk_tokens
        }
    )
    if found.limit == "prefill compute" and not split:
        sentences.append(f"For {name}: {_chunks(found, tried)}.")
    elif found.limit == "prefill compute" and not sentences:
        sentences.append(f"For {name}: more prefill workers, or larger chunks on them.")
    elif found.limit == "decode batch" and not sentences:
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


def _better_ratio(prefill: int, decode: int, found: Bottleneck) -> str | None:
    """From how busy both sides are."""
    busy_prefill, busy_decode = found.evidence.get("prefill_busy"), found.evidence.get("decode_busy")
    if not busy_prefill or not busy_decode or found.limit not in ("prefill compute", "decode batch"):
        return None
    work = prefill * busy_prefill, decode * busy_decode
    total = prefill + decode
    fair = round(total * work[0] / sum(work))
    even = f"prefill workers are busy {percent(busy_prefill)} of the time, decode workers {percent(busy_decode)}"
    if 1 <= fair < total and fair != prefill and (fair > prefill) == (found.limit == "prefill compute"):
        return f"split:{fair}+{total - fair} would share the work more evenly: {even}"
    side, other = (busy_prefill, busy_decode) if found.limit == "prefill compute" else (busy_decode, busy_prefill)
    if side > 1.3 * other:
        more = (prefill + 1, decode) if found.limit == "prefill compute" else (prefill, decode + 1)
        return f"one more {found.limit.split()[0]} worker (split:{more[0]}+{more[1]}): {even}"
    return f"more workers in this ratio: {even}"
