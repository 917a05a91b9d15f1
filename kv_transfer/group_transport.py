"""Transport over process groups of torch.distributed: `gloo` between pools on hosts, `nccl` between pools on GPUs.

A pushing transport with a group of two for each link (`kv_transfer.group_link`), which the link's own thread makes
when peers are connected; `kv_transfer.group_backend` is what the two kinds differ in.

    ship ─► the link's queue ─► its thread sends, straight from the pool ─► Sent
                     the peer's thread receives into scratch memory ─► completions(): copied into the pool, or dropped

Threads touch the pool by reading shipped blocks only. The owner hears of everything by one eventfd, and of links that
the peer has closed by an epoll of their sockets: that finds a dead process even where a group would wait for ever. One
that is stopped shows in nothing but its silence: the worker's liveness and leases find it, and `disconnect` ends what
hangs.

Knows pools, peers and links; must not know requests.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from baton.errors import ConfigError
from baton.protocol import TransferId
from kv_transfer.accepting import Accepting
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, Completion, LinkLost, Received, Sent, Write
from kv_transfer.expected import ExpectedBlocks, TransportStats
from kv_transfer.group_backend import BACKENDS, LINK_TIMEOUT_S, Backend
from kv_transfer.group_link import (
    Arrival,
    Batch,
    Ended,
    IncomingLink,
    Link,
    Lost,
    Malformed,
    News,
    OutgoingLink,
    blocks_per_batch,
)

log = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Incoming links that have no group yet; each has a thread, for `LINK_TIMEOUT_S` at most. More are hung up on."""
CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for threads. One that torch does not let go ends later, by itself: see `Link.end`."""


class GroupTransport:
    """Listens at once at `HOST[:PORT]` (default `127.0.0.1`, any free port); used by one thread.

    `nccl` needs a CUDA build of torch and a GPU; two workers on one GPU need NCCL 2.30 or newer with
    NCCL_MULTI_RANK_GPU_ENABLE=1. A wildcard host advertises this machine's address.

    Raises ConfigError if that is missing, or for an address that cannot be listened on.
    """

    pulls = False
    fixed_blocks = True

    def __init__(self, scheme: str, host_port: str = "", *, backend: Backend | None = None):
        host, port = _host_and_port(host_port)
        try:
            listener = _listen(host, port)
            store_listener = _listen(host, 0)
        except (OSError, OverflowError) as e:
            raise ConfigError("transfer.transport", f"cannot listen: {e}", value=f"{scheme}://{host_port}") from e
        host, port = listener.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostbyname(socket.gethostname())
        try:
            self._backend: Backend = backend or BACKENDS[scheme](host)
        except ConfigError:
            listener.close()
            store_listener.close()
            raise
        self._host = host
        self._store_port = store_listener.getsockname()[1]
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            self._store_port,
            is_master=True,
            timeout=timedelta(seconds=LINK_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=store_listener.detach(),
        )
        """Where both sides of incoming links find each other: a few short keys for each."""
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.reach = scheme
        self.reaches_gpu = self._backend.reaches_gpu
        self.stats = TransportStats()
        self._listener = Accepting(listener, f"{scheme} links")
        self._expected = ExpectedBlocks()
        self._outgoing: dict[str, OutgoingLink] = {}
        self._unlinked: dict[str, str] = {}
        """Why no link to a peer could be begun; to be told with the first blocks that are shipped there."""
        self._losses: dict[str, str] = {}
        """What has been told of them and not been heard of yet."""
        self._links: set[Link] = set()
        """All whose threads have not ended."""
        self._hung_up = select.epoll()
        self._lock = threading.Lock()
        self._news: deque[News] = deque()
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        atexit.register(self.close)  # threads that are inside of torch must not outlive the interpreter

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        """Raises ConfigError if the pool is not where this kind of group reaches it."""
        self._backend.register(pool, write)

    # --- sending ----------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        known = self._outgoing.get(peer)
        try:
            host, port = _host_and_port(address.partition("://")[2])
            if known is not None and (known.host, known.port) == (host, port) and not known.is_over:
                return
            self.disconnect(peer)
            link = OutgoingLink(peer, host, port, self._backend, self._tell, self._watch)
        except (ConfigError, OSError) as e:
            log.warning("no link with %s: %s", peer, e)
            self.disconnect(peer)
            self._unlinked[peer] = f"there is no link to {address}: {e}"
            return
        self._outgoing[peer] = link
        self._add(link)

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        assert self._backend.block_bytes, "ship before register"
        self.stats.blocks_shipped += len(blocks)
        link = self._outgoing.get(peer)
        if blocks and (reason := self._unlinked.pop(peer, None)) is not None:
            self._losses[peer] = reason
        written = self._backend.written()
        size = blocks_per_batch(self._backend)
        for start in range(0, len(blocks), size):
            part = blocks[start : start + size]
            sources = tuple(self._backend.source(block) for _, block in part)
            batch = Batch(transfer, tuple(index for index, _ in part), sources, written)
            if link is None or not link.ship(batch):
                self._tell(Sent(transfer, batch.indices))
        return ()

    def disconnect(self, peer: str) -> None:
        self._unlinked.pop(peer, None)
        self._losses.pop(peer, None)
        link = self._outgoing.pop(peer, None)
        if link is not None:
            link.end()

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        self._expected.announce(transfer, blocks)

    def cancel(self, transfer: TransferId) -> None:
        """What was shipped for it and has not begun is taken back; the receiver drops the rest."""
        self._expected.cancel(transfer)
        for link in self._outgoing.values():
            for batch in link.withdraw(transfer):
                self._tell(Sent(transfer, batch.indices))

    def completions(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._accept()
        self._end_hung_up()
        completions: list[Completion] = [LinkLost(peer, reason) for peer, reason in self._losses.items()]
        self._losses.clear()
        budget = MAX_BYTES_PER_CALL
        while budget > 0:
            with self._lock:
                news = self._news.popleft() if self._news else None
            match news:
                case None:
                    return completions
                case Arrival():
                    budget -= self._write(news, completions)
                case Malformed(peer, problem):
                    self.stats.num_malformed += 1
                    log.warning("closed a link with %s: %s", peer or "an unknown peer", problem)
                case Lost(OutgoingLink() as link) if self._outgoing.get(link.peer) is not link:
                    pass  # it was torn down meanwhile
                case Lost(link, reason):
                    completions.append(LinkLost(link.peer, reason, incoming=isinstance(link, IncomingLink)))
                case Ended(link):
                    link.thread.join()
                    self._links.discard(link)
                case _:
                    completions.append(news)
        self._notify()
        return completions

    def _write(self, arrival: Arrival, completions: list[Completion]) -> int:
        header = arrival.header
        rows, block_ids, written = [], [], []
        for row, index in zip(arrival.scratch, header.indices, strict=False):
            block = self._expected.claim(header.transfer, index)
            if block is None:
                self.stats.num_dropped += 1
                continue
            rows.append(row)
            block_ids.append(block)
            written.append(index)
        if rows:
            self._backend.store(rows, block_ids)
            self.stats.blocks_written += len(rows)
            completions.append(Received(header.transfer, tuple(written)))
        arrival.link.release(arrival.scratch)
        return len(header.indices) * self._backend.block_bytes

    def _accept(self) -> None:
        strangers = sum(isinstance(link, IncomingLink) and not link.is_up for link in self._links)
        for sock in self._listener.accepted():
            if strangers >= MAX_STRANGERS:
                sock.close()
                continue
            strangers += 1
            self._add(IncomingLink(sock, self._host, self._store_port, self._backend, self._tell, self._watch))

    def _end_hung_up(self) -> None:
        for fd, _ in self._hung_up.poll(0):
            with contextlib.suppress(OSError):  # its thread has closed it
                self._hung_up.unregister(fd)
            for link in list(self._links):
                if link.fd == fd:  # a former user of this number has ended already
                    link.end("the peer closed the connection")

    # --- owner ------------------------------------------------------------------------------------

    def pollables(self) -> Sequence[Any]:
        return (self._event, *self._listener.pollables(), self._hung_up.fileno())

    def next_deadline(self, now: float) -> float | None:
        return self._listener.next_deadline(now)

    def close(self) -> None:
        if self._closed:
            return
        atexit.unregister(self.close)
        self._listener.sock.close()
        self._store = None  # whoever waits for a peer there fails
        for link in list(self._links):
            link.end()
        with self._lock:
            self._closed = True
            os.close(self._event)
            self._news.clear()
        give_up = time.monotonic() + CLOSE_TIMEOUT_S
        for link in list(self._links):
            link.thread.join(max(0.0, give_up - time.monotonic()))
        self._hung_up.close()
        self._links.clear()
        self._outgoing.clear()

    def _add(self, link: Link) -> None:
        self._links.add(link)
        link.start()

    # --- called by the links' threads too -----------------------------------------------------------

    def _tell(self, news: News) -> None:
        with self._lock:
            if not self._closed:
                self._news.append(news)
                os.eventfd_write(self._event, 1)

    def _notify(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def _watch(self, fd: int) -> None:
        """Not for what arrives, which the link's thread reads: only whether the peer has closed the connection."""
        self._hung_up.register(fd, select.EPOLLRDHUP)


def _host_and_port(host_port: str) -> tuple[str, int]:
    """Of `HOST[:PORT]`, also `[HOST]:PORT` and a bare IPv6 address. Raises ConfigError for a port that is none."""
    text = host_port.rstrip("/")
    host, _, port = (text, "", "") if text.count(":") > 1 and not text.startswith("[") else text.rpartition(":")
    if not host:
        host, port = text, ""
    if text.startswith("[") and text.endswith("]"):
        host, port = text, ""
    try:
        return host.strip("[]") or "127.0.0.1", int(port or 0)
    except ValueError as e:
        raise ConfigError("transfer.transport", "not a port", value=host_port, allowed="HOST or HOST:PORT") from e


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError. The socket's name holds the address as a number."""
    if host == "*":
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    listener.setblocking(False)
    return listener
