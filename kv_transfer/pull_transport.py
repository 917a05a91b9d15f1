"""What transports that pull have in common: the source lends blocks, the target reads them and says when it is done.

    source   connects ──[Export: how the pool and its table are reached]──► target   listens, reaches them at once
             ship: lends blocks ──(refs, in the session's Data)───────────►          receive: notes what to fetch
             Sent  ◄──────────────[Finished: refs]─────────────────────────          completions: reads

The target writes its pool, and reads the source's only by refs of blocks that are lent to it now: see
`kv_transfer.shared_pool`. So the source takes blocks back at once, whether it cancels, disconnects or is stopped,
and waits for no reader.

A transport of this kind says how links are made, what an `Export` holds, and how blocks are read.
Knows pools, peers and refs; must not know requests, leases or checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from baton.errors import ProtocolError
from baton.protocol import TransferId
from baton.security import worth_saying
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, Completion, LinkLost, Received, Sent, Write
from kv_transfer.expected import TransportStats
from kv_transfer.pull_messages import EXPORT, FINISHED, Export
from kv_transfer.shared_pool import Fetch, LentBlocks

log = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Links on which no Export has come yet; a source sends it when it connects."""


class _Link(Protocol):
    @property
    def is_stuck(self) -> bool: ...
    def flush(self) -> None: ...


class TargetLink(_Link, Protocol):
    """The source's end of a link, see `kv_transfer.shm_link.ToTarget`."""

    name: str
    sock: Any
    is_up: bool
    is_lost: bool

    def export(self, export: Export, fds: tuple[int, ...]) -> None: ...
    def receive(self) -> bytes | None: ...


class SourceLink(_Link, Protocol):
    """The target's end of a link, see `kv_transfer.shm_link.ToSource`."""

    sock: Any
    peer: str
    pool: Any

    def check_peer(self) -> None: ...
    def receive(self) -> tuple[bytes | None, list[int]]: ...
    def tell_finished(self, transfer: TransferId, refs: tuple[int, ...]) -> None: ...


class LinkListener(Protocol):
    """Where sources connect to, see `kv_transfer.accepting.Accepting`."""

    sock: Any

    def accept(self) -> Sequence[SourceLink]: ...
    def pollables(self) -> Sequence[Any]: ...
    def next_deadline(self, now: float) -> float | None: ...


class _Lent(msgspec.Struct):
    """What a transfer has lent: by ref the index and the block, as often as it was lent."""

    peer: str
    blocks: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)


class _Wanted(msgspec.Struct):
    """What a transfer has still to fetch, by index."""

    peer: str
    fetches: dict[int, Fetch] = msgspec.field(default_factory=dict)


class PullTransport:
    """Listens at once. Used by one thread."""

    pulls = True
    reaches_gpu = False
    fixed_blocks = True
    address: str
    reach: str
    first_retry_s: ClassVar[float] = 0.001
    last_retry_s: ClassVar[float] = 0.05
    """How soon to look again for what nothing signals; doubles with each look in vain."""

    def __init__(self, listener: LinkListener) -> None:
        self.stats = TransportStats()
        self._listener = listener
        self._pool: Any = None
        self._lent_pool: LentBlocks | None = None
        self._news: list[Completion] = []
        self._incarnation = ""
        self._targets: dict[str, TargetLink] = {}
        self._untold: dict[str, str] = {}
        """Why there is no link to a peer; to be told with the first blocks that are shipped there."""
        self._losses: dict[str, LinkLost] = {}
        """Those in `_news` that tell of links to targets."""
        self._lent: dict[TransferId, _Lent] = {}
        self._sources: list[SourceLink] = []
        """Oldest first."""
        self._wanted: dict[TransferId, _Wanted] = {}
        self._retry_s = self.first_retry_s
        self._retry_at: float | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while `completions` has something to tell, or to copy."""

    # --- what differs -------------------------------------------------------------------------------

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        """Raises ConfigError for a pool that this transport cannot reach."""
        self._incarnation = incarnation
        self._use(pool, write)

    def _use(self, pool: BlockMemory, write: Write | None) -> None:
        """Sets `_pool` and `_lent_pool`. Raises ConfigError as `register` does."""
        raise NotImplementedError

    def _link_to(self, address: str) -> TargetLink:
        """A link to the transport at `address`, up or on its way. Raises OSError where there is none."""
        raise NotImplementedError

    def _exported(self) -> tuple[bytes, tuple[int, ...]]:
        """By what peers reach our pool and its table: the `handle` of the Export, and open files."""
        raise NotImplementedError

    def _borrow(self, export: Export, fds: list[int]) -> Any:
        """What is read from there. Raises OSError or ValueError if that is not what it should be."""
        raise NotImplementedError

    def _read(self, borrowed: Any, fetches: Sequence[Fetch]) -> Sequence[int]:
        """Copy blocks into our pool; the indices that were copied whole. Raises OSError: the link is of no use."""
        raise NotImplementedError

    def _is_reading(self) -> bool:
        """Whether something is on its way whose end nothing signals."""
        return False

    def _before_lending(self) -> None:
        """Until what was written to our pool so far can be read by others."""

    # --- source -----------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        """Tells the peer how to reach our pool, so that it is ready before the first blocks are lent."""
        assert self._lent_pool is not None, "connect before register"
        assert self._incarnation, "who ships must say who it is: see register"
        link = self._targets.get(peer)
        if link is not None and link.name == address.partition("://")[2] and not link.is_lost:
            return
        self.disconnect(peer)
        try:
            self._targets[peer] = self._new_link(address, self._lent_pool)
        except (OSError, ValueError, OverflowError) as e:  # of addresses that are none
            log.warning("no link to %s at %s: %s", peer, address, e)
            self._untold[peer] = f"there is no link to {address}: {e}"

    def _new_link(self, address: str, lent: LentBlocks) -> TargetLink:
        link = self._link_to(address)
        handle, fds = self._exported()
        try:
            link.export(Export(self._incarnation, lent.num_blocks, lent.block_bytes, handle), fds)
        except OSError:
            link.sock.close()
            raise
        return link

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """No refs where there is no link: nothing is lent then, and all is `Sent`."""
        assert self._lent_pool is not None, "ship before register"
        self.stats.blocks_shipped += len(blocks)
        link = self._targets.get(peer)
        if link is None or link.is_lost:
            if blocks:
                if (reason := self._untold.pop(peer, None)) is not None:
                    self._tell_lost(peer, reason)
                self._report(Sent(transfer, tuple(index for index, _ in blocks)))
            return ()
        self._before_lending()
        refs = tuple(self._lent_pool.lend(block) for _, block in blocks)
        lent = self._lent.setdefault(transfer, _Lent(peer))
        for ref, pair in zip(refs, blocks, strict=True):
            lent.blocks.setdefault(ref, []).append(pair)
        return refs

    def disconnect(self, peer: str) -> None:
        """What the peer still wanted to read is void from now on."""
        self._untold.pop(peer, None)
        loss = self._losses.pop(peer, None)
        self._news = [news for news in self._news if news is not loss]
        link = self._targets.pop(peer, None)
        if link is not None:
            link.sock.close()
            self._take_back_from(peer)

    def _take_back_from(self, peer: str) -> None:
        for transfer in [t for t, lent in self._lent.items() if lent.peer == peer]:
            self._take_back(transfer)

    def _take_back(self, transfer: TransferId, refs: Sequence[int] | None = None) -> None:
        """Nobody reads by these refs any more (None: any of the transfer's). Those that are void are no matter."""
        lent = self._lent.get(transfer)
        if lent is None:
            return
        assert self._lent_pool is not None
        done: list[int] = []
        for ref in list(lent.blocks) if refs is None else refs:
            for index, block in lent.blocks.pop(ref, ()):
                self._lent_pool.give_back(block)
                done.append(index)
        if not lent.blocks:
            del self._lent[transfer]
        if done:
            self._report(Sent(transfer, tuple(dict.fromkeys(done))))

    def _read_targets(self) -> None:
        for peer, link in self._targets.items():
            while not link.is_lost and (data := link.receive()) is not None:
                if data:
                    self._on_finished(peer, data)
                    continue
                link.is_lost = True
                is_used = any(lent.peer == peer for lent in self._lent.values())
                if link.is_up or is_used:
                    self._tell_lost(peer, f"the link to {link.name} was lost")
                else:
                    self._untold[peer] = f"the link to {link.name} never came up"
                self._take_back_from(peer)

    def _tell_lost(self, peer: str, reason: str) -> None:
        """Before the `Sent` of what goes with the link: nobody is to take that for read."""
        self._losses[peer] = loss = LinkLost(peer, reason)
        self._report(loss)

    def _on_finished(self, peer: str, data: bytes) -> None:
        try:
            message = FINISHED.decode(data)
        except ProtocolError as e:
            self.stats.num_malformed += 1
            log.warning("dropped a malformed message of %s: %s", peer, e)
            return
        lent = self._lent.get(message.transfer)
        if lent is not None and lent.peer == peer:
            self._take_back(message.transfer, message.refs)

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
            link.tell_finished(transfer, tuple(fetch.ref for fetch in wanted.fetches.values()))

    def _source(self, peer: str) -> SourceLink | None:
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
            try:
                copied = tuple(self._read(link.pool, batch))
            except OSError as e:
                log.warning("cannot read the KV pool of %s: %s", link.peer, e)
                self._source_lost(link, str(e))
                continue
            self._finish(link, transfer, batch, copied)
            if wanted.fetches:
                return True
        return False

    def _finish(self, link: SourceLink, transfer: TransferId, read: Sequence[Fetch], copied: tuple[int, ...]) -> None:
        """Blocks were read, and of those some copied."""
        self.stats.num_dropped += len(read) - len(copied)
        self.stats.blocks_written += len(copied)
        if copied:
            self._report(Received(transfer, copied))
        link.tell_finished(transfer, tuple(fetch.ref for fetch in read))

    def _limit_strangers(self) -> None:
        """Who connects and says nothing costs a file descriptor: close the oldest of too many."""
        strangers = [link for link in self._sources if link.pool is None]
        for link in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            self._source_lost(link, "it sent no Export")

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
                    if worth_saying(self.stats.num_malformed):
                        log.warning("closed a link of KV memory (%d so far): %s", self.stats.num_malformed, e)
                    self._source_lost(link, str(e))
                finally:
                    for fd in fds:
                        os.close(fd)

    def _on_export(self, link: SourceLink, data: bytes, fds: list[int]) -> None:
        assert self._pool is not None
        export = EXPORT.decode(data)
        link.check_peer()
        if link.pool is not None or export.block_bytes != self._pool.block_bytes:
            raise ValueError(
                f"an Export of {export.num_blocks} blocks of {export.block_bytes} bytes does not fit: one is awaited, "
                f"with blocks of {self._pool.block_bytes} bytes"
            )
        link.pool = self._borrow(export, fds)
        link.peer = export.source

    def _source_lost(self, link: SourceLink, reason: str) -> None:
        """Lets go of its pool. What is wanted from it stays until it is cancelled: there may be a new link already."""
        self._sources.remove(link)
        link.sock.close()
        if link.pool is not None:
            link.pool.close()
            link.pool = None
        if link.peer:
            self._report(LinkLost(link.peer, f"its link was lost: {reason}", incoming=True))

    # --- owner ------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        self._sources += self._listener.accept()
        self._limit_strangers()
        self._read_sources()
        self._read_targets()
        more = self._copy()
        for link in self._links():
            link.flush()
        in_vain = self._is_waiting() and not self._news
        self._retry_s = min(self._retry_s * 2, self.last_retry_s) if in_vain else self.first_retry_s
        self._retry_at = None
        news, self._news = self._news, []
        self._losses.clear()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if more:
            self._notify()
        return news

    def pollables(self) -> Sequence[Any]:
        """Changes with links: ask before each wait."""
        links = [link.sock for link in self._targets.values() if not link.is_lost]
        return (self._event, *self._listener.pollables(), *links, *(link.sock for link in self._sources))

    def _is_waiting(self) -> bool:
        return any(link.is_stuck for link in self._links()) or self._is_reading()

    def _links(self) -> list[_Link]:
        return [*self._sources, *self._targets.values()]

    def next_deadline(self, now: float) -> float | None:
        accept_at = self._listener.next_deadline(now)
        if not self._is_waiting():
            return accept_at
        if self._retry_at is None:
            self._retry_at = now + self._retry_s
        return self._retry_at if accept_at is None else min(accept_at, self._retry_at)

    def close(self) -> None:
        if self._event < 0:
            return
        self._listener.sock.close()
        for target in self._targets.values():
            target.sock.close()
        for source in self._sources:
            source.sock.close()
            if source.pool is not None:
                source.pool.close()
                source.pool = None
        os.close(self._event)
        self._event = -1
        self._targets.clear()
        self._sources.clear()
        self._lent.clear()
        self._wanted.clear()
        self._news.clear()
        self._losses.clear()
        self._untold.clear()
        self._pool = self._lent_pool = None

    def _report(self, *news: Completion) -> None:
        self._news.extend(news)
        self._notify()

    def _notify(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)
