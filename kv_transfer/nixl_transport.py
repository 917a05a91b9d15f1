"""Transport over NVIDIA's NIXL (UCX): the target reads one-sided out of the source's pool, on the host or on a GPU.

    source   connects ──[Export: NIXL's metadata, where pool and table lie]──► target   listens
             ship: lends blocks ──(refs, in the session's Data)────────────►          receive: notes what to fetch
                                                           ◄── READ blocks ──          into scratch memory
                                                           ◄── READ epochs ──          then: were they lent till now?
             Sent  ◄──────────────[Finished: refs]──────────────────────────          copied into the pool

as `kv_transfer.pull_transport` says, over links of TCP (`kv_transfer.tcp_link`). `Finished` takes the place of NIXL's
notifications: those have to be polled for, a socket wakes its owner.

Scratch memory. NIXL cannot take a read back (`kv_transfer.nixl_agent`), and after a cancel nothing may be written to
the pool. So reads go beside it, to memory of their link, and what is still wanted when they have ended is copied
over. A cancel is a mark.

Valid. The source takes blocks back without waiting for readers, and neither a closing socket nor a message is in any
order with a read. So after the blocks the target reads their epochs (`kv_transfer.shared_pool`), in a read of its
own that starts when the first one has ended: if a block was given back while it was read, its epoch has moved by then.

The target has to ask NIXL how its reads get on, at growing intervals while there are any (`next_deadline`); the source,
and a target without reads, do not.

Knows pools, peers and refs; must not know requests, leases or checksums.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from baton.codec import Codec
from baton.errors import ConfigError
from baton.protocol import TransferId
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, DeviceMemory, Write
from kv_transfer.checksum import copying_into
from kv_transfer.device_pool import DeviceStream, base_address, is_on_device, wait_until_written
from kv_transfer.link_memory import nixl_slots
from kv_transfer.nixl_agent import NixlAgent, Region
from kv_transfer.pull_messages import MAX_LINK_MESSAGE_BYTES, Export
from kv_transfer.pull_transport import PullTransport, SourceLink
from kv_transfer.shared_pool import Fetch, LentBlocks, block_of, epoch_of
from kv_transfer.tcp_link import TcpListener, TcpToTarget

log = logging.getLogger(__name__)

FIRST_CHECK_S, LAST_CHECK_S = 0.0002, 0.02
"""How soon to ask about reads; doubles with each time in vain."""

_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Reachable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=83):
    """The handle of an Export: where the source's memory lies, and what NIXL needs to read it."""

    metadata: bytes
    pool: _Address
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """The GPU's number; 0 on the host."""
    on_gpu: bool
    table: _Address


_REACHABLE: Codec[Reachable] = Codec(Reachable, max_bytes=MAX_LINK_MESSAGE_BYTES)


class HostPool:
    """The own pool on the host."""

    on_gpu = False
    device = 0

    def __init__(self, pool: BlockMemory, write: Write | None):
        self._write_block = write or copying_into(pool)
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        first, last = pool.block(0), pool.block(pool.num_blocks - 1)
        self.address: int = first.ctypes.data
        if last.ctypes.data - self.address != (pool.num_blocks - 1) * pool.block_bytes:
            raise ConfigError("transfer.transport", "needs a KV pool that is one piece of memory", value="nixl")

    def scratch(self, num_slots: int) -> tuple[Any, int]:
        """Memory for so many blocks, to be given to `store`, and its address."""
        memory = np.zeros((num_slots, self.block_bytes), dtype=np.uint8)
        return memory, memory.ctypes.data

    def store(self, scratch: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block of the pool, slot of `scratch`); complete on return."""
        for block, slot in pairs:
            self._write_block(block, scratch[slot])

    def before_lending(self) -> None:
        """A CPU's steps have written when they end."""


class GpuPool:
    """The own pool on a GPU, with the methods of `HostPool`."""

    on_gpu = True

    def __init__(self, pool: DeviceMemory):
        self._pool = pool
        self._stream = DeviceStream(pool)
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.device: int = pool.device.index or 0
        self.address = base_address(pool)

    def scratch(self, num_slots: int) -> tuple[Any, int]:
        memory = self._pool.block_tensor(0).new_empty(num_slots, self.block_bytes)
        return memory, memory.data_ptr()

    def store(self, scratch: Any, pairs: Sequence[tuple[int, int]]) -> None:
        self._stream.copy((self._pool.block_tensor(block), scratch[slot]) for block, slot in pairs)

    def before_lending(self) -> None:
        wait_until_written(self._pool)


class _Read:
    """Blocks of a transfer on their way into slots of scratch memory: first they, then their epochs."""

    __slots__ = ("fetches", "handle", "is_cancelled", "of_epochs", "slots", "transfer")

    def __init__(self, transfer: TransferId, fetches: list[Fetch], slots: list[int], handle: int):
        self.transfer, self.fetches, self.slots = transfer, fetches, slots
        self.handle: int | None = handle
        """None: it has ended."""
        self.of_epochs = False
        self.is_cancelled = False


class RemotePool:
    """The pool of a source that is known to the agent as `peer`, and where this end reads it to.

    Raises OSError, with nothing left registered, where there is no memory for that.
    """

    def __init__(
        self,
        agent: NixlAgent,
        peer: str,
        own: HostPool | GpuPool,
        export: Export,
        there: Reachable,
        let_go: Callable[[RemotePool], None],
    ):
        self._agent, self._own, self._there, self._let_go = agent, own, there, let_go
        self.num_blocks, self.block_bytes = export.num_blocks, export.block_bytes
        self.peer = peer
        num_slots = nixl_slots(own.block_bytes)
        try:
            self._scratch, self._scratch_address = own.scratch(num_slots)
        except (MemoryError, RuntimeError) as e:  # RuntimeError is what torch raises
            raise OSError(f"no memory for {num_slots} blocks to be read to: {e}") from e
        self._epochs = np.zeros(num_slots, dtype=np.uint64)
        self._free = list(range(num_slots))
        self.reads: deque[_Read] = deque()
        self._registered: list[Any] = []
        try:
            self._register((self._scratch_address, num_slots * own.block_bytes, own.device), on_gpu=own.on_gpu)
            self._register((self._epochs.ctypes.data, self._epochs.nbytes, 0), on_gpu=False)
        except OSError:
            self.settle()
            raise

    def _register(self, region: Region, *, on_gpu: bool) -> None:
        self._registered.append(self._agent.register(region, on_gpu=on_gpu))

    @property
    def room(self) -> int:
        """Blocks that can be read now."""
        return len(self._free)

    def start(self, transfer: TransferId, fetches: list[Fetch]) -> None:
        """Read these blocks, no more than `room`. Raises OSError."""
        slots = [self._free.pop() for _ in fetches]
        size = self.block_bytes
        there = [(self._there.pool + block_of(fetch.ref) * size, size, self._there.device) for fetch in fetches]
        here = [(self._scratch_address + slot * size, size, self._own.device) for slot in slots]
        handle = self._agent.read(self.peer, there, self._there.on_gpu, here, self._own.on_gpu)
        self.reads.append(_Read(transfer, fetches, slots, handle))

    def finished(self) -> list[tuple[_Read, list[int]]]:
        """The reads that have ended and were not cancelled, with the indices that are in the pool. Raises OSError."""
        done: list[tuple[_Read, list[int]]] = []
        for read in list(self.reads):
            if not self._is_over(read):
                continue
            self.reads.remove(read)
            if not read.is_cancelled:
                valid = [
                    (fetch, slot)
                    for fetch, slot in zip(read.fetches, read.slots, strict=True)
                    if int(self._epochs[slot]) == epoch_of(fetch.ref)
                ]
                self._own.store(self._scratch, [(fetch.block, slot) for fetch, slot in valid])
                done.append((read, [fetch.index for fetch, _ in valid]))
            self._free += read.slots
        return done

    def _is_over(self, read: _Read) -> bool:
        """Goes on from the blocks to their epochs."""
        while read.handle is not None and self._agent.is_done(read.handle):
            self._agent.release(read.handle)
            read.handle = None
            if read.of_epochs or read.is_cancelled:
                return True
            read.of_epochs = True
            there = [(self._there.table + 8 * block_of(fetch.ref), 8, 0) for fetch in read.fetches]
            here: list[Region] = [(self._epochs.ctypes.data + 8 * slot, 8, 0) for slot in read.slots]
            read.handle = self._agent.read(self.peer, there, False, here, False)
        return False

    def cancel(self, transfer: TransferId) -> list[int]:
        """By which refs blocks were on their way: they will not be written."""
        cancelled = [read for read in self.reads if read.transfer == transfer and not read.is_cancelled]
        for read in cancelled:
            read.is_cancelled = True
        return [fetch.ref for read in cancelled for fetch in read.fetches]

    def close(self) -> None:
        """Nothing is wanted from here any more. Its memory stays until no read is on its way there, see `settle`."""
        for read in self.reads:
            read.is_cancelled = True
        self._let_go(self)

    def settle(self) -> bool:
        """Of a closed one: whether all reads have ended; then its memory is free."""
        for read in list(self.reads):
            if read.handle is not None:
                with contextlib.suppress(OSError):  # its connection failed, and with it all that was under way there
                    if not self._agent.is_done(read.handle):
                        continue
                self._agent.release(read.handle)
            self.reads.remove(read)
        if not self.reads:
            while self._registered:
                self._agent.deregister(self._registered.pop())
        return not self.reads


class NixlTransport(PullTransport):
    """Listens at `host_port`: `HOST[:PORT]`, by default any free port of 127.0.0.1.

    Raises ConfigError without NIXL, or where it cannot listen.
    """

    first_retry_s: ClassVar[float] = FIRST_CHECK_S
    last_retry_s: ClassVar[float] = LAST_CHECK_S

    def __init__(self, host_port: str = "") -> None:
        self._agent = NixlAgent(uuid.uuid4().hex)
        host, _, port = host_port.rstrip("/").partition(":")
        listener = TcpListener(host or "127.0.0.1", int(port or 0))
        bound: str = listener.sock.getsockname()[0]
        advertised = socket.gethostbyname(socket.gethostname()) if bound == "0.0.0.0" else bound
        self.address = f"nixl://{advertised}:{listener.port}"
        self.reach = "nixl"
        self.reaches_gpu = self._agent.reaches_gpu
        self._own: HostPool | GpuPool | None = None
        self._metadata = b""
        self._uses: Counter[str] = Counter()
        """How many links read from an agent: one that came back has two for a moment."""
        self._closing: list[RemotePool] = []
        """Their links are gone, reads are still on their way."""
        super().__init__(listener)

    def _use(self, pool: BlockMemory, write: Write | None) -> None:
        """Raises ConfigError for memory that NIXL cannot register."""
        if is_on_device(pool):
            if not self._agent.reaches_gpu:
                raise ConfigError(
                    "transfer.transport", "this NIXL has no UCX for GPUs", value="nixl", allowed="zmq+tcp"
                )
            own: HostPool | GpuPool = GpuPool(pool)
            self.reach = "nixl (GPU pools)"
        else:
            own = HostPool(pool, write)
        lent = LentBlocks(pool, shared=False)
        try:
            self._agent.register((own.address, own.num_blocks * own.block_bytes, own.device), on_gpu=own.on_gpu)
            table = lent.table.array
            self._agent.register((table.ctypes.data, table.nbytes, 0), on_gpu=False)
        except OSError as e:
            raise ConfigError("transfer.transport", str(e), value="nixl") from e
        self._pool, self._own, self._lent_pool = pool, own, lent
        self._metadata = self._agent.metadata()  # before scratch memory, which is nobody's business, is registered

    # --- source -----------------------------------------------------------------------------------

    def _link_to(self, address: str) -> TcpToTarget:
        return TcpToTarget(address.removeprefix("nixl://"))

    def _exported(self) -> tuple[bytes, tuple[int, ...]]:
        assert self._own is not None and self._lent_pool is not None
        own = self._own
        table: int = self._lent_pool.table.array.ctypes.data
        return _REACHABLE.encode(Reachable(self._metadata, own.address, own.device, own.on_gpu, table)), ()

    def _before_lending(self) -> None:
        assert self._own is not None
        self._own.before_lending()

    # --- target -----------------------------------------------------------------------------------

    def _borrow(self, export: Export, fds: list[int]) -> RemotePool:
        assert self._own is not None
        there = _REACHABLE.decode(export.handle)
        peer = self._agent.add_peer(there.metadata)
        self._uses[peer] += 1
        try:
            return RemotePool(self._agent, peer, self._own, export, there, self._let_go)
        except OSError:
            self._forget(peer)
            raise

    def _forget(self, peer: str) -> None:
        """One of the links from this agent is gone."""
        self._uses[peer] -= 1
        if not self._uses[peer]:
            del self._uses[peer]
            self._agent.remove_peer(peer)

    def _let_go(self, remote: RemotePool) -> None:
        self._forget(remote.peer)
        if not remote.settle():
            self._closing.append(remote)

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        for link in self._sources:
            if link.pool is not None and (refs := link.pool.cancel(transfer)):
                link.tell_finished(transfer, tuple(refs))

    def _copy(self) -> bool:
        """Take in what has been read, and have more read, oldest transfer first, as far as scratch memory goes.

        True: more can be done at once.
        """
        assert self._pool is not None
        self._closing = [remote for remote in self._closing if not remote.settle()]
        budget = max(1, MAX_BYTES_PER_CALL // self._pool.block_bytes)
        self._take_in()
        for transfer, wanted in list(self._wanted.items()):
            link = self._source(wanted.peer)
            if link is None or link.pool is None:
                continue
            batch = list(wanted.fetches.values())[: min(budget, link.pool.room)]
            budget -= len(batch)
            for fetch in batch:
                del wanted.fetches[fetch.index]
            if not wanted.fetches:
                del self._wanted[transfer]
            self._start(link, transfer, batch)
        self._take_in()
        links = (self._source(wanted.peer) for wanted in self._wanted.values())
        return any(link is not None and link.pool is not None and link.pool.room for link in links)

    def _start(self, link: SourceLink, transfer: TransferId, batch: list[Fetch]) -> None:
        remote: RemotePool = link.pool
        fetches = [fetch for fetch in batch if block_of(fetch.ref) < remote.num_blocks]
        if len(fetches) < len(batch):  # made up
            self._finish(link, transfer, [fetch for fetch in batch if fetch not in fetches], ())
        if not fetches:
            return
        try:
            remote.start(transfer, fetches)
        except OSError as e:
            self._fail(link, e)

    def _take_in(self) -> None:
        for link in list(self._sources):
            if link.pool is None:
                continue
            try:
                done = link.pool.finished()
            except OSError as e:
                self._fail(link, e)
                continue
            for read, copied in done:
                self._finish(link, read.transfer, read.fetches, tuple(copied))

    def _fail(self, link: SourceLink, e: OSError) -> None:
        log.warning("cannot read the KV pool of %s: %s", link.peer, e)
        self._source_lost(link, str(e))

    def _is_reading(self) -> bool:
        return any(link.pool is not None and link.pool.reads for link in self._sources)

    def close(self) -> None:
        served = self._pool, self._lent_pool  # peers may read them as long as the agent lives
        super().close()
        self._agent.close()
        self._closing.clear()
        self._own = None
        del served
