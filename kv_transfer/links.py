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

import numpy as np
import numpy.typing as npt
import zmq

from baton.codec import MAX_MESSAGE_BYTES, Codec
from baton.errors import ProtocolError
from baton.layout import KVLayout
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    CancelTransfer,
    ConnectPeer,
    ControlRestored,
    DataLinkLost,
    DropLink,
    FromDecode,
    FromPrefill,
    HashBlocks,
    Hashed,
    PeerEvent,
    ReceiveBlocks,
    ShipBlocks,
    Shipped,
    ToPeer,
)
from baton.protocol import TransferId
from baton.security import Security, worth_saying
from kv_transfer.base import BlockMemory, Completion, KVTransport, LinkLost, Received, Sent, StagedMemory
from kv_transfer.checksum import block_checksum, copy_block
from kv_transfer.device_pool import DeviceStream, is_on_device
from kv_transfer.messages import Hello, ToDecode, ToPrefill
from kv_transfer.wire_blocks import WireBlocks
from kv_transfer.wire_format import Encoding, Landing

log = logging.getLogger(__name__)

_TO_DECODE: Codec[Any] = Codec(ToDecode)
_TO_PREFILL: Codec[Any] = Codec(ToPrefill)

RECEIVE_QUEUE = 256
"""Messages of one peer that are read ahead: more wait in the peer's own memory, not in ours."""
MAX_MESSAGES_PER_TURN = 256
"""A flood on one socket must not keep the others, or the transport, from their turn."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
"""Keep idle connections alive, and find those that were lost without a word."""


def _limit(socket: zmq.Socket[bytes]) -> None:
    """A peer cannot make us read more than a message may hold; what we say to it is bounded by open transfers."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


class _ToDecode:
    """The control connection to a decode worker, which ZeroMQ makes again when it is lost."""

    def __init__(self, socket: zmq.Socket[bytes], address: str):
        self.socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._num_connections = 0
        socket.connect(address)

    def is_restored(self) -> bool:
        """Whether it was made again since the last call: what was under way then may be lost."""
        restored = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self._num_connections += 1
            restored = self._num_connections > 1
        return restored

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class ZmqPeerLinks:
    """Binds its control socket at once, on any free port of `host` (an address that peers can reach).

    `incarnation` is this worker's; `pool` its KV pool; `checksums` False leaves hashing out (checksums are 0).
    `security`: who may connect, and by what this worker may connect to others; None: anyone, and as anyone.
    `layout`: of the pool's blocks, for peers whose blocks are in another format; None: there are none.
    `encoding`: in which blocks are shipped.
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
        security: Security | None = None,
        layout: KVLayout | None = None,
        encoding: Encoding = "plain",
    ):
        self._incarnation = incarnation
        self._pool = pool
        self._transport = transport
        self._context = context
        self._checksums = checksums
        self._security = security or Security(None)
        self._guard = self._security.guard(context)
        self._from_prefill: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _limit(self._from_prefill)
        self._security.secure_server(self._from_prefill)
        self._from_prefill.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._from_prefill.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its old connection
        port = self._from_prefill.bind_to_random_port(f"tcp://{host}")
        self._to_decode: dict[str, _ToDecode] = {}
        """By the decode worker's incarnation."""
        self._receiving: dict[TransferId, dict[int, int]] = {}
        """Block id by index, of what the transport may still write."""
        self._staged = pool if isinstance(pool, StagedMemory) else None
        self._device = DeviceStream(pool) if is_on_device(pool) else None
        self._wire = None if layout is None or transport.fixed_blocks else WireBlocks(pool, layout, encoding)
        """Blocks in other formats than the pool's; None: there can be none."""
        assert encoding == "plain" or self._wire is not None, "this transport cannot ship encoded blocks"
        self._landings: dict[TransferId, Landing] = {}
        """Of transfers in `_receiving` whose blocks land: those are buffers of `_wire`."""
        self._encoded: dict[tuple[TransferId, int], int] = {}
        """By transfer and index: the buffers of `_wire` that the transport may still read."""
        self._copies: dict[tuple[TransferId, int], Any] = {}
        """By transfer and index: the staged copies that the transport may still read."""
        self._shipped_checksums: dict[int, tuple[int, int]] = {}
        """By block: of which life its checksum is known, and that checksum."""
        self.control_address = f"tcp://{host}:{port}"
        self.data_address = transport.address
        self.bytes_sent = 0
        self.bytes_received = 0
        self.num_malformed = 0
        """Session messages that no worker of this release sends."""
        self._received_checksums: dict[int, int] = {}
        """By block: the checksum of what was written and not yet reported."""
        try:
            transport.register(self._wire or pool, self._write if checksums else None, incarnation=incarnation)
        except BaseException:  # it cannot reach this pool
            self.close()  # a socket that is left open would hold up the end of its context for ever
            raise

    # --- out --------------------------------------------------------------------------------------

    def execute(self, action: Action) -> list[PeerEvent]:
        match action:
            case ToPeer(peer, message):
                self._send(peer, message)
            case ShipBlocks():
                return [self._ship(action)]
            case HashBlocks():
                return [self._hash(action)]
            case ReceiveBlocks(peer, transfer, refs, blocks, landing):
                if landing is not None:
                    blocks = self._open_buffers(transfer, landing, blocks)
                self._receiving.setdefault(transfer, {}).update(blocks)
                self._transport.receive(peer, transfer, refs, blocks)
            case CancelTransfer(transfer):
                expected = self._receiving.pop(transfer, {})
                for block in expected.values():
                    self._received_checksums.pop(block, None)
                self._transport.cancel(transfer)
                if self._landings.pop(transfer, None) is not None and self._wire is not None:
                    self._wire.close(expected.values())
            case ConnectPeer(worker):
                if worker.incarnation not in self._to_decode:
                    self._to_decode[worker.incarnation] = _ToDecode(self._dealer(), worker.control_address)
                self._transport.connect(worker.incarnation, worker.data_address)
            case DropLink(peer, forget):
                self._transport.disconnect(peer)
                if forget and (known := self._to_decode.pop(peer, None)) is not None:
                    known.close()
        return []

    def _open_buffers(
        self, transfer: TransferId, landing: Landing, blocks: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """`(index, buffer id)` of blocks that land."""
        assert self._wire is not None, "a Hello of another format was welcomed over a transport that cannot carry it"
        assert transfer not in self._landings, (
            "blocks that land are pushed, so they are announced once, with the Accept"
        )
        self._landings[transfer] = landing
        buffers = self._wire.open(len(blocks), landing.format.block_bytes)
        return tuple((index, buffer) for (index, _), buffer in zip(blocks, buffers, strict=True))

    def _ship(self, action: ShipBlocks) -> Shipped:
        if self._wire is not None and self._wire.format.encoding != "plain":
            return self._ship_encoded(self._wire, action)
        transfer, blocks = action.transfer, action.blocks
        if self._staged is not None:
            copies = self._staged.fetch([block for _, block in blocks])
            self._copies |= {(transfer, index): copy for (index, _), copy in zip(blocks, copies, strict=True)}
        refs = self._transport.ship(action.peer, transfer, blocks)
        if self._staged is not None:
            self._staged.close_views()
        self.bytes_sent += len(blocks) * self._pool.block_bytes
        return Shipped(transfer, tuple(index for index, _ in blocks), refs)

    def _ship_encoded(self, wire: WireBlocks, action: ShipBlocks) -> Shipped:
        transfer, blocks = action.transfer, [block for _, block in action.blocks]
        indices = tuple(index for index, _ in action.blocks)
        copies = self._staged.fetch(blocks) if self._staged is not None else []
        buffers = wire.encode(blocks)
        if self._staged is not None:
            self._staged.close_views()
            self._staged.release(copies)
        self._encoded.update(zip(((transfer, index) for index in indices), buffers, strict=True))
        refs = self._transport.ship(action.peer, transfer, tuple(zip(indices, buffers, strict=True)))
        self.bytes_sent += len(buffers) * wire.format.block_bytes
        return Shipped(transfer, indices, refs)

    def _hash(self, action: HashBlocks) -> Hashed:
        """What was shipped is final, and not reused before its `Sent`, which only `events` takes in."""
        checksums: dict[int, int] = {}
        for (index, block), life in zip(action.blocks, action.lives, strict=True):
            key = (action.transfer, index)
            if key in self._encoded:
                checksums[index] = self._checksum(self._encoded[key])
            elif key in self._copies:
                checksums[index] = block_checksum(self._copies[key].numpy()) if self._checksums else 0
            else:
                checksums[index] = self._checksum_of_shipped(block, life)
        return Hashed(action.transfer, checksums)

    def _checksum_of_shipped(self, block: int, life: int) -> int:
        """Of a final block: hashed once in its life, however often it is shipped."""
        if not self._checksums:
            return 0
        known_life, checksum = self._shipped_checksums.get(block, (None, 0))
        if known_life != life:
            checksum = self._checksum(block)
            self._shipped_checksums[block] = (life, checksum)
        return checksum

    def _write(self, block: int, source: npt.NDArray[np.uint8]) -> None:
        """How the transport writes: hashed on the way."""
        self._received_checksums[block] = copy_block((self._wire or self._pool).block(block), source)

    def _checksum(self, block: int) -> int:
        if not self._checksums:
            return 0
        if self._device is not None:
            return self._device.checksum(block)
        return block_checksum((self._wire or self._pool).block(block))

    def _send(self, peer: str, message: Any) -> None:
        """To the decode worker whose incarnation is `peer`, or back to the prefill worker of that incarnation."""
        transfer: TransferId | None = getattr(message, "transfer", None)
        outgoing = isinstance(message, Hello) or (transfer is not None and transfer.source == self._incarnation)
        try:
            if outgoing:
                self._to_decode[peer].socket.send(_TO_DECODE.encode(message), flags=zmq.DONTWAIT)
            else:
                self._from_prefill.send_multipart([peer.encode(), _TO_PREFILL.encode(message)], flags=zmq.DONTWAIT)
        except (KeyError, zmq.ZMQError) as e:
            # The peer is gone or stuck. Its transfers end by lease or by the router's word; nothing to repair here.
            log.debug("message %s to %s was not sent: %s", type(message).__name__, peer, e)

    def _dealer(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._incarnation.encode())
        _limit(dealer)
        self._security.secure_client(dealer)
        return dealer

    # --- in ---------------------------------------------------------------------------------------

    def events(self) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        for frames in self._arrived(self._from_prefill):
            if len(frames) == 2 and (message := self._decode(_TO_DECODE, frames[1])) is not None:
                events.append(FromPrefill(frames[0].decode("utf-8", "replace"), message))
        for peer, known in self._to_decode.items():
            if known.is_restored():
                events.append(ControlRestored(peer))
            for frames in self._arrived(known.socket):
                if len(frames) == 1 and (message := self._decode(_TO_PREFILL, frames[0])) is not None:
                    events.append(FromDecode(peer, message))
        self._take_in(self._transport.completions(), events)
        return events

    def _take_in(self, completions: list[Completion], events: list[PeerEvent]) -> None:
        for completion in completions:
            match completion:
                case Sent(transfer, indices):
                    keys = [(transfer, index) for index in indices]
                    if self._staged is not None:
                        self._staged.release([self._copies.pop(key) for key in keys if key in self._copies])
                    if self._encoded and self._wire is not None:
                        self._wire.close([self._encoded.pop(key) for key in keys if key in self._encoded])
                    events.append(BlocksSent(transfer, indices))
                case Received(transfer, indices):
                    blocks = self._receiving.get(transfer)
                    if blocks is not None:
                        arrived = {i: blocks.pop(i) for i in indices if i in blocks}
                        checksums = {i: self._checksum_of_received(block) for i, block in arrived.items()}
                        self.bytes_received += len(checksums) * self._store(transfer, arrived)
                        events.append(BlocksReceived(transfer, checksums))
                        if not blocks:
                            del self._receiving[transfer]
                            self._landings.pop(transfer, None)
                case LinkLost(peer, reason, incoming):
                    events.append(DataLinkLost(peer, reason, incoming))
        if self._staged is not None:
            self._staged.close_views()

    def _checksum_of_received(self, block: int) -> int:
        checksum = self._received_checksums.pop(block, None)
        return self._checksum(block) if checksum is None else checksum

    def _store(self, transfer: TransferId, arrived: dict[int, int]) -> int:
        """Put into the pool what is not there yet. Returns the bytes of one block."""
        landing = self._landings.get(transfer)
        if landing is not None and self._wire is not None:
            self._wire.land(landing, arrived)
            self._wire.close(arrived.values())
            return landing.format.block_bytes
        if self._staged is not None:
            self._staged.store(list(arrived.values()))
        return self._pool.block_bytes

    def _arrived(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        num_bytes = 0
        while len(messages) < MAX_MESSAGES_PER_TURN and num_bytes < MAX_MESSAGE_BYTES:
            try:
                frames = socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                break
            messages.append(frames)
            num_bytes += sum(map(len, frames))
        return messages

    def _decode(self, codec: Codec[Any], data: bytes) -> Any:
        try:
            return codec.decode(data)
        except ProtocolError as e:
            self.num_malformed += 1
            if worth_saying(self.num_malformed):
                log.warning("dropped a malformed session message (%d so far): %s", self.num_malformed, e)
            return None

    def pollables(self) -> Sequence[Any]:
        control = [part for known in self._to_decode.values() for part in (known.socket, known.monitor)]
        return [self._from_prefill, *control, *self._transport.pollables()]

    def next_deadline(self, now: float) -> float | None:
        return self._transport.next_deadline(now)

    def close(self) -> None:
        self._transport.close()
        for known in self._to_decode.values():
            known.close()
        self._to_decode.clear()
        self._from_prefill.close(linger=0)
        self._guard.close()
