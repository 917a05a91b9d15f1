"""Which workers a configuration asks for. Light: launchers read it before anything heavy is imported."""

from __future__ import annotations

import msgspec

from baton.config import ClusterConfig


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker to be built: its stable name and the pool it belongs to."""

    worker_id: str
    pool: str


def worker_specs(config: ClusterConfig) -> list[WorkerSpec]:
    """All workers of a cluster, prefill pools first (`prefill-0`, `prefill-1`, `decode-0`, ...)."""
    order = {"prefill": 0, "decode": 1, "both": 2}
    pools = sorted(config.pools, key=lambda pool: order[config.role_of(pool)])
    return [WorkerSpec(f"{pool}-{i}", pool) for pool in pools for i in range(config.pools[pool].workers)]
