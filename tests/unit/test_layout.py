"""KV layouts: sizes, and which two can talk."""

from __future__ import annotations

import msgspec
import pytest

from baton.errors import LayoutError
from baton.layout import KVLayout

DEMO = KVLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16")
LLAMA_8B = KVLayout(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")


def test_published_sizes() -> None:
    assert DEMO.block_bytes == 360 * 1024
    assert LLAMA_8B.block_bytes == 2 * 1024 * 1024
    assert LLAMA_8B.token_bytes == 131_072


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert DEMO.num_blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 31), ("num_kv_heads", 4), ("head_dim", 128), ("dtype", "float32")],
)
def test_a_difference_is_named_with_both_values(field: str, value: object) -> None:
    other = msgspec.structs.replace(DEMO, **{field: value})
    with pytest.raises(LayoutError, match=f"{field}: here has {getattr(DEMO, field)}, there has {value}"):
        DEMO.require_compatible(other, ours="here", theirs="there")
    DEMO.require_compatible(DEMO, ours="here", theirs="there")
    DEMO.require_compatible(msgspec.structs.replace(DEMO, block_size=32), ours="here", theirs="there")
