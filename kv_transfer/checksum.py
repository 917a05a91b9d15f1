"""The checksum of a KV block: xxh3, 64 bits.

Detects a block that was overwritten, truncated or mixed up; it is no defence against a forger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def block_checksum(block: npt.NDArray[Any]) -> int:
    """xxh3_64 of the bytes of a contiguous array. Any value may come out, 0 included."""
    return xxhash.xxh3_64_intdigest(block.reshape(-1).view(np.uint8).data)
