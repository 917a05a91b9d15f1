"""What a KV block looks like in memory, and whether two layouts can exchange blocks.

Knows shapes and sizes only; must not know torch (`baton.engine.kv_cache` turns a layout into memory).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.errors import LayoutError

Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pool is one tensor `[blocks, layers, 2, kv_heads, block_size, head_dim]` of `dtype`.

    One block therefore holds the keys and values of `block_size` token positions for *all* layers
    in one contiguous span of `block_bytes` bytes, which is sent without gathering.
    """

    num_layers: Extent
    num_kv_heads: Extent
    block_size: Extent
    head_dim: Extent
    dtype: Annotated[str, msgspec.Meta(pattern="^(float32|bfloat16|float16)$")]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: `(layers, 2, kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        size = DTYPE_BYTES[self.dtype]
        for extent in self.block_shape:
            size *= extent
        return size

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache that one token occupies."""
        return self.block_bytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def require_compatible(self, other: KVLayout, *, ours: str, theirs: str) -> None:
        """Raise LayoutError naming the first differing field and both values; `ours`/`theirs` name the sides.

        Block sizes may differ: blocks are re-sliced on their way (`kv_transfer.wire_format`).
        """
        for name in self.__struct_fields__:
            mine, other_value = getattr(self, name), getattr(other, name)
            if mine != other_value and name != "block_size":
                raise LayoutError(
                    f"KV layouts differ in {name}: {ours} has {mine}, {theirs} has {other_value}; "
                    f"configure both workers alike"
                )
