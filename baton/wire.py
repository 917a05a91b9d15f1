"""What every message of Baton is made of: its base, and types with bounds that a peer cannot exceed."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
RequestId = Annotated[str, msgspec.Meta(max_length=64)]
"""128 bits in hex; a peer can make us remember some thousands of them."""
Words = Annotated[str, msgspec.Meta(max_length=1024)]
"""A description, such as a node's name."""
Reason = Annotated[str, msgspec.Meta(max_length=1 << 16)]
"""Why something went wrong, in words."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A time or a duration: finite, and of a size that timers can be computed with."""
BlockSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""A number of blocks, summed over seconds."""
Timeout = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Duration = Timeout
"""Seconds that something took, or is expected to take."""
MAX_PREFIX_HASHES = 1 << 14
"""In one list of a message."""
PrefixHashes = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PREFIX_HASHES)]
"""Hashes of 8 bytes each (`baton.prefix_hash`), one after another."""
Marks = Annotated[dict[Annotated[int, msgspec.Meta(ge=0, lt=256)], Seconds], msgspec.Meta(max_length=64)]
"""Timeline marks (`baton.timeline.Mark`) -> seconds."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base: encoded as `[tag, field, ...]`. New fields go last and have a default."""
