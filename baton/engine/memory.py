"""How a worker's memory is shared out, and how many KV blocks that leaves: the arithmetic, and its words.

Pure numbers; knows no tensors and no devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import PoolConfig
from baton.errors import ConfigError
from baton.layout import KVLayout

DEFAULT_KV_MIB = 512
"""MiB of a KV pool on a CPU where nothing is configured."""
GPU_SHARE = 0.9
"""Of a GPU's memory for one worker, where nothing is configured; the rest is left to kernels' own needs."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one worker."""

    runtime: int
    """Of the process before the model was loaded: interpreter and libraries. 0 on a GPU."""
    weights: int
    step: int
    """What the largest step needs beside weights and KV: activations and logits."""
    num_blocks: int
    layout: KVLayout
    links: int = 0
    """On a GPU: what links to other workers take in (`kv_transfer.link_memory`)."""

    @property
    def pool(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def total(self) -> int:
        return self.runtime + self.weights + self.step + self.links + self.pool

    def __str__(self) -> str:
        links = f"{_mib(self.links)} links + " if self.links else ""
        return (
            f"{_mib(self.total)} = {_mib(self.runtime)} runtime + {_mib(self.weights)} weights "
            f"+ {_mib(self.step)} step + {links}{_mib(self.pool)} KV pool "
            f"({self.num_blocks:,} blocks of {self.layout.block_size} tokens, "
            f"{self.layout.block_bytes / 2**10:g} KiB each: {self.num_blocks * self.layout.block_size:,} tokens)"
        )


def plan_memory(
    pool: PoolConfig,
    layout: KVLayout,
    *,
    runtime: int,
    weights: int,
    step: int,
    links: int = 0,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """The pool's size: `kv_blocks`, else `kv_memory_mib`, else what `memory_mib` leaves, else a default.

    device_bytes: memory of the GPU that this worker has or can have; None on a CPU. Raises ConfigError where that is
    not one block, with the arithmetic.
    """
    key, num_blocks = "kv_blocks", pool.kv_blocks
    if num_blocks is None and pool.kv_memory_mib is not None:
        key, num_blocks = "kv_memory_mib", (pool.kv_memory_mib << 20) // layout.block_bytes
    if num_blocks is None and (pool.memory_mib is not None or device_bytes is not None):
        key = "memory_mib"
        budget = pool.memory_mib << 20 if pool.memory_mib is not None else int((device_bytes or 0) * GPU_SHARE)
        num_blocks = max(0, budget - runtime - weights - step - links) // layout.block_bytes
    if num_blocks is None:
        key, num_blocks = "kv_memory_mib", (DEFAULT_KV_MIB << 20) // layout.block_bytes
    plan = MemoryPlan(runtime, weights, step, num_blocks, layout, links)
    if not num_blocks:
        one = MemoryPlan(runtime, weights, step, 1, layout, links)
        least = -(-(layout.block_bytes if key == "kv_memory_mib" else one.total) >> 20)
        raise ConfigError(
            key,
            "holds not one KV block" + ("" if key == "kv_memory_mib" else f"; with one it is {one}"),
            value=getattr(pool, key),
            allowed=f">= {max(1, least)} for this model",
        )
    return plan


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
