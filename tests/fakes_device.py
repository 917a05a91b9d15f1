"""Memory of the host that stands in for a GPU's, so that `cuda-ipc` runs anywhere; one way to open any transport."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.host_memory import map_read_only
from kv_transfer.base import KVTransport
from kv_transfer.cuda_ipc_transport import CudaIpcTransport
from kv_transfer.registry import open_transport
from tests.fakes_transfer import FakePool, watched


class DeviceStandIn:
    """`DeviceMemory` over a `FakePool`: what a GPU's pool is to transports that reach it there."""

    def __init__(self, pool: FakePool):
        self.pool = pool
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.device: Any = SimpleNamespace(type="stand-in", index=0)
        self.written: Any = None

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        raise AssertionError("a pool on a GPU has no host view")

    def block_tensor(self, block_id: int) -> torch.Tensor:
        return torch.from_numpy(self.pool.memory[block_id])


class MapperStandIn:
    """`PoolMapper` between processes of this machine, over the shared memory of `DeviceStandIn`s. Copies in `wait`."""

    def __init__(self, pool: Any):
        self.handle = f"/proc/{os.getpid()}/fd/{pool.pool.host_memory.fd} {pool.pool.host_memory.array.nbytes}"
        self.mapped: dict[int, Any] = {}
        self.queued: list[tuple[int, int, int]] = []

    def export(self) -> bytes:
        return self.handle.encode()

    def open(self, handle: bytes) -> int:
        path, _, size = handle.decode().partition(" ")
        fd = os.open(path, os.O_RDONLY)
        memory = map_read_only(fd, int(size))
        os.close(fd)
        self.mapped[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def close(self, address: int) -> None:
        del self.mapped[address]

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.queued.append((target, source, num_bytes))

    def wait(self) -> None:
        for target, source, num_bytes in self.queued:
            ctypes.memmove(target, source, num_bytes)
        self.queued.clear()


def open_end(scheme: str, pool: FakePool, incarnation: str = "P1") -> KVTransport:
    """One end with this pool registered; `cuda-ipc` with memory of the host that stands in for a GPU's."""
    if scheme == "cuda-ipc":
        transport: KVTransport = watched(CudaIpcTransport(MapperStandIn))
        transport.register(DeviceStandIn(pool), incarnation=incarnation)
        return transport
    transport = watched(open_transport(scheme))
    transport.register(pool, incarnation=incarnation)
    return transport
