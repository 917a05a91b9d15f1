"""Transport between processes of one machine whose KV pools lie in shared memory: one copy, from pool to pool.

    source   connects ──[Export + the pool's and the table's files]──► target   listens, maps them read-only

and on as `kv_transfer.pull_transport` says. Neither the memory nor the links (`kv_transfer.shm_link`) have a name in a
file system: nothing is left behind by a process that was killed.

Reaches processes of the same user in the same network namespace (`reach`): containers can be linked if they share the
host's network or a pod, whatever their process and mount namespaces. Pools on GPUs cannot be mapped: that is
`kv_transfer.cuda_ipc_transport`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from baton.errors import ConfigError
from baton.host_memory import can_share
from kv_transfer.base import BlockMemory, Write
from kv_transfer.pull_messages import Export
from kv_transfer.pull_transport import PullTransport
from kv_transfer.shared_pool import BorrowedPool, Fetch, LentPool, OwnMemory, SharedBlocks
from kv_transfer.shm_link import Listener, ToTarget, reach


class ShmTransport(PullTransport):
    """Listens at once; raises ConfigError where this machine has no such memory."""

    _lent_pool: LentPool

    def __init__(self) -> None:
        if not can_share():
            raise ConfigError("transfer.transport", "needs Linux (memfd_create)", value="shm", allowed="auto, zmq+tcp")
        name = uuid.uuid4().hex
        self.address = f"shm://{name}"
        self.reach = f"shm ({reach()})"
        super().__init__(Listener(name))

    def _use(self, pool: BlockMemory, write: Write | None) -> None:
        """Raises ConfigError if the pool does not lie in shared memory."""
        if not isinstance(pool, SharedBlocks) or pool.host_memory.fd is None:
            raise ConfigError(
                "transfer.transport",
                "needs KV pools in shared memory, on the CPU",
                value="shm",
                allowed="auto, zmq+tcp",
            )
        self._pool = pool
        self._target = OwnMemory(pool.host_memory.array, write)
        self._lent_pool = LentPool(pool)

    def _link_to(self, address: str) -> ToTarget:
        return ToTarget(address.removeprefix("shm://"))

    def _exported(self) -> tuple[bytes, tuple[int, ...]]:
        return b"", self._lent_pool.fds

    def _borrow(self, export: Export, fds: list[int]) -> BorrowedPool:
        if len(fds) != 2:
            raise ValueError(f"{len(fds)} files came with an Export, two were to")
        return BorrowedPool(fds, export.num_blocks, export.block_bytes)

    def _read(self, borrowed: BorrowedPool, fetches: Sequence[Fetch]) -> Sequence[int]:
        return borrowed.copy(fetches, self._target)
