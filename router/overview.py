"""The state of one router in one plain object, for the page, `baton top` and whoever asks over HTTP.

Pure: reads the core and what was measured, changes nothing. Must not know HTTP or sockets.
"""

from __future__ import annotations

from typing import Any, Literal

from baton.config import ClusterConfig
from baton.protocol import WorkerStatus
from baton.timeline import Mark, RequestTimeline
from router.core import RouterCore
from router.latencies import WINDOW_S, Latencies, Window
from router.records import RequestRecord

MAX_RECENT = 50

Health = Literal["ok", "degraded", "down"]
PoolState = Literal["ok", "degraded", "empty"]


def make_overview(config: ClusterConfig, core: RouterCore, latencies: Latencies, now: float) -> dict[str, Any]:
    """All of it, as JSON has it. `now`: seconds on the router's clock, which it tells, too."""
    status = core.status("overview", now)
    pools = pool_states(config, status.workers)
    return {
        "cluster": status.name,
        "model": status.model,
        "url": status.url,
        "router_incarnation": status.router_incarnation,
        "now": now,
        "uptime_s": now - latencies.started_at,
        "health": health_of(core, pools),
        "stopping": core.stopping,
        "pools": pools,
        "workers": [_worker(worker) for worker in status.workers],
        "requests": {"open": core.num_requests, "queued": core.num_queued + core.num_parked},
        "latency": latency_data(latencies, now),
        "planner": None if core.roles is None else core.roles.data(now),
        "recent": [record_data(record, now) for record in core.recent(MAX_RECENT)],
    }


def pool_states(config: ClusterConfig, workers: tuple[WorkerStatus, ...]) -> list[dict[str, Any]]:
    """Of every pool that has or should have workers: how many of them are in which state.

    `empty`: none takes requests. `degraded`: not all do, or not as usual; those that never joined count as well.
    """
    sizes = {name: pool.workers for name, pool in config.pools.items() if pool.workers}
    if config.planner.enabled:
        for worker in workers:
            _move(worker, sizes)
    members: dict[str, list[WorkerStatus]] = {name: [] for name in sizes}
    for worker in workers:
        members.setdefault(worker.info.pool, []).append(worker)
    pools = []
    for name, found in members.items():
        states = [worker.state for worker in found]
        wanted = sizes.get(name, 0)
        num_workers, num_ready = max(wanted, len(found)), states.count("ready")
        is_whole = num_ready == num_workers and all(worker.breaker == "closed" for worker in found)
        state: PoolState = "empty" if not num_ready else "ok" if is_whole else "degraded"
        pools.append(
            {
                "name": name,
                "role": found[0].info.role if found else config.role_of(name),
                "workers": num_workers,
                "ready": num_ready,
                "draining": states.count("draining"),
                "lost": states.count("lost"),
                "state": state,
            }
        )
    return pools


def _move(worker: WorkerStatus, sizes: dict[str, int]) -> None:
    """One that the planner moved is not missing where its id says that it began."""
    home = worker.info.worker_id.rpartition("-")[0]
    if home in sizes and worker.info.pool in sizes and home != worker.info.pool:
        sizes[home] -= 1
        sizes[worker.info.pool] += 1


def health_of(core: RouterCore, pools: list[dict[str, Any]]) -> Health:
    """`down`: no request can be placed. `degraded`: some pool is not whole."""
    if why_not_ready(core) is not None:
        return "down"
    return "ok" if all(pool["state"] == "ok" for pool in pools) else "degraded"


def why_not_ready(core: RouterCore) -> str | None:
    """Why no new request could be placed now; None: one could."""
    if core.stopping:
        return "the router is stopping"
    usable = list(core.view.placeable())
    missing = [
        what
        for what, there in (
            ("prefill", any(worker.can_prefill for worker in usable)),
            ("decode", any(worker.can_decode for worker in usable)),
        )
        if not there
    ]
    if not missing:
        return None
    away = [f"{w.worker_id} is {core.view.state_of(w)}" for w in core.view.workers.values() if w not in usable]
    return f"no worker that can {' or '.join(missing)} takes requests" + (f" ({', '.join(away)})" if away else "")


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    info, load = worker.info, worker.load
    queried = load.cache_queried_tokens
    return {
        "worker_id": info.worker_id,
        "pool": info.pool,
        "role": info.role,
        "state": worker.state,
        "breaker": worker.breaker,
        "device": info.device,
        "node": info.node,
        "blocks_total": load.blocks_total,
        "blocks_free": load.blocks_free,
        "blocks_cached": load.blocks_cached,
        "stranded_blocks": load.stranded_blocks,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "pending_tokens": load.num_pending_tokens,
        "outstanding": worker.num_outstanding,
        "bytes_sent": load.bytes_sent,
        "bytes_received": load.bytes_received,
        "cache_hit_share": load.cache_hit_tokens / queried if queried else None,
        "seen_s_ago": worker.seen_s_ago,
    }


def latency_data(latencies: Latencies, now: float) -> dict[str, Any]:
    """Percentiles of the last minute, within 2.5 %, and what was delivered per second in it."""
    latencies.settle()
    ttft, tbt, e2e = (_percentiles(kind.window, now) for kind in (latencies.ttft, latencies.tbt, latencies.e2e))
    seconds = min(float(WINDOW_S), max(1.0, now - latencies.started_at))
    return {
        "window_s": WINDOW_S,
        "ttft_ms": ttft,
        "tbt_ms": tbt,
        "e2e_ms": e2e,
        "tokens_per_s": (ttft["count"] + tbt["count"]) / seconds,
        "requests_per_s": e2e["count"] / seconds,
    }


def _percentiles(window: Window, now: float) -> dict[str, Any]:
    p50, p90, p99 = (None if s is None else s * 1e3 for s in window.percentiles((0.5, 0.9, 0.99), now))
    return {"count": window.count(now), "p50": p50, "p90": p90, "p99": p99}


def record_data(record: RequestRecord, now: float) -> dict[str, Any]:
    """A request that ended, in short."""
    timeline = RequestTimeline(marks=record.marks)
    received_at = record.marks.get(Mark.RECEIVED)
    total = timeline.total()
    placement = record.placements[-1] if record.placements else None
    return {
        "request_id": record.request_id,
        "label": record.label,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "prefill": placement.prefill if placement else None,
        "decode": placement.decode if placement else None,
        "attempts": record.attempts,
        "started_s_ago": None if received_at is None else now - received_at,
        "total_ms": None if total is None else total * 1e3,
        "stages": [{"name": str(stage), "ms": seconds * 1e3} for stage, seconds in timeline.stages().items()],
    }
