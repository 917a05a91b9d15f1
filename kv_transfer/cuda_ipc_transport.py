"""Transport between GPU pools of processes of one machine: one copy, from device memory to device memory.

    source   connects ──[Export: a CUDA IPC handle of the pool; the table's file]──► target   listens, maps them

and on as `kv_transfer.pull_transport` says, over the links of `kv_transfer.shm_link`: the table of epochs lies in
shared memory of the host, the blocks on a GPU, on the same one or on another that it has a way to.

Order. The source waits for `written`, the event behind its last step, before it lends blocks: what it lends is complete
in device memory, so the target needs no event of another process (`device_pool.wait_until_written`). The target copies
on a stream of its own, behind the event of its own last step, and waits for the stream before it looks at the epochs
again and reports: nothing is on its way into its pool between calls, so a cancel is a local act.

Reaches what `shm` reaches, between GPU pools only: so both ends hash blocks on the device, in the same way.
Knows pools, peers and refs; must not know requests, leases or checksums.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
import torch

from baton.codec import Codec
from baton.errors import ConfigError
from baton.host_memory import can_share
from kv_transfer.base import BlockMemory, DeviceMemory, Write
from kv_transfer.cuda_driver import HANDLE_BYTES, CudaDriver
from kv_transfer.device_pool import DeviceStream, base_address, is_on_device, wait_until_written
from kv_transfer.pull_messages import MAX_LINK_MESSAGE_BYTES, Export
from kv_transfer.pull_transport import PullTransport
from kv_transfer.shared_pool import BorrowedBlocks, Fetch, LentBlocks
from kv_transfer.shm_link import Listener, ToTarget, reach

log = logging.getLogger(__name__)

_PROCESS = uuid.uuid4().bytes
"""CUDA does not open a handle in the process that made it."""

_Position = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PoolMapper(Protocol):
    """How one's own pool is mapped by other processes, theirs here, and blocks copied from there."""

    def export(self) -> bytes:
        """By what other processes map this pool. Raises OSError."""
        ...

    def open(self, handle: bytes) -> int:
        """Where another process's pool lies here now. Raises OSError or ValueError."""
        ...

    def close(self, address: int) -> None:
        """What `open` gave is not read any more."""
        ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy from there to `target`, an address in our pool. Raises OSError."""
        ...

    def wait(self) -> None:
        """Until all copies are complete."""
        ...


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=84):
    """The handle of an Export."""

    process: bytes
    address: _Position
    """Of the pool, in its own process."""
    memory: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    """CUDA's handle of the allocation that holds the pool."""
    offset: _Position
    """Of the pool in it, in bytes."""


_HANDLE: Codec[DeviceHandle] = Codec(DeviceHandle, max_bytes=MAX_LINK_MESSAGE_BYTES)


class CudaMapper:
    """`PoolMapper` of a pool on a GPU. Raises ConfigError where there is no driver."""

    def __init__(self, pool: DeviceMemory, driver: CudaDriver | None = None):
        self._address = base_address(pool)
        self._driver = driver or CudaDriver(pool.device.index or 0)
        self._stream = DeviceStream(pool)
        self._mapped: dict[int, list[int]] = {}
        """Starts of allocations, by where a pool in them lies; several where it was opened again."""

    def export(self) -> bytes:
        memory, offset = self._driver.export(self._address)
        return _HANDLE.encode(DeviceHandle(_PROCESS, self._address, memory, offset))

    def open(self, handle: bytes) -> int:
        there = _HANDLE.decode(handle)
        if there.process == _PROCESS:
            return there.address
        base = self._driver.open(there.memory)
        self._mapped.setdefault(base + there.offset, []).append(base)
        return base + there.offset

    def close(self, address: int) -> None:
        bases = self._mapped.get(address)
        if bases is None:  # of this process
            return
        try:
            self._driver.close(bases.pop())
        except OSError as e:
            log.warning("a KV pool was not unmapped: %s", e)
        if not bases:
            del self._mapped[address]

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._stream.wait_written()
        self._driver.copy(target, source, num_bytes, self._stream.handle)

    def wait(self) -> None:
        self._stream.synchronize()


class BorrowedDevicePool(BorrowedBlocks[int]):
    """Another process's pool, mapped until it is closed; `target` is where our own pool begins."""

    def __init__(self, mapper: PoolMapper, handle: bytes, table_fd: int, num_blocks: int, block_bytes: int):
        super().__init__(table_fd, num_blocks, block_bytes)
        self._mapper = mapper
        self._address: int | None = mapper.open(handle)

    def _copy_run(self, source: int, block: int, count: int, target: int) -> None:
        assert self._address is not None, "read after close"
        size = self.block_bytes
        self._mapper.copy(target + block * size, self._address + source * size, count * size)

    def _wait(self) -> None:
        self._mapper.wait()

    def close(self) -> None:
        if self._address is not None:
            self._mapper.close(self._address)
            self._address = None


class CudaIpcTransport(PullTransport):
    """Listens at once. `mapper` gives the `PoolMapper` of a pool; None: CUDA's.

    Raises ConfigError where there is no CUDA.
    """

    reaches_gpu = True

    def __init__(self, mapper: Callable[[DeviceMemory], PoolMapper] | None = None) -> None:
        if not can_share() or (mapper is None and not torch.cuda.is_available()):
            raise ConfigError(
                "transfer.transport", "needs Linux and a GPU that torch sees", value="cuda-ipc", allowed="auto, shm"
            )
        self._new_mapper: Callable[[DeviceMemory], PoolMapper] = mapper or CudaMapper
        self._mapper: PoolMapper | None = None
        self._address = 0
        self._handle = b""
        name = uuid.uuid4().hex
        self.address = f"cuda-ipc://{name}"
        self.reach = f"cuda-ipc ({reach()})"
        super().__init__(Listener(name))

    def _use(self, pool: BlockMemory, write: Write | None) -> None:
        """Raises ConfigError if the pool is not on a GPU, or in memory that CUDA does not share."""
        if not is_on_device(pool):
            raise ConfigError(
                "transfer.transport", "needs KV pools on GPUs", value="cuda-ipc", allowed="auto, shm or zmq+tcp"
            )
        mapper = self._new_mapper(pool)
        try:
            self._handle = mapper.export()
        except OSError as e:
            raise ConfigError(
                "transfer.transport",
                f"this GPU's memory cannot be shared ({e}); unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
                value="cuda-ipc",
            ) from e
        self._pool, self._mapper, self._address = pool, mapper, base_address(pool)
        self._lent_pool = LentBlocks(pool)

    def _link_to(self, address: str) -> ToTarget:
        return ToTarget(address.removeprefix("cuda-ipc://"))

    def _exported(self) -> tuple[bytes, tuple[int, ...]]:
        assert self._lent_pool is not None and self._lent_pool.table.fd is not None
        return self._handle, (self._lent_pool.table.fd,)

    def _borrow(self, export: Export, fds: list[int]) -> BorrowedDevicePool:
        assert self._mapper is not None
        if len(fds) != 1:
            raise ValueError(f"{len(fds)} files came with an Export, one was to")
        return BorrowedDevicePool(self._mapper, export.handle, fds[0], export.num_blocks, export.block_bytes)

    def _read(self, borrowed: BorrowedDevicePool, fetches: Sequence[Fetch]) -> Sequence[int]:
        return borrowed.copy(fetches, self._address)

    def _before_lending(self) -> None:
        wait_until_written(self._pool)
