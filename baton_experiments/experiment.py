"""Runs placements against workloads on real clusters, and keeps one record per request.

All placements are up at once and take turns, point by point, so that a slow spell of the machine
does not fall on one of them alone; an idle cluster costs next to nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec

from baton.config import ClusterConfig, Secret, dump_config
from baton.errors import BatonError, ConfigError
from baton_cluster.ray_cluster import RayCluster, bundle
from baton_cluster.ray_session import RaySession
from baton_experiments.placement import num_workers, with_placement
from baton_experiments.workloads import Lengths, PlannedRequest, synthetic
from router.client import AsyncRouterClient


class RequestRecord(msgspec.Struct):
    """What one request experienced, as its client saw it. Times in milliseconds."""

    placement: str
    rate: float
    seed: int
    index: int
    at_s: float
    """Planned arrival since the start of the point."""
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float | None
    tbt_ms: list[float]
    """Gaps between consecutive tokens."""
    stages_ms: dict[str, float]
    residual_ms: float | None
    prefill_worker: str
    decode_worker: str
    kv_bytes: int
    error: str | None = None


class Plan(msgspec.Struct, frozen=True):
    """What to compare. `num_requests` per point, that is per placement, rate and seed."""

    placements: tuple[str, ...] = ("colocated:2", "split:1+1")
    rates: tuple[float, ...] = (0.5, 1.0)
    seeds: tuple[int, ...] = (0,)
    num_requests: int = 20
    lengths: Lengths = Lengths()

    def points(self) -> list[tuple[int, float, str]]:
        """(seed, rate, placement), in the order in which they run: placements take turns."""
        return [(seed, rate, placement) for seed in self.seeds for rate in self.rates for placement in self.placements]


class HasAddress(Protocol):
    """A running cluster, as far as an experiment needs it."""

    address: str


OnRecord = Callable[[RequestRecord], None]


def run(
    config: ClusterConfig,
    plan: Plan,
    *,
    vocab_size: int,
    progress: Callable[[str], None],
    on_record: OnRecord,
    clusters: dict[str, HasAddress] | None = None,
    session: RaySession | None = None,
) -> list[RequestRecord]:
    """Run every point of `plan`; `on_record` sees each record as it comes, so that Ctrl-C keeps what is done.

    Placements found in `clusters` are used as they are and left running; others are started on
    `session` (None: one of its own) and ended. Raises ConfigError if the placements differ in size.
    """
    require_equal_resources(plan.placements)
    secret = config.security.secret
    with ExitStack() as stack:
        running = dict(clusters or {})
        missing = [placement for placement in plan.placements if placement not in running]
        if missing:
            configs = {placement: with_placement(config, placement) for placement in missing}
            if session is None:
                cpus = sum(
                    int(bundle(pool)["CPU"]) * pool.workers for c in configs.values() for pool in c.pools.values()
                )
                session = stack.enter_context(RaySession(config.ray, num_cpus=cpus, namespace=f"baton-{config.name}"))
            for placement in missing:
                progress(f"starting {placement}")
                running[placement] = stack.enter_context(
                    RayCluster(configs[placement], session=session, progress=progress)
                )
        records: list[RequestRecord] = []
        for placement in plan.placements:
            progress(f"warming up {placement}")
            asyncio.run(_warm_up(running[placement].address, secret, placement, plan, vocab_size))
        for seed, rate, placement in plan.points():
            progress(f"{placement} at {rate:g} requests/s")
            requests = synthetic(
                rate=rate, num_requests=plan.num_requests, lengths=plan.lengths, vocab_size=vocab_size, seed=seed
            )
            label = {"placement": placement, "rate": rate, "seed": seed}
            records += asyncio.run(_run_point(running[placement].address, secret, requests, label, on_record))
        return records


def require_equal_resources(placements: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no placement, and unless all have the same number of workers."""
    for placement in placements:
        with_placement(ClusterConfig(), placement)
    sizes = {placement: num_workers(placement) for placement in placements}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "placements",
            "use unequal resources, so the comparison would say nothing",
            value=sizes,
            allowed="equal sizes",
        )


def resolved(config: ClusterConfig, plan: Plan) -> dict[str, Any]:
    """Configuration and plan as plain data, for the result file."""
    return {"cluster": dump_config(config), "plan": msgspec.to_builtins(plan)}


async def _warm_up(address: str, secret: Secret | None, placement: str, plan: Plan, vocab_size: int) -> None:
    """As many requests at once as there are workers, not recorded: first steps pay for memory and connections."""
    requests = synthetic(
        rate=1, num_requests=num_workers(placement), lengths=plan.lengths, vocab_size=vocab_size, seed=-1
    )
    async with AsyncRouterClient(address, secret=secret) as client:
        await asyncio.gather(*(client.generate(list(r.prompt), max_tokens=4, ignore_eos=True) for r in requests))


async def _run_point(
    address: str, secret: Secret | None, requests: list[PlannedRequest], label: dict[str, Any], on_record: OnRecord
) -> list[RequestRecord]:
    start = time.monotonic()

    async def one(index: int, request: PlannedRequest, client: AsyncRouterClient) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
        record = RequestRecord(
            **label,
            index=index,
            at_s=request.at_s,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            ttft_ms=None,
            latency_ms=None,
            tbt_ms=[],
            stages_ms={},
            residual_ms=None,
            prefill_worker="",
            decode_worker="",
            kv_bytes=0,
        )
        try:
            done = await client.generate(list(request.prompt), max_tokens=request.max_tokens, ignore_eos=True)
        except BatonError as e:
            record.error = f"{e.code}: {e}"
        else:
            times = done.token_times
            record.output_tokens = len(done.token_ids)
            record.ttft_ms = None if done.ttft_s is None else done.ttft_s * 1e3
            record.latency_ms = done.latency_s * 1e3
            record.tbt_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
            record.stages_ms = {str(stage): s * 1e3 for stage, s in done.timeline.stages().items()}
            record.residual_ms = None if done.residual_s is None else done.residual_s * 1e3
            record.prefill_worker, record.decode_worker = done.prefill_worker, done.decode_worker
            record.kv_bytes = done.kv_bytes
        on_record(record)
        return record

    async with AsyncRouterClient(address, secret=secret) as client:
        return list(await asyncio.gather(*(one(i, r, client) for i, r in enumerate(requests))))
