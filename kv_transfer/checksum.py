"""The checksum of a KV block: xxh3, 64 bits.

Detects a block that was overwritten, truncated or mixed up; it is no defence against a forger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import ConfigError

Block = npt.NDArray[Any]


def block_checksum(block: Block) -> int:
    """xxh3_64 of the bytes of a contiguous array. Any value may come out, 0 included."""
    return xxhash.xxh3_64_intdigest(block.reshape(-1).view(np.uint8).data)


def no_checksum(block: Block) -> int:
    """Stands in where checksums are off; `Commit.checksummed` says so."""
    return 0


def checksum_for(name: str) -> Callable[[Block], int]:
    """The function for `transfer.checksum`: `xxh3` or `none`. Raises ConfigError."""
    functions = {"xxh3": block_checksum, "none": no_checksum}
    if name not in functions:
        raise ConfigError("transfer.checksum", "unknown checksum", value=name, allowed=", ".join(functions))
    return functions[name]
