"""Copies of KV blocks, and their checksum, 64 bits: xxh3 of bytes on the host, a sum of mixed words of bytes on a GPU.

The two checksums differ: both ends of a link hash in the same way, as their transport reaches GPUs or not
(`KVTransport.reach`).
Detects a block that was overwritten, truncated or mixed up; it is no defence against a forger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.native.library import COPY_HASH_SHORTEST, copy_hash, plain_copy
from kv_transfer.base import BlockMemory, Write

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64 (Steele, Lea, Flood 2014)."""


def block_checksum(block: npt.NDArray[Any]) -> int:
    """xxh3_64 of the bytes of a contiguous array. Any value may come out, 0 included."""
    return xxhash.xxh3_64_intdigest(block.reshape(-1).view(np.uint8).data)


def copy_bytes(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy all of `source` into `target`, contiguous bytes of the same size, without the GIL.

    Where the native kernels were built, around the caches: KV blocks are as large as they are, and are read much later.
    Raises ValueError if the sizes differ.
    """
    _require_same(target, source)
    native = plain_copy()
    if native is None:
        np.copyto(target, source)
        return
    native(source.ctypes.data, target.ctypes.data, source.nbytes)


def copying_into(pool: BlockMemory) -> Write:
    """The `Write` that only copies."""

    def write(block_id: int, source: npt.NDArray[np.uint8]) -> None:
        copy_bytes(pool.block(block_id), source)

    return write


def _require_same(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    if target.nbytes != source.nbytes or not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes}, or not both are contiguous")


def copy_block(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
    """Copy all of `source` into `target`, contiguous bytes of the same size; returns its `block_checksum`.

    In one pass where the native kernels were built: faster than one after the other. Without the GIL.
    Raises ValueError if the sizes differ.
    """
    _require_same(target, source)
    native = copy_hash()
    size = source.nbytes
    if native is None or size < COPY_HASH_SHORTEST:
        np.copyto(target, source)
        return block_checksum(target)
    checksum: int = native(source.ctypes.data, target.ctypes.data, size)
    return checksum


def device_checksum(block: torch.Tensor) -> int:
    """Of the bytes of a contiguous tensor, computed where it lies, on the current stream; waits for the result.

    Equal on every device. The sum, modulo 2^64, of splitmix64's mix of each word and its position, mixed with the
    length: the order in which a GPU adds does not matter, the order of the words does.
    """
    import torch  # launchers come here too, and need not wait for it

    data = block.reshape(-1).view(torch.uint8)
    num_bytes = data.numel()
    if num_bytes % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-num_bytes // 8) * 8)
        padded[:num_bytes] = data
        data = padded
    words = data.view(torch.int64)
    mixed = words + torch.arange(1, len(words) + 1, device=words.device) * _signed(_GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    total = int((mixed ^ _shifted(mixed, 31)).sum()) & _MASK
    return _mix(total ^ num_bytes)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's own shift brings the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _MASK
    word = (word ^ (word >> 27)) * _SECOND & _MASK
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """As int64 has it."""
    return word - (1 << 64) if word >> 63 else word
