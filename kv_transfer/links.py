"""A worker's links to other workers: session messages on control sockets, KV blocks on a transport.

Executes what the send and receive ports ask for, hashes what is shipped and what has arrived, and
turns everything that comes in into events. Decides nothing. Owned by one thread, the worker's I/O
thread; `baton.ports.PeerLinks` is this class as the worker sees it.

Each prefill worker connects a DEALER, whose routing id is its incarnation, to the ROUTER of each
decode worker. So a message's direction tells its kind: what comes in on the ROUTER is for the
receive port, what comes in on a DEALER is for the send port.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import zmq

from baton.codec import MAX_MESSAGE_BYTES, Codec
from baton.errors import ProtocolError
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    CancelTransfer,
    ConnectPeer,
    DropLink,
    FromDecode,
    FromPrefill,
    LinkDown,
    PeerEvent,
    ReceiveBlocks,
    ShipBlocks,
    Shipped,
    ToPeer,
)
from baton.protocol import TransferId
from kv_transfer.base import BlockMemory, KVTransport, LinkLost, Received, Sent, StagedMemory
from kv_transfer.checksum import block_checksum
from kv_transfer.messages import Hello, ToDecode, ToPrefill

log = logging.getLogger(__name__)

_TO_DECODE: Codec[Any] = Codec(ToDecode)
_TO_PREFILL: Codec[Any] = Codec(ToPrefill)

MAX_MESSAGES_PER_TURN = 256
"""A flood on one socket must not keep the others, or the transport, from their turn."""


def _limit(socket: zmq.Socket[bytes]) -> None:
    """A peer cannot make us read more than a message may hold; what we say to it is bounded by open transfers."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)


class ZmqPeerLinks:
    """Binds its control socket at once, on any free port of `host` (an address that peers can reach).

    `incarnation` is this worker's; `pool` its KV pool; `checksums` False leaves hashing out (checksums are 0).
    """

    def __init__(
        self,
        *,
        incarnation: str,
        pool: BlockMemory,
        transport: KVTransport,
        context: zmq.Context[Any],
        host: str = "127.0.0.1",
        checksums: bool = True,
    ):
        self._incarnation = incarnation
        self._pool = pool
        self._transport = transport
        self._context = context
        self._checksums = checksums
        self._from_prefill: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _limit(self._from_prefill)
        self._from_prefill.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._from_prefill.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its old connection
        port = self._from_prefill.bind_to_random_port(f"tcp://{host}")
        self._to_decode: dict[str, zmq.Socket[bytes]] = {}
        """By the decode worker's incarnation."""
        self._receiving: dict[TransferId, dict[int, int]] = {}
        """Block id by index, of what the transport may still write."""
        self._staged = pool if isinstance(pool, StagedMemory) else None
        self._copies: dict[tuple[TransferId, int], Any] = {}
        """By transfer and index: the staged copies that the transport may still read."""
        self.control_address = f"tcp://{host}:{port}"
        self.data_address = transport.address
        self.bytes_sent = 0
        self.bytes_received = 0
        transport.register(pool)

    # --- out --------------------------------------------------------------------------------------

    def execute(self, action: Action) -> list[PeerEvent]:
        match action:
            case ToPeer(peer, message):
                self._send(peer, message)
            case ShipBlocks(peer, transfer, blocks):
                return [self._ship(peer, transfer, blocks)]
            case ReceiveBlocks(peer, transfer, refs, blocks):
                self._receiving.setdefault(transfer, {}).update(blocks)
                self._transport.receive(peer, transfer, refs, blocks)
            case CancelTransfer(transfer):
                self._receiving.pop(transfer, None)
                self._transport.cancel(transfer)
            case ConnectPeer(worker):
                if worker.incarnation not in self._to_decode:
                    self._to_decode[worker.incarnation] = self._dealer(worker.control_address)
                self._transport.connect(worker.incarnation, worker.data_address)
            case DropLink(peer):
                self._transport.disconnect(peer)
                dealer = self._to_decode.pop(peer, None)
                if dealer is not None:
                    dealer.close(linger=0)
        return []

    def _ship(self, peer: str, transfer: TransferId, blocks: tuple[tuple[int, int], ...]) -> Shipped:
        if self._staged is not None:
            copies = self._staged.fetch([block for _, block in blocks])
            self._copies |= {(transfer, index): copy for (index, _), copy in zip(blocks, copies, strict=True)}
        # Hashed before it is sent: from then on only readers touch these blocks (release rule).
        checksums = {index: self._checksum(block) for index, block in blocks}
        refs = self._transport.ship(peer, transfer, blocks)
        if self._staged is not None:
            self._staged.close_views()
        self.bytes_sent += len(blocks) * self._pool.block_bytes
        return Shipped(transfer, refs, checksums)

    def _checksum(self, block: int) -> int:
        return block_checksum(self._pool.block(block)) if self._checksums else 0

    def _send(self, peer: str, message: Any) -> None:
        """To the decode worker whose incarnation is `peer`, or back to the prefill worker of that incarnation."""
        transfer: TransferId | None = getattr(message, "transfer", None)
        outgoing = isinstance(message, Hello) or (transfer is not None and transfer.source == self._incarnation)
        try:
            if outgoing:
                self._to_decode[peer].send(_TO_DECODE.encode(message), flags=zmq.DONTWAIT)
            else:
                self._from_prefill.send_multipart([peer.encode(), _TO_PREFILL.encode(message)], flags=zmq.DONTWAIT)
        except (KeyError, zmq.ZMQError) as e:
            # The peer is gone or stuck. Its transfers end by lease or by the router's word; nothing to repair here.
            log.debug("message %s to %s was not sent: %s", type(message).__name__, peer, e)

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._incarnation.encode())
        _limit(dealer)
        dealer.connect(address)
        return dealer

    # --- in ---------------------------------------------------------------------------------------

    def events(self) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        for frames in self._arrived(self._from_prefill):
            if len(frames) == 2 and (message := self._decode(_TO_DECODE, frames[1])) is not None:
                events.append(FromPrefill(frames[0].decode("utf-8", "replace"), message))
        for peer, dealer in self._to_decode.items():
            for frames in self._arrived(dealer):
                if len(frames) == 1 and (message := self._decode(_TO_PREFILL, frames[0])) is not None:
                    events.append(FromDecode(peer, message))
        for completion in self._transport.completions():
            match completion:
                case Sent(transfer, indices):
                    if self._staged is not None:
                        keys = [(transfer, index) for index in indices]
                        self._staged.release([self._copies.pop(key) for key in keys if key in self._copies])
                    events.append(BlocksSent(transfer, indices))
                case Received(transfer, indices):
                    blocks = self._receiving.get(transfer)
                    if blocks is not None:
                        arrived = {i: blocks.pop(i) for i in indices if i in blocks}
                        checksums = {i: self._checksum(block) for i, block in arrived.items()}
                        if self._staged is not None:
                            self._staged.store(list(arrived.values()))
                        self.bytes_received += len(checksums) * self._pool.block_bytes
                        events.append(BlocksReceived(transfer, checksums))
                        if not blocks:
                            del self._receiving[transfer]
                case LinkLost(peer, reason):
                    events.append(LinkDown(peer, reason))
        if self._staged is not None:
            self._staged.close_views()
        return events

    def _arrived(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        while len(messages) < MAX_MESSAGES_PER_TURN:
            try:
                messages.append(socket.recv_multipart(flags=zmq.DONTWAIT))
            except zmq.Again:
                break
        return messages

    def _decode(self, codec: Codec[Any], data: bytes) -> Any:
        try:
            return codec.decode(data)
        except ProtocolError as e:
            log.warning("dropped a malformed session message: %s", e)
            return None

    def pollables(self) -> Sequence[Any]:
        return [self._from_prefill, *self._to_decode.values(), *self._transport.pollables()]

    def next_deadline(self, now: float) -> float | None:
        return self._transport.next_deadline(now)

    def close(self) -> None:
        self._transport.close()
        for socket in (self._from_prefill, *self._to_decode.values()):
            socket.close(linger=0)
