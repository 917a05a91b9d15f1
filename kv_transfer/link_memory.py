"""Memory on a GPU that links take beside the KV pool: blocks come in there, and are copied into the pool from there.

Pure numbers, which the transports and the plan of a worker's memory have in common.
"""

from __future__ import annotations

from typing import Final

from baton.config import ClusterConfig

MAX_BLOCKS_PER_BATCH: Final = 64
"""That `gloo` and `nccl` send together."""
NCCL_MESSAGE_BYTES: Final = 16 << 20
"""Of a batch, unless one block is larger."""
NUM_SCRATCH: Final = 3
"""Batches that a target takes in before its owner has looked at one: one comes in, one is copied, one waits."""
NIXL_SCRATCH_BYTES: Final = 8 << 20
"""At least two blocks: while one read is copied over, the next is on its way."""


def blocks_per_batch(max_message_bytes: int, block_bytes: int) -> int:
    """Blocks that go over a group together."""
    return max(1, min(MAX_BLOCKS_PER_BATCH, max_message_bytes // block_bytes))


def nixl_slots(block_bytes: int) -> int:
    """Blocks that a link of `nixl` has room for."""
    return max(2, NIXL_SCRATCH_BYTES // block_bytes)


def gpu_link_bytes(config: ClusterConfig, pool: str, block_bytes: int) -> int:
    """What a worker of this pool, if it is on a GPU, needs once every prefill worker has made its link to it.

    What the libraries take for themselves, NCCL's channels for one, is not in it.
    """
    role = config.role_of(pool)
    if role == "prefill":
        return 0
    others = {name: other.workers for name, other in config.pools.items() if config.role_of(name) != "decode"}
    num_links = sum(others.values()) - (role == "both")
    if config.planner.enabled:  # all others may become prefill workers
        num_links = sum(other.workers for other in config.pools.values()) - 1
    match config.transfer.transport_kind:
        case "nccl":
            return num_links * NUM_SCRATCH * blocks_per_batch(NCCL_MESSAGE_BYTES, block_bytes) * block_bytes
        case "nixl":
            return num_links * nixl_slots(block_bytes) * block_bytes
        case _:
            return 0
