"""Transport between processes of one machine whose KV pools lie in shared memory: one copy, from pool to pool.

    source   connects ──[Export + the pool's and the table's files]──► target   listens, maps them read-only
             ship: lends blocks ──(refs, in the session's Data)──────►          receive: notes what to fetch
             Sent  ◄──────────────[Finished: indices]─────────────────          completions: copies

The target writes its pool, and reads the source's only by refs of blocks that are lent to it now: see
`kv_transfer.shared_pool`. So the source takes blocks back at once, whether it cancels, disconnects or is stopped,
and waits for no reader. Neither the memory nor the links (`kv_transfer.shm_link`) have a name in a file system: nothing
is left behind by a process that was killed.

Reaches processes of the same user in the same network namespace (`reach`): containers can be linked if they share the
host's network or a pod, whatever their process and mount namespaces. Pools on GPUs cannot be mapped.

Knows pools, peers and refs; must not know requests, leases or checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.errors import ConfigError, ProtocolError
from baton.host_memory import can_share
from baton.protocol import TransferId
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, Completion, LinkLost, Received, Sent
from kv_transfer.expected import TransportStats
from kv_transfer.shared_pool import BorrowedPool, Fetch, LentPool, SharedBlocks
from kv_transfer.shm_link import EXPORT, FINISHED, Export, Listener, ToSource, ToTarget, reach, require_same_user

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.001, 0.05
"""How soon to try again to tell a peer that does not read; doubles with each try in vain."""


class _Lent(msgspec.Struct):
    """What a transfer has lent: blocks by index (several where an index was shipped again)."""

    peer: str
    blocks: dict[int, list[int]] = msgspec.field(default_factory=dict)


class _Wanted(msgspec.Struct):
    """What a transfer has still to fetch, by index."""

    peer: str
    fetches: dict[int, Fetch] = msgspec.field(default_factory=dict)


class ShmTransport:
    """Listens at once; raises ConfigError where this machine has no such memory. Used by one thread."""

    pulls = True
    reaches_gpu = False

    def __init__(self) -> None:
        if not can_share():
            raise ConfigError("transfer.transport", "needs Linux (memfd_create)", value="shm", allowed="auto, zmq+tcp")
        name = uuid.uuid4().hex
        self.address = f"shm://{name}"
        self.reach = f"shm ({reach()})"
        self.stats = TransportStats()
        self._pool: SharedBlocks | None = None
        self._lent_pool: LentPool | None = None
        self._news: list[Completion] = []
        self._targets: dict[str, ToTarget] = {}
        self._lent: dict[TransferId, _Lent] = {}
        self._sources: list[ToSource] = []
        """Oldest first."""
        self._wanted: dict[TransferId, _Wanted] = {}
        self._retry_s = FIRST_RETRY_S
        self._retry_at: float | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while `completions` has something to tell, or to copy."""
        self._listener = Listener(name)

    def register(self, pool: BlockMemory) -> None:
        """Raises ConfigError if the pool does not lie in shared memory."""
        if not isinstance(pool, SharedBlocks) or pool.host_memory.fd is None:
            raise ConfigError(
                "transfer.transport",
                "needs KV pools in shared memory, on the CPU",
                value="shm",
                allowed="auto, zmq+tcp",
            )
        self._pool = pool
        self._lent_pool = LentPool(pool)

    # --- source -----------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        name = address.removeprefix("shm://")
        link = self._targets.get(peer)
        if link is not None:
            if link.name == name and not link.is_lost:
                return
            self.disconnect(peer)
        try:
            self._targets[peer] = ToTarget(name)
        except OSError as e:
            log.warning("no shared memory with %s at %s: %s", peer, address, e)

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """No refs where there is no link: nothing is lent then, and all is `Sent`."""
        assert self._lent_pool is not None, "ship before register"
        self.stats.blocks_shipped += len(blocks)
        link = self._targets.get(peer)
        if link is None or not self._export(link, transfer.source):
            if blocks:
                self._report(Sent(transfer, tuple(index for index, _ in blocks)))
            return ()
        refs = tuple(self._lent_pool.lend(block) for _, block in blocks)
        lent = self._lent.setdefault(transfer, _Lent(peer))
        for index, block in blocks:
            lent.blocks.setdefault(index, []).append(block)
        return refs

    def _export(self, link: ToTarget, source: str) -> bool:
        """Give the peer our files, once. False: the link is gone, as `completions` will tell."""
        assert self._lent_pool is not None
        if not link.is_exported and not link.is_lost:
            try:
                link.export(
                    Export(source, self._lent_pool.num_blocks, self._lent_pool.block_bytes), self._lent_pool.fds
                )
            except OSError as e:
                log.warning("the KV pool was not exported to %s: %s", link.name, e)
        return link.is_exported and not link.is_lost

    def disconnect(self, peer: str) -> None:
        """What the peer still wanted to read is void from now on."""
        link = self._targets.pop(peer, None)
        if link is not None:
            link.sock.close()
            self._take_back_from(peer)

    def _take_back_from(self, peer: str) -> None:
        for transfer in [t for t, lent in self._lent.items() if lent.peer == peer]:
            self._take_back(transfer)

    def _take_back(self, transfer: TransferId, indices: Sequence[int] | None = None) -> None:
        """Nobody reads these blocks any more (None: any of the transfer's). Those that are not lent are no matter."""
        lent = self._lent.get(transfer)
        if lent is None:
            return
        assert self._lent_pool is not None
        done = [index for index in (list(lent.blocks) if indices is None else indices) if index in lent.blocks]
        for index in done:
            for block in lent.blocks.pop(index):
                self._lent_pool.give_back(block)
        if not lent.blocks:
            del self._lent[transfer]
        if done:
            self._report(Sent(transfer, tuple(done)))

    def _read_targets(self) -> None:
        for peer, link in self._targets.items():
            while not link.is_lost and (data := link.receive()) is not None:
                if data:
                    self._on_finished(peer, data)
                    continue
                link.is_lost = True
                self._report(LinkLost(peer, f"the link to shm://{link.name} was lost"))
                self._take_back_from(peer)

    def _on_finished(self, peer: str, data: bytes) -> None:
        try:
            message = FINISHED.decode(data)
        except ProtocolError as e:
            self.stats.num_malformed += 1
            log.warning("dropped a malformed message of %s: %s", peer, e)
            return
        lent = self._lent.get(message.transfer)
        if lent is not None and lent.peer == peer:
            self._take_back(message.transfer, tuple(dict.fromkeys(message.indices)))

    # --- target -----------------------------------------------------------------------------------

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        if not blocks:
            return
        wanted = self._wanted.setdefault(transfer, _Wanted(peer))
        for ref, (index, block) in zip(refs, blocks, strict=True):
            wanted.fetches[index] = Fetch(index, ref, block)
        self._notify()

    def cancel(self, transfer: TransferId) -> None:
        """Source: the transfer's refs are void. Target: it is not fetched any more, and the source hears of it."""
        self._take_back(transfer)
        wanted = self._wanted.pop(transfer, None)
        link = self._source(wanted.peer) if wanted is not None else None
        if wanted is not None and link is not None:
            link.tell_finished(transfer, tuple(wanted.fetches))

    def _source(self, peer: str) -> ToSource | None:
        """The newest link from this peer."""
        return next((link for link in reversed(self._sources) if link.peer == peer), None)

    def _copy(self) -> bool:
        """Fetch what is wanted, oldest transfer first; what comes from a peer without a link waits for it.

        True: there was more than one call's share.
        """
        assert self._pool is not None
        budget = max(1, MAX_BYTES_PER_CALL // self._pool.block_bytes)
        for transfer, wanted in list(self._wanted.items()):
            link = self._source(wanted.peer)
            if link is None or link.pool is None:
                continue
            if budget == 0:
                return True
            batch = list(wanted.fetches.values())[:budget]
            budget -= len(batch)
            for fetch in batch:
                del wanted.fetches[fetch.index]
            if not wanted.fetches:
                del self._wanted[transfer]
            copied = tuple(link.pool.copy(batch, self._pool.host_memory.array))
            self.stats.num_dropped += len(batch) - len(copied)
            self.stats.blocks_written += len(copied)
            if copied:
                self._report(Received(transfer, copied))
            link.tell_finished(transfer, tuple(fetch.index for fetch in batch))
            if wanted.fetches:
                return True
        return False

    def _read_sources(self) -> None:
        for link in list(self._sources):
            while link.sock.fileno() >= 0:
                data, fds = link.receive()
                if data is None:
                    break
                try:
                    if data:
                        self._on_export(link, data, fds)
                    else:
                        self._source_lost(link, "it was closed")
                except (OSError, ProtocolError, ValueError) as e:
                    self.stats.num_malformed += 1
                    log.warning("closed a link of shared memory: %s", e)
                    self._source_lost(link, str(e))
                finally:
                    for fd in fds:
                        os.close(fd)

    def _on_export(self, link: ToSource, data: bytes, fds: list[int]) -> None:
        assert self._pool is not None
        export = EXPORT.decode(data)
        require_same_user(link.sock)
        if link.pool is not None or len(fds) != 2 or export.block_bytes != self._pool.block_bytes:
            raise ValueError(f"{export} with {len(fds)} files does not fit blocks of {self._pool.block_bytes} bytes")
        link.pool = BorrowedPool(fds, export.num_blocks, export.block_bytes)
        link.peer = export.source

    def _source_lost(self, link: ToSource, reason: str) -> None:
        """Unmaps its pool. What is wanted from it stays until it is cancelled: there may be a new link already."""
        self._sources.remove(link)
        link.sock.close()
        link.pool = None
        if link.peer:
            self._report(LinkLost(link.peer, f"its link was lost: {reason}"))

    # --- owner ------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        self._sources += self._listener.accept()
        self._read_sources()
        self._read_targets()
        more = self._copy()
        for link in self._sources:
            link.flush()
        stuck = any(link.is_stuck for link in self._sources)
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S) if stuck else FIRST_RETRY_S
        self._retry_at = None
        news, self._news = self._news, []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if more:
            self._notify()
        return news

    def pollables(self) -> Sequence[Any]:
        """Changes with links: ask before each wait."""
        links = [link.sock for link in self._targets.values() if not link.is_lost]
        return (self._event, self._listener.sock, *links, *(link.sock for link in self._sources))

    def next_deadline(self, now: float) -> float | None:
        if not any(link.is_stuck for link in self._sources):
            return None
        if self._retry_at is None:
            self._retry_at = now + self._retry_s
        return self._retry_at

    def close(self) -> None:
        if self._event < 0:
            return
        self._listener.sock.close()
        for target in self._targets.values():
            target.sock.close()
        for source in self._sources:
            source.sock.close()
        os.close(self._event)
        self._event = -1
        self._targets.clear()
        self._sources.clear()
        self._lent.clear()
        self._wanted.clear()
        self._news.clear()
        self._pool = self._lent_pool = None

    def _report(self, *news: Completion) -> None:
        self._news.extend(news)
        self._notify()

    def _notify(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)
