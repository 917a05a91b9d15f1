"""A KV pool on a GPU as transports reach it there (`DeviceMemory`): when it may be read, and how blocks get into it.

Copies run on a stream of their own: they wait for steps that have ended (`written`), not for the one that runs.
Knows a pool and its device; must not know transfers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch

from kv_transfer.base import BlockMemory, DeviceMemory
from kv_transfer.checksum import device_checksum


def is_on_device(pool: BlockMemory) -> TypeGuard[DeviceMemory]:
    """Whether transports have to reach this pool on its device; a pool on the CPU shows its bytes in `block`."""
    return isinstance(pool, DeviceMemory) and pool.device.type != "cpu"


def base_address(pool: DeviceMemory) -> int:
    """Where block 0 lies on the device; block `i` is the `block_bytes` bytes at `i * block_bytes` behind."""
    return pool.block_tensor(0).data_ptr()


def wait_until_written(pool: DeviceMemory) -> None:
    """Until all that steps which have ended wrote is in device memory, where any stream, process or card sees it.

    Done by the source before it lends blocks, this is all the order that readers need: kernels that have completed are
    visible to whatever is started later, and a reader starts after it has been told of the blocks.
    """
    if pool.written is not None:
        pool.written.synchronize()


class DeviceStream:
    """A stream of its own on the pool's device. None of CUDA is touched where the pool only stands in for a GPU's."""

    def __init__(self, pool: DeviceMemory):
        self._pool = pool
        on_gpu = pool.device.type == "cuda"
        self.stream = torch.cuda.Stream(pool.device) if on_gpu else None  # type: ignore[no-untyped-call]

    def wait_written(self) -> None:
        """What is queued from now on comes after the kernels of the last step that ended.

        They may still write to a block for its former owner when it is to be overwritten.
        """
        if self.stream is not None and self._pool.written is not None:
            self.stream.wait_event(self._pool.written)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (target, source), tensors on the device; complete on return."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            self.wait_written()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self.stream.synchronize()

    def checksum(self, block_id: int) -> int:
        """`device_checksum` of a block, of what steps that have ended wrote and of what was copied."""
        if self.stream is None:
            return device_checksum(self._pool.block_tensor(block_id))
        with torch.cuda.stream(self.stream):
            self.wait_written()
            return device_checksum(self._pool.block_tensor(block_id))

    def synchronize(self) -> None:
        """Until all that was queued is complete."""
        if self.stream is not None:
            self.stream.synchronize()

    @property
    def handle(self) -> int:
        """The stream as CUDA's C functions take it."""
        return self.stream.cuda_stream if self.stream is not None else 0
