"""In what form KV blocks travel, and which part of which local block each of them is.

Blocks travel as their source has them, in its layout and, where it is told to compress, encoded: so the source sends
plain blocks without a copy, and hashes each once. A receiver whose pool has the same format writes them as they are;
any other takes them apart, here called a landing.

    wire blocks of 24      |       0       |       1       |  2 .  .  |        index in the transfer
    local blocks of 16     |  0  |  1  |   2    |   3   |   4  |  .  .       place in the request's block table
                           ^ tokens that are here already are never written; beyond the context there are zeros

Pure: arrays are only indexed and assigned, so NumPy's and torch's will do. Must not know memory or transports;
`kv_transfer.wire_blocks` has the buffers, `kv_transfer.wire_encoding` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from baton.config import TransferConfig
from baton.layout import KVLayout

Encoding = Literal["plain", "int8", "fp8"]
"""`plain`: the bytes of the pool. Else one byte a number, and a float32 scale for each (layer, key or value, head)."""

SCALE_BYTES: Final = 4
MAX_WIRE_BLOCK_BYTES: Final = 256 << 20
"""Of one block: it is one frame, or one buffer here. Formats whose blocks are larger are refused at the Hello."""
LANDS: Final = -1
"""In place of a local block id: this wire block is taken apart when it has come."""


class WireFormat(msgspec.Struct, frozen=True):
    """What a block on the wire is. `layout` is its source's."""

    layout: KVLayout
    encoding: Encoding = "plain"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire."""
        if self.encoding == "plain":
            return self.layout.block_bytes
        layers, two, heads, block_size, head_dim = self.layout.block_shape
        return layers * two * heads * (SCALE_BYTES + block_size * head_dim)


def wire_encoding(config: TransferConfig) -> Encoding:
    """In which a worker with this configuration ships."""
    return "plain" if config.wire_encoding == "none" else config.wire_encoding


class Landing(NamedTuple):
    """Where the blocks of one transfer go whose format is not the pool's."""

    format: WireFormat
    blocks: tuple[int, ...]
    """Local block ids of the request's context, by place."""
    num_context: int
    """Tokens of the context; whatever the wire blocks hold beyond them is not used."""
    first_token: int
    """Tokens before it are here already, in blocks that others may be reading."""


class Piece(NamedTuple):
    """Token positions that a wire block and a local block have in common."""

    place: int
    """Of the local block, in the request's table."""
    source: slice
    """Positions in the wire block."""
    target: slice
    """The same tokens' positions in the local block."""


def pieces(index: int, wire_size: int, local_size: int, num_context: int, first_token: int = 0) -> list[Piece]:
    """Where the tokens of wire block `index` go: those in `[first_token, num_context)` that it covers, in order.

    `wire_size` and `local_size` are tokens per block, there and here.
    """
    found = []
    token, end = max(index * wire_size, first_token), min((index + 1) * wire_size, num_context)
    while token < end:
        place = token // local_size
        until = min(end, (place + 1) * local_size)
        source, target = index * wire_size, place * local_size
        found.append(Piece(place, slice(token - source, until - source), slice(token - target, until - target)))
        token = until
    return found


def padding(index: int, wire_size: int, local_size: int, num_context: int) -> tuple[int, slice] | None:
    """`(place, positions)` of the local block behind the context's last token, if wire block `index` has that token.

    They must be written too: attention multiplies them by zero, which hides only what is finite.
    """
    rest = num_context % local_size
    if not rest or not index * wire_size < num_context <= (index + 1) * wire_size:
        return None
    return num_context // local_size, slice(rest, local_size)


def common_heads(source: range, target: range) -> tuple[slice, slice] | None:
    """Of two shards of the KV heads: where the heads that both hold lie in each; None if there are none.

    `range(a, b)`: the shard holds heads a to b - 1 of the model.
    """
    first, end = max(source.start, target.start), min(source.stop, target.stop)
    if first >= end:
        return None
    return slice(first - source.start, end - source.start), slice(first - target.start, end - target.start)


def reslice(
    source: Any,
    targets: Mapping[int, Any],
    parts: Iterable[Piece],
    rest: tuple[int, slice] | None,
    heads: tuple[slice, slice],
) -> None:
    """Copy `parts` (`pieces`) of a wire block into local blocks, and put zeros into `rest` (`padding`).

    `source` and each target, by place, are arrays `[layers, 2, kv_heads, block_size, head_dim]` of one dtype; they may
    differ in `block_size` and in `kv_heads`, of which `heads` (`common_heads`) are copied.
    """
    theirs, ours = heads
    for place, from_, to in parts:
        targets[place][:, :, ours, to] = source[:, :, theirs, from_]
    if rest is not None:
        place, positions = rest
        targets[place][:, :, ours, positions] = 0
