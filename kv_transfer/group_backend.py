"""What `gloo` and `nccl` differ in: the memory they reach, and the process group of torch.distributed that moves it.

A group has two ranks and belongs to one link: rank 0 is the source, rank 1 the target. There is no global world;
`init_process_group` is never called.

Knows tensors, streams and groups; must not know transfers, peers or sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from baton.errors import ConfigError
from kv_transfer.base import BlockMemory, DeviceMemory, Write
from kv_transfer.checksum import copying_into
from kv_transfer.device_pool import DeviceStream
from kv_transfer.link_memory import NCCL_MESSAGE_BYTES

SOURCE, TARGET = 0, 1

LINK_TIMEOUT_S = 10.0
"""For two live processes to make their group."""
BATCH_TIMEOUT_S = 10.0
"""For the blocks of one message, once both sides have begun: then gloo breaks the link."""
_FOREVER = timedelta(days=365)
_PAYLOAD, _NEVER_SENT = 1, 2
"""Tags."""


class Group(Protocol):
    """The process group of one link, whose thread calls all but `abort`. Operations raise RuntimeError if it broke."""

    def send(self, blocks: Sequence[torch.Tensor], written: Any) -> None:
        """From rank 0 to rank 1; returns when nothing reads the blocks any more. `written`: see `Backend.written`."""
        ...

    def post_receive(self, rows: Sequence[torch.Tensor]) -> Any:
        """Begin to receive what the peer sends, a block into each row. Returns what `wait` takes."""
        ...

    def wait(self, posted: Any) -> None:
        """Until all has been received."""
        ...

    def abort(self) -> bool:
        """End whatever operation there is, from any thread. It fails, or its result must not be used.

        True: the group touches no memory any more, whatever its own thread still waits for.
        """
        ...

    def close(self) -> None:
        """Abort, and return when the group touches no memory any more."""
        ...


class Backend(Protocol):
    """One transport's: the pool, as its groups reach it."""

    scheme: str
    reaches_gpu: bool
    max_message_bytes: int
    """Blocks that travel together; one block may be longer."""
    block_bytes: int

    def register(self, pool: BlockMemory, write: Write | None) -> None: ...

    def source(self, block_id: int) -> torch.Tensor:
        """A block of the pool, without a copy; shape `[block_bytes]`."""
        ...

    def written(self) -> Any:
        """What to wait for before blocks are read that the last step wrote; None: nothing."""
        ...

    def scratch(self, num_blocks: int) -> torch.Tensor:
        """Memory to receive into, shape `[num_blocks, block_bytes]`."""
        ...

    def store(self, rows: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        """Copy received rows into the pool, complete on return."""
        ...

    def open_group(self, store: Any, rank: int) -> Group:
        """Blocks until the peer has done the same with its end of the `torch.distributed` store.

        Raises RuntimeError if it does not within `LINK_TIMEOUT_S`.
        """
        ...


# --- gloo -------------------------------------------------------------------------------------------


class GlooGroup:
    """Of pools in host memory. A send moves nothing until the peer has posted its receive."""

    def __init__(self, store: Any, rank: int, device: Any):
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=LINK_TIMEOUT_S)
        options._devices = [device]
        options._threads = 1  # for collectives, of which there are none
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, blocks: Sequence[torch.Tensor], written: Any) -> None:
        self.wait([self._group.send([block], TARGET, _PAYLOAD) for block in blocks])

    def post_receive(self, rows: Sequence[torch.Tensor]) -> Any:
        return [self._group.recv([row], SOURCE, _PAYLOAD) for row in rows]

    def wait(self, posted: Any) -> None:
        for work in posted:
            work.wait(timedelta(seconds=BATCH_TIMEOUT_S))

    def abort(self) -> bool:
        # Gloo's `abort` does nothing (torch 2.13). But when one operation runs out of time gloo closes the pair's
        # connections and fails all others, so this is one that cannot succeed. Zero would mean no limit. It forgets a
        # send whose first write has met a connection that is just closed: that one waits for its own limit.
        with contextlib.suppress(RuntimeError):
            peer = TARGET if self._group.rank() == SOURCE else SOURCE
            self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        return True

    def close(self) -> None:
        self.abort()


class GlooBackend:
    """`host`: the address of the interface to use. Raises ConfigError if there is no such interface, or no gloo."""

    scheme = "gloo"
    reaches_gpu = False
    max_message_bytes = 4 << 20

    def __init__(self, host: str):
        if not dist.is_available() or not dist.is_gloo_available():
            raise ConfigError("transfer.transport", "this torch has no gloo", value="gloo", allowed="auto, zmq+tcp")
        try:
            self._device = dist.ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as e:
            raise ConfigError("transfer.transport", f"gloo cannot use this host: {e}", value=f"gloo://{host}") from e
        self.block_bytes = 0

    def register(self, pool: BlockMemory, write: Write | None) -> None:
        self._pool = pool
        self._write_block = write or copying_into(pool)
        self.block_bytes = pool.block_bytes

    def source(self, block_id: int) -> torch.Tensor:
        return torch.from_numpy(self._pool.block(block_id))

    def written(self) -> Any:
        return None

    def scratch(self, num_blocks: int) -> torch.Tensor:
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8)

    def store(self, rows: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        for row, block_id in zip(rows, block_ids, strict=True):
            self._write_block(block_id, row.numpy())

    def open_group(self, store: Any, rank: int) -> Group:
        return GlooGroup(store, rank, self._device)


# --- nccl -------------------------------------------------------------------------------------------


class NcclGroup:
    """Of pools in a GPU's memory. Operations are in the order of one stream, and a host thread waits for them.

    An operation occupies the GPU until the peer joins in. So each side begins when it knows that the other is there.
    """

    def __init__(self, group: Any, rank: int, device: torch.device, module: Any):
        """`module`: `torch.cuda`, or what has its streams and events."""
        self._group = group
        self._module = module
        self._stream = module.Stream(device)
        # NCCL connects at the first operation, which takes its time: here, and not under a transfer.
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        module.current_stream(device).synchronize()
        if rank == SOURCE:
            self.send([token], None)
        else:
            self.wait(self.post_receive([token]))

    def send(self, blocks: Sequence[torch.Tensor], written: Any) -> None:
        with self._module.stream(self._stream):
            if written is not None:
                self._stream.wait_event(written)
            works = [self._group.send([block], TARGET, _PAYLOAD) for block in blocks]
        self.wait(works)

    def post_receive(self, rows: Sequence[torch.Tensor]) -> Any:
        with self._module.stream(self._stream):
            return [self._group.recv([row], SOURCE, _PAYLOAD) for row in rows]

    def wait(self, posted: Any) -> None:
        with self._module.stream(self._stream):
            for work in posted:
                work.wait()  # the stream waits, not this thread; a limit would make it busy
            event = self._module.Event(blocking=True)
            event.record(self._stream)
        event.synchronize()

    def abort(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        return False  # what was queued on the stream before may still run

    def close(self) -> None:
        self.abort()
        with contextlib.suppress(RuntimeError):
            self._stream.synchronize()


class NcclBackend:
    """Raises ConfigError where torch has no NCCL or sees no GPU.

    Two ranks on one GPU need NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1; older ones refuse to connect them.
    NCCL picks the network itself (NCCL_SOCKET_IFNAME, NCCL_IB_HCA); `host` is where links are made.
    """

    scheme = "nccl"
    reaches_gpu = True
    max_message_bytes = NCCL_MESSAGE_BYTES
    _device_type = "cuda"
    _module: Any = torch.cuda

    def __init__(self, host: str):
        self._require()
        # A group that failed ends its link here; torch's watchdog would end the process, or wait for its store.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        self.block_bytes = 0

    def _require(self) -> None:
        missing = ""
        if not dist.is_available() or not dist.is_nccl_available():
            missing = f"this torch ({torch.__version__}) has no NCCL: install a build for CUDA"
        elif not torch.cuda.is_available():
            missing = "torch sees no GPU: check the driver and CUDA_VISIBLE_DEVICES"
        if missing:
            raise ConfigError("transfer.transport", missing, value="nccl", allowed="auto, shm, zmq+tcp, gloo")

    def register(self, pool: BlockMemory, write: Write | None) -> None:
        """Raises ConfigError for a pool that is not on a GPU."""
        if not isinstance(pool, DeviceMemory) or pool.device.type != self._device_type:
            raise ConfigError(
                "transfer.transport",
                "needs KV pools on GPUs",
                value="nccl",
                allowed="auto, shm, zmq+tcp, gloo",
            )
        self._pool = pool
        self.block_bytes = pool.block_bytes
        self._copies = DeviceStream(pool)

    def source(self, block_id: int) -> torch.Tensor:
        return self._pool.block_tensor(block_id)

    def written(self) -> Any:
        return self._pool.written

    def scratch(self, num_blocks: int) -> torch.Tensor:
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8, device=self._pool.device)

    def store(self, rows: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        targets = [self._pool.block_tensor(block_id) for block_id in block_ids]
        self._copies.copy(zip(targets, rows, strict=True))

    def open_group(self, store: Any, rank: int) -> Group:
        self._module.set_device(self._pool.device)  # of this thread
        return NcclGroup(self._process_group(store, rank), rank, self._pool.device, self._module)

    def _process_group(self, store: Any, rank: int) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        return dist.ProcessGroupNCCL(store, rank, 2, options)


BACKENDS: dict[str, Callable[[str], Backend]] = {"gloo": GlooBackend, "nccl": NcclBackend}
