"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol import Status, WorkerStatus
from baton.timeline import RequestTimeline, Stage
from router.client import Choice, Completion
from router.completion import logprobs_data
from router.records import RequestRecord

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ROLES = ("prefill", "decode", "both")


def ms(seconds: float | None) -> str:
    """Milliseconds for people; `-` for a time there is none of."""
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def print_json(data: Any) -> None:
    """One JSON document on stdout, unstyled; escaped where stdout cannot say all of its signs."""
    text = json.dumps(data, ensure_ascii=False, indent=1)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=1)
    print(text)


def status_data(status: Status, address: str) -> dict[str, Any]:
    """A router's status as `baton status --json` prints it."""
    return {
        "name": status.name,
        "address": address,
        "url": status.url or None,
        "model": status.model,
        "max_model_len": status.max_model_len,
        "router_incarnation": status.router_incarnation,
        "requests": status.num_requests,
        "queued_requests": status.num_queued,
        "planner": status.planner or None,
        "workers": [
            {
                "worker_id": w.info.worker_id,
                "pool": w.info.pool,
                "role": w.info.role,
                "state": w.state,
                "breaker": w.breaker,
                "outstanding": w.num_outstanding,
                "node": w.info.node,
                "pid": w.info.pid,
                "device": w.info.device,
                "cores": list(w.info.cores),
                "gpu_ids": list(w.info.gpu_ids),
                "incarnation": w.info.incarnation,
                "blocks_total": w.load.blocks_total,
                "blocks_free": w.load.blocks_free,
                "blocks_cached": w.load.blocks_cached,
                "cache_queried_tokens": w.load.cache_queried_tokens,
                "cache_hit_tokens": w.load.cache_hit_tokens,
                "waiting": w.load.num_waiting,
                "running": w.load.num_running,
                "steps": w.load.num_steps,
                "stranded_blocks": w.load.stranded_blocks,
                "stranded_block_seconds": round(w.load.stranded_block_seconds, 3),
                "bytes_sent": w.load.bytes_sent,
                "bytes_received": w.load.bytes_received,
                "seen_s_ago": round(w.seen_s_ago, 3),
            }
            for w in _in_order(status)
        ],
    }


def status_table(status: Status, address: str) -> Table:
    """The workers of a cluster, one a row."""
    where_http = f" and {status.url}/v1" if status.url else ""
    table = Table(title=f"{status.name} at {address}{where_http}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    nodes = {w.info.node for w in status.workers}
    # A column that says the same in every row costs the width that the others need in 80 columns.
    where = ("node",) if len(nodes) > 1 else ()
    for column in ("worker", "role", "state", *where, "pid", "runs on", "KV free", "queue"):
        table.add_column(column, no_wrap=True)
    for w in _in_order(status):
        places = [f"{w.info.device}"]
        if w.info.cores:
            places.append(f"core {','.join(map(str, w.info.cores))}")
        if w.info.gpu_ids:
            places.append(f"GPU {','.join(map(str, w.info.gpu_ids))}")
        table.add_row(
            w.info.worker_id,
            w.info.role,
            w.state if w.breaker == "closed" else f"{w.state} ({w.breaker.replace('_', ' ')})",
            *([w.info.node] if where else []),
            str(w.info.pid),
            " ".join(places),
            f"{w.load.blocks_free}/{w.load.blocks_total}"
            + (f" ({w.load.stranded_blocks} stranded)" if w.load.stranded_blocks else ""),
            f"{w.load.num_waiting}+{w.load.num_running}",
        )
    place = f" on {nodes.pop()}" if len(nodes) == 1 else ""
    table.caption = f"model {status.model}{place}; KV free: blocks of the pool; queue: requests waiting + running"
    if status.num_queued:
        table.caption += f"; {status.num_queued} more wait in the router"
    if status.planner:
        table.caption += f"\nrole planner: {status.planner}"
    return table


def logprobs_table(choice: Choice) -> Table:
    """An answer's tokens with their log probabilities, and the most probable ones at each place."""
    table = Table(title=f"log probabilities of answer {choice.index}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("token id", "log p", "rank"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("most probable: id (log p)")
    for entry in choice.logprobs or ():
        if entry is not None:
            top = " ".join(f"{i} ({value:.2f})" for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
            table.add_row(str(entry.token), f"{entry.logprob:.3f}", str(entry.rank), top)
    return table


def _in_order(status: Status) -> list[WorkerStatus]:
    return sorted(status.workers, key=lambda w: (ROLES.index(w.info.role), w.info.worker_id))


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on: a spinner on a terminal, lines on stderr elsewhere. Call it with each new text."""
    if out.is_terminal:
        with out.status(text) as status:
            yield lambda new: status.update(new)
    else:

        def tell(new: str) -> None:
            err.print(new, markup=False)

        tell(text)
        yield tell


def completion_data(done: Completion) -> dict[str, Any]:
    """A completion as `baton submit --json` prints it; the timeline in milliseconds."""
    return {
        "request_id": done.request_id,
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "choices": [
            {
                "index": c.index,
                "text": c.text,
                "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
                "logprobs": logprobs_data(c.logprobs),
            }
            for c in done.choices
        ],
        "usage": {
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
            "total_tokens": done.usage.prompt_tokens + done.usage.completion_tokens,
            "cached_tokens": done.usage.cached_tokens,
        },
        "prefill_worker": done.prefill_worker,
        "decode_worker": done.decode_worker,
        "attempts": done.attempts,
        "kv_bytes": done.kv_bytes,
        "ttft_ms": None if done.ttft_s is None else done.ttft_s * 1e3,
        "latency_ms": done.latency_s * 1e3,
        "timeline": {
            "stages_ms": {str(stage): seconds * 1e3 for stage, seconds in done.timeline.stages().items()},
            "residual_ms": None if done.residual_s is None else done.residual_s * 1e3,
        },
    }


def stage_table(title: str, timeline: RequestTimeline) -> Table:
    """Where the time of a request went, as its router and workers saw it."""
    stages = timeline.stages()
    total = sum(stages.values()) or 1e-9
    table = Table(title=title, box=box.SIMPLE_HEAD, min_width=60)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("", min_width=30)
    for stage in Stage:
        if stage in stages:
            share = stages[stage] / total
            table.add_row(stage.replace("_", " "), f"{stages[stage] * 1e3:.2f}", "█" * round(30 * share))
    table.add_row("all stages", f"{total * 1e3:.2f}", "", style="bold")
    return table


def timeline_table(done: Completion) -> Table:
    """The stages of a request, and what its client saw beyond them."""
    title = f"request {done.request_id[:8]}: {done.prefill_worker} -> {done.decode_worker}"
    table = stage_table(title, done.timeline)
    until_last_token = done.token_times[-1] - done.started_at if done.token_times else done.latency_s
    table.add_row("client's clock", f"{until_last_token * 1e3:.2f}", f"first token after {ms(done.ttft_s)} ms")
    if done.residual_s is not None:
        table.add_row("residual", f"{done.residual_s * 1e3:.2f}", "message trips and the client's own work")
    return table


def record_tables(record: RequestRecord) -> list[Table]:
    """What `baton explain` shows: every placement, what its candidates cost and why, then the stages."""
    choices = Table(title=f"request {record.request_id}", box=box.SIMPLE_HEAD)
    for column in ("placement", "prefill", "decode", "policies"):
        choices.add_column(column)
    candidates = Table(title="candidates (lower is better)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("placement", "for", "worker", "score", "made of"):
        candidates.add_column(column, justify="right" if column == "score" else "left")
    for number, placement in enumerate(record.placements, 1):
        policies = dict.fromkeys(ranking.policy for ranking in placement.rankings)
        choices.add_row(str(number), placement.prefill, placement.decode, ", ".join(policies))
        for score in placement.scores:
            made_of = ", ".join(_part_text(name, value) for name, value in score.parts.items())
            candidates.add_row(str(number), score.part, score.worker_id, f"{score.value:.4g}", made_of)
    now = f"ended: {record.finish_reason}{': ' + record.error if record.error else ''}"
    if not record.finish_reason:
        now = f"open: {record.state}"
    choices.caption = f"{record.prompt_tokens} tokens in, {record.completion_tokens} out; {now}" + (
        f"; retried because: {record.retried}" if record.retried else ""
    )
    if record.queued_s:
        choices.caption += f"; at no worker for {record.queued_s:.3g} s"
    return [choices, candidates, stage_table("where its time went", RequestTimeline(marks=dict(record.marks)))]


def _part_text(name: str, value: float) -> str:
    """`queue_ms`: `queue 12.5 ms`; `cached_tokens`: `cached 160 tokens`."""
    what, _, unit = name.rpartition("_")
    if unit in ("ms", "tokens"):
        return f"{what} {value:.4g} {unit}"
    return f"{name.replace('_', ' ')} {value:.3g}"
