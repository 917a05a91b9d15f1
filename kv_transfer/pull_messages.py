"""What the two ends of a link of transports that pull say to each other, over whatever carries it.

    source ──[Export: how its pool and table are reached]──► target
           ◄──[Finished: refs]──────────────────────────────

Pure. Knows messages and their bounds; must not know sockets, or what is lent or wanted.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.codec import Codec
from baton.protocol import TransferId
from baton.wire import Count, Name
from kv_transfer.shared_pool import MAX_SHARED_BLOCKS

MAX_LINK_MESSAGE_BYTES = 64 << 10
MAX_REFS = 4096
"""In one `Finished`."""


class Export(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=81):
    """First message on a link, with what the source's pool and its table of epochs are reached by: files, a handle."""

    source: Name
    """The source's incarnation."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=MAX_SHARED_BLOCKS)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    handle: bytes = b""
    """Of what is not reached by files alone: what the transport's reader needs."""


class Finished(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=82):
    """The target reads by these refs no more, whether the blocks were copied, cancelled or could not be had.

    Refs and not indices: a block may have been lent anew meanwhile, and that lending has not ended.
    """

    transfer: TransferId
    refs: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_REFS)]


EXPORT: Codec[Export] = Codec(Export, max_bytes=MAX_LINK_MESSAGE_BYTES)
FINISHED: Codec[Finished] = Codec(Finished, max_bytes=MAX_LINK_MESSAGE_BYTES)
