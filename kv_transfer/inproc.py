"""Transport between workers that are threads of one process: one copy, from pool to pool.

A full peer of the others, not a shortcut: the receiver copies, in its own `completions()`, and only what it
was told to. Knows pools and peers; must not know requests. (Idea: dask.distributed's inproc comm.)

    ship ─► the receiver's inbox ─► its completions(): copied or dropped ─► Sent goes back to the sender

An endpoint's inbox and news are shared with other threads, under its lock; two locks are never held at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton.protocol import TransferId
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, Completion, LinkLost, Received, Sent, Write, nowhere
from kv_transfer.checksum import copying_into
from kv_transfer.expected import ExpectedBlocks, TransportStats

MAX_BLOCKS_PER_SHIPMENT = 16
"""So that the first blocks are copied, and may be reported, before the last."""

_PROCESS = uuid.uuid4().hex

_endpoints: dict[str, InprocTransport] = {}
_endpoints_lock = threading.Lock()


class _Shipment(NamedTuple):
    sender: InprocTransport
    transfer: TransferId
    blocks: tuple[tuple[int, npt.NDArray[np.uint8]], ...]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(index for index, _ in self.blocks)


class InprocTransport:
    """One worker's end, under an address of its own."""

    pulls = False
    reaches_gpu = False
    fixed_blocks = False

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.address = f"inproc://{name}"
        self.reach = f"inproc (process {_PROCESS})"
        self.stats = TransportStats()
        self._name = name
        self._pool: BlockMemory | None = None
        self._write_block: Write = nowhere
        self._expected = ExpectedBlocks()
        self._links: dict[str, InprocTransport] = {}
        self._unlinked: set[str] = set()
        """Peers to which no link could be made; to be told with the first blocks that are shipped there."""
        self._losses: dict[str, str] = {}
        """By peer why the link to it is lost, as is still to be told."""
        self._lock = threading.Lock()
        self._inbox: deque[_Shipment] = deque()
        self._news: list[Completion] = []
        self._gone: list[InprocTransport] = []
        """Receivers that have closed. Whether there is still a link to them is looked at by this endpoint's thread."""
        self._senders: dict[InprocTransport, str] = {}
        """Who may ship here, and under which name (its incarnation, once it has shipped) its loss is told."""
        self._receivers: dict[InprocTransport, str] = {}
        """Who is shipped to, and the peer's name for it here."""
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with _endpoints_lock:
            _endpoints[name] = self

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        self._pool = pool
        self._write_block = write or copying_into(pool)

    def connect(self, peer: str, address: str) -> None:
        with _endpoints_lock:
            receiver = _endpoints.get(address.removeprefix("inproc://"))
        known = self._links.get(peer)
        if known is not None and known is receiver:
            return
        self.disconnect(peer)
        if receiver is not None and receiver._admit(self):
            self._links[peer] = receiver
            self._receivers[receiver] = peer
        else:
            self._unlinked.add(peer)

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        assert self._pool is not None, "ship before register"
        receiver = self._links.get(peer)
        self.stats.blocks_shipped += len(blocks)
        if blocks and peer in self._unlinked:
            self._unlinked.discard(peer)
            self._losses[peer] = "there is no receiver at its address"
        for start in range(0, len(blocks), MAX_BLOCKS_PER_SHIPMENT):
            batch = blocks[start : start + MAX_BLOCKS_PER_SHIPMENT]
            shipment = _Shipment(self, transfer, tuple((i, self._pool.block(b)) for i, b in batch))
            if receiver is None or not receiver._deliver(shipment):
                self._report(Sent(transfer, shipment.indices))
        return ()

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        self._expected.announce(transfer, blocks)

    def completions(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        received: list[Completion] = []
        budget = MAX_BYTES_PER_CALL
        while budget > 0:
            with self._lock:
                shipment = self._inbox.popleft() if self._inbox else None
            if shipment is None:
                break
            budget -= self._write(shipment, received)
            shipment.sender._report(Sent(shipment.transfer, shipment.indices))
        with self._lock:
            news, self._news = self._news, []
            gone, self._gone = self._gone, []
            more = bool(self._inbox)
        if more:
            self._notify()
        self._losses.update((self._receivers[r], "the receiver closed") for r in gone if r in self._receivers)
        lost: list[Completion] = [LinkLost(peer, reason) for peer, reason in self._losses.items()]
        self._losses.clear()
        return lost + received + news

    def _write(self, shipment: _Shipment, received: list[Completion]) -> int:
        assert self._pool is not None
        written: list[int] = []
        for index, source in shipment.blocks:
            block = self._expected.claim(shipment.transfer, index)
            if block is None or source.nbytes != self._pool.block(block).nbytes:
                self.stats.num_dropped += 1
                continue
            self._write_block(block, source)
            written.append(index)
        if written:
            self.stats.blocks_written += len(written)
            received.append(Received(shipment.transfer, tuple(written)))
        return sum(source.nbytes for _, source in shipment.blocks) + 1

    def cancel(self, transfer: TransferId) -> None:
        self._expected.cancel(transfer)
        for receiver in self._receivers:
            receiver._withdraw(self, transfer)

    def disconnect(self, peer: str) -> None:
        self._unlinked.discard(peer)
        self._losses.pop(peer, None)
        receiver = self._links.pop(peer, None)
        if receiver is not None:
            self._receivers.pop(receiver, None)
            receiver._dismiss(self, "the sender disconnected")

    def close(self) -> None:
        with _endpoints_lock:
            _endpoints.pop(self._name, None)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            inbox, self._inbox = self._inbox, deque()
            senders, self._senders = self._senders, {}
        for shipment in inbox:
            shipment.sender._report(Sent(shipment.transfer, shipment.indices))
        for sender in senders:
            sender._receiver_gone(self)
        for receiver in list(self._receivers):
            receiver._dismiss(self, "the sender closed")
        self._receivers.clear()
        self._links.clear()
        self._pool = None
        with self._lock:
            self._news.clear()
            self._gone.clear()
            os.close(self._event)
            self._event = -1

    def pollables(self) -> Sequence[Any]:
        return (self._event,)

    def next_deadline(self, now: float) -> float | None:
        return None

    # --- called by other endpoints, from their threads ------------------------------------------------

    def _admit(self, sender: InprocTransport) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._senders.setdefault(sender, "")
            return True

    def _deliver(self, shipment: _Shipment) -> bool:
        with self._lock:
            if self._closed or shipment.sender not in self._senders:
                return False
            self._senders[shipment.sender] = shipment.transfer.source
            self._inbox.append(shipment)
        self._notify()
        return True

    def _withdraw(self, sender: InprocTransport, transfer: TransferId | None) -> None:
        """Take back what waits here; `transfer` None: everything of that sender."""
        mine: list[_Shipment] = []
        others: deque[_Shipment] = deque()
        with self._lock:
            for shipment in self._inbox:
                is_meant = shipment.sender is sender and transfer in (None, shipment.transfer)
                (mine if is_meant else others).append(shipment)
            self._inbox = others
        for shipment in mine:
            sender._report(Sent(shipment.transfer, shipment.indices))

    def _dismiss(self, sender: InprocTransport, reason: str) -> None:
        with self._lock:
            incarnation = self._senders.pop(sender, "")
        self._withdraw(sender, None)
        if incarnation:
            self._report(LinkLost(incarnation, reason, incoming=True))

    def _receiver_gone(self, receiver: InprocTransport) -> None:
        with self._lock:
            if self._closed:
                return
            self._gone.append(receiver)
        self._notify()

    def _report(self, *news: Completion) -> None:
        with self._lock:
            if self._closed:
                return
            self._news.extend(news)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)
