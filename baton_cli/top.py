"""`baton top`: a cluster's pools, queues, KV blocks and latencies, as of now and again every second."""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton_cli.output import ROLES, out, print_json
from router.client import RouterClient

BAR = 12
STYLES = {"ok": "green", "ready": "green", "degraded": "yellow", "draining": "yellow"}
"""Whatever else there is, is red."""


def run_top(client: RouterClient, *, once: bool, as_json: bool, every_s: float) -> None:
    """Show it until Ctrl-C; with `once` or `as_json` a single time."""
    if as_json:
        print_json(client.overview())
        return
    if once or not out.is_terminal:
        out.print(top_view(client.overview()))
        return
    try:
        with Live(top_view(client.overview()), console=out, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every_s)
                live.update(top_view(client.overview()), refresh=True)
    except KeyboardInterrupt:
        return  # that is how one ends it


def top_view(overview: dict[str, Any]) -> RenderableType:
    """Everything, in 80 columns."""
    return Group(_headline(overview), _latencies(overview["latency"]), _pools(overview), _workers(overview))


def _headline(overview: dict[str, Any]) -> Text:
    requests, latency = overview["requests"], overview["latency"]
    health = "stopping" if overview["stopping"] else overview["health"]
    text = Text.assemble(
        (overview["cluster"], "bold"),
        "  ",
        (health, STYLES.get(health, "red")),
        f"  up {_duration(overview['uptime_s'])}  {overview['model']}\n",
        f"requests: {requests['open']} open, {requests['queued']} queued;  ",
        f"{latency['requests_per_s']:.1f} requests/s, {latency['tokens_per_s']:.0f} tokens/s\n",
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _latencies(latency: dict[str, Any]) -> Table:
    table = _table(f"ms in the last {latency['window_s']} s")
    for column in ("p50", "p90", "p99", "count"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, key in (("time to first token", "ttft_ms"), ("between tokens", "tbt_ms"), ("whole request", "e2e_ms")):
        values = latency[key]
        numbers = ("-" if values[p] is None else f"{values[p]:.1f}" for p in ("p50", "p90", "p99"))
        table.add_row(name, *numbers, str(values["count"]))
    return table


def _pools(overview: dict[str, Any]) -> Table:
    table = _table("pool")
    for column in ("state", "ready", "draining", "lost"):
        table.add_column(column, no_wrap=True)
    for pool in overview["pools"]:
        state = Text(pool["state"], STYLES.get(pool["state"], "red"))
        ready = f"{pool['ready']}/{pool['workers']}"
        table.add_row(pool["name"], state, ready, str(pool["draining"]), str(pool["lost"]))
    return table


def _workers(overview: dict[str, Any]) -> Table:
    table = _table("worker")
    for column in ("state", "KV blocks held", "queue", "due", "cache hits"):
        table.add_column(column, no_wrap=True)
    for worker in sorted(overview["workers"], key=lambda w: (ROLES.index(w["role"]), w["worker_id"])):
        state, share = worker["state"], worker["cache_hit_share"]
        if state == "ready" and worker["breaker"] != "closed":
            state = {"open": "failing", "half_open": "on trial"}[worker["breaker"]]
        table.add_row(
            worker["worker_id"],
            Text(state, STYLES.get(state, "red")),
            _bar(worker["blocks_total"] - worker["blocks_free"], worker["blocks_total"]),
            f"{worker['waiting']}+{worker['running']}",
            str(worker["pending_tokens"]),
            "-" if share is None else f"{share:.0%}",
        )
    table.caption = (
        "queue: requests waiting + running; due: prompt tokens not computed yet\n"
        "failing: its circuit breaker is open; on trial: half open"
    )
    return table


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column(first, no_wrap=True)
    return table


def _bar(held: int, total: int) -> Text:
    filled = round(BAR * held / total) if total else 0
    style = "red" if total and held > 0.9 * total else "cyan"
    share = f" {held / total:.0%}" if total else " -"
    return Text.assemble(("█" * filled, style), ("░" * (BAR - filled), "dim"), share)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
