"""How a worker's memory is shared out."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config import PoolConfig, parse_config
from baton.engine.memory import DEFAULT_KV_MIB, MemoryPlan, plan_memory
from baton.errors import ConfigError
from baton.layout import KVLayout
from kv_transfer.link_memory import gpu_link_bytes

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=1024, dtype="float32")
MIB = 1 << 20
assert LAYOUT.block_bytes == MIB // 2


def plan(pool: PoolConfig, **changes: Any) -> MemoryPlan:
    return plan_memory(pool, LAYOUT, **({"runtime": 200 * MIB, "weights": 500 * MIB, "step": 24 * MIB} | changes))


@pytest.mark.parametrize(
    ("pool", "num_blocks"),
    [
        (PoolConfig(), DEFAULT_KV_MIB * 2),
        (PoolConfig(kv_memory_mib=100), 200),
        (PoolConfig(memory_mib=1000), (1000 - 724) * 2),
        (PoolConfig(kv_blocks=7, kv_memory_mib=100, memory_mib=1000), 7),
        (PoolConfig(kv_memory_mib=100, memory_mib=1000), 200),
    ],
)
def test_the_most_exact_setting_counts(pool: PoolConfig, num_blocks: int) -> None:
    assert plan(pool).num_blocks == num_blocks


def test_a_budget_is_kept() -> None:
    found = plan(PoolConfig(memory_mib=801))
    assert 800 * MIB < found.total <= 801 * MIB


def test_a_gpu_keeps_a_tenth() -> None:
    found = plan(PoolConfig(), runtime=0, device_bytes=10_000 * MIB)
    assert found.total == 9_000 * MIB


def test_the_arithmetic_is_shown() -> None:
    assert str(plan(PoolConfig(kv_memory_mib=512))) == (
        "1,236 MiB = 200 MiB runtime + 500 MiB weights + 24 MiB step + 512 MiB KV pool "
        "(1,024 blocks of 16 tokens, 512 KiB each: 16,384 tokens)"
    )


def test_too_little_names_the_setting_and_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"memory_mib.*with one it is 724 MiB = 200 MiB runtime.*>= 725"):
        plan(PoolConfig(memory_mib=700))
    tiny = KVLayout(num_layers=80, num_kv_heads=8, block_size=256, head_dim=128, dtype="float32")
    with pytest.raises(ConfigError, match=r"kv_memory_mib.*holds not one KV block.*>= 160"):
        plan_memory(PoolConfig(kv_memory_mib=100), tiny, runtime=0, weights=0, step=0)


def test_links_of_a_gpu_are_taken_from_its_pool() -> None:
    kept = plan(PoolConfig(), runtime=0, device_bytes=10_000 * MIB, links=96 * MIB)
    assert kept.total == 9_000 * MIB
    assert kept.num_blocks == plan(PoolConfig(), runtime=0, device_bytes=10_000 * MIB).num_blocks - 2 * 96
    assert "24 MiB step + 96 MiB links + " in str(kept)


@pytest.mark.parametrize(
    ("transport", "pool", "block_mib", "mib"),
    [
        ("nccl", "decode", 1, 3 * 3 * 16),
        ("nccl", "decode", 100, 3 * 3 * 100),
        ("nccl", "both", 1, 2 * 3 * 16),
        ("nccl", "prefill", 1, 0),
        ("faulty+nixl?drop=0.1", "decode", 1, 3 * 8),
        ("nixl", "decode", 100, 3 * 2 * 100),
        ("cuda-ipc", "decode", 1, 0),
        ("auto", "decode", 1, 0),
    ],
)
def test_what_links_take(transport: str, pool: str, block_mib: int, mib: int) -> None:
    """Scratch memory for each prefill worker, which links of a worker to itself do not need."""
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 4}, "both": {"workers": 1}}
    if transport == "cuda-ipc":
        pools = {name: {**fields, "device": "cuda", "gpus": 1} for name, fields in pools.items()}  # type: ignore[dict-item]
    config = parse_config({"pools": pools, "transfer": {"transport": transport}})
    assert gpu_link_bytes(config, pool, block_mib * MIB) == mib * MIB


def test_where_roles_change_all_others_may_come_to_send() -> None:
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 4}}
    tree = {"pools": pools, "transfer": {"transport": "nixl"}, "planner": {"enabled": True}}
    assert gpu_link_bytes(parse_config(tree), "decode", MIB) == 5 * 8 * MIB
