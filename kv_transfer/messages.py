"""What the two ends of a hand-over say to each other, over the control sockets.

P is the prefill worker, D the decode worker. KV blocks themselves travel on the data link.

    P ── Hello ──────► D     once per link, before anything else
      ◄─ Welcome ─────       or HelloRefused
    P ── Offer ──────► D     before the first chunk; carries the whole request
      ◄─ Accept ──────       blocks are reserved; or Refuse
    P ══ blocks ═════► D     as each chunk ends (a pulling transport: Data names what to fetch)
    P ── Commit ─────► D     all blocks that were sent, with their checksums, and the first token
      ◄─ Ack ─────────       verified and adopted; or Nack
    either: AbortTransfer
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.layout import KVLayout
from baton.protocol import Priority, TransferId
from baton.sampling_params import SamplingParams, TokenId, TokenIds
from baton.wire import Count, Name, Timeout, Words
from kv_transfer.wire_format import Encoding

MAX_BLOCKS = 1 << 20

BlockIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
"""Shorter than `baton.wire.Reason`, in which it is handed on to the router."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, tag=60):
    """P introduces itself on a new link. D refuses what cannot work, naming both values."""

    version: Count
    worker_id: Name
    incarnation: Name
    fingerprint: Name
    layout: KVLayout
    reach: Words = ""
    """`KVTransport.reach`: what P can move blocks by, and where to."""
    encoding: Encoding = "plain"
    """In which P's blocks travel; with `layout`, their `WireFormat`."""


class Welcome(_Message, frozen=True, tag=61):
    worker_id: Name
    incarnation: Name


class HelloRefused(_Message, frozen=True, tag=62):
    worker_id: Name
    reason: Reason


class Offer(_Message, frozen=True, tag=63):
    """Carries all that D needs to run the request, so that D can recompute it alone if the KV is lost."""

    transfer: TransferId
    prompt: TokenIds
    prior: TokenIds
    sampling: SamplingParams
    timeout_s: Timeout | None = None
    """Seconds from now after which D ends the request by itself."""
    priority: Priority = 0


class Accept(_Message, frozen=True, tag=64):
    """D has reserved blocks. The first `prefix_blocks` blocks it holds already: they are not sent."""

    transfer: TransferId
    prefix_blocks: BlockIndex = 0


class Refuse(_Message, frozen=True, tag=65):
    transfer: TransferId
    reason: Reason


class Data(_Message, frozen=True, tag=66):
    """Only for transports that pull: block `indices[i]` can be fetched by `refs[i]`."""

    transfer: TransferId
    indices: Annotated[tuple[BlockIndex, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
    refs: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_BLOCKS)]


class Commit(_Message, frozen=True, tag=67):
    """Names all that must have come: the checksums of the blocks after those that D held, in order.

    Everything in it may overtake the blocks themselves; nothing depends on an order between the links.
    """

    transfer: TransferId
    first_token: TokenId
    checksums: Annotated[tuple[Checksum, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
    checksummed: bool
    """False: checksums are off, `checksums` only counts."""


class Ack(_Message, frozen=True, tag=68):
    transfer: TransferId


class Nack(_Message, frozen=True, tag=69):
    """D does not use the KV. `recomputing`: it goes on by itself; else P reports the attempt as failed."""

    transfer: TransferId
    reason: Reason
    recomputing: bool


class AbortTransfer(_Message, frozen=True, tag=70):
    transfer: TransferId
    reason: Reason


ToDecode = Hello | Offer | Data | Commit | AbortTransfer
ToPrefill = Welcome | HelloRefused | Accept | Refuse | Ack | Nack | AbortTransfer
