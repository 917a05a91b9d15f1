"""Transport over ZeroMQ: `zmq+tcp` between machines and processes, `zmq+ipc` between processes of one.

    sender    one PUSH per peer ──[header, block, block, ...]──► receiver   one PULL

A block leaves from the pool itself (zero-copy frame) and is copied once on arrival, by the receiver, from
the frame into its pool. `Sent` comes when libzmq has let go of the frame, which its tracker shows; nothing
signals that, so while frames are out `next_deadline` asks for a look, at growing intervals, and else never.

Backpressure. The send queue has no limit of its own: frames cost no memory, and the send port caps the blocks in
flight per peer. The receive queue is two messages, so that a receiver that does not read stops the
sender's TCP stream instead of filling its own memory.

Loss of a link is told by socket monitors. A peer that vanishes without a word is noticed by ZMTP heartbeats; they
are slow on purpose, because a receiver with a full queue does not answer them either, and a
worker's liveness is the router's to judge. A link that was never up is not reported as lost.

Knows pools, peers and frames; must not know requests, leases or checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket as sockets
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.codec import Codec
from baton.errors import ConfigError, ProtocolError
from baton.protocol import TransferId
from baton.security import Security, worth_saying
from kv_transfer.base import MAX_BYTES_PER_CALL, BlockMemory, Completion, LinkLost, Received, Sent, Write, nowhere
from kv_transfer.checksum import copying_into
from kv_transfer.expected import ExpectedBlocks, TransportStats
from kv_transfer.messages import BlockIndex
from kv_transfer.wire_format import MAX_WIRE_BLOCK_BYTES

log = logging.getLogger(__name__)

MAX_BLOCKS_PER_MESSAGE = 64
BYTES_PER_MESSAGE = 4 << 20
"""A message is delivered whole: small enough that the receiver starts early, large enough to be few."""
RECEIVE_QUEUE = 4
"""Messages that libzmq reads ahead, per peer."""
MAX_MESSAGES_PER_CALL = 256
"""That `completions` reads, however small they are."""
MAX_FRAME_BYTES = MAX_WIRE_BLOCK_BYTES
"""Neighbouring blocks are one frame up to `BYTES_PER_MESSAGE` only."""
MAX_HEADER_BYTES = 64 << 10
FOLDER_PREFIX = "baton-kv-"
"""Of folders with a socket file, among the machine's temporary ones."""
FIRST_CHECK_S, LAST_CHECK_S = 0.0005, 0.02
"""How soon to look for sent frames; doubles with each look in vain."""

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED


class DataHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=80):
    """First frame of a message: which blocks the following frames are, one or several in each, all of one size."""

    transfer: TransferId
    indices: Annotated[tuple[BlockIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS_PER_MESSAGE)]


_HEADER: Codec[DataHeader] = Codec(DataHeader, max_bytes=MAX_HEADER_BYTES)


def neighbours_joined(blocks: Sequence[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.uint8]]:
    """The same bytes in as few arrays as can be, without a copy: blocks that lie one behind the other are one.

    `blocks` of the same size, contiguous.
    """
    spans: list[npt.NDArray[np.uint8]] = []
    start = 0
    for end in range(1, len(blocks) + 1):
        if end < len(blocks) and _follows(blocks[end - 1], blocks[end]):
            continue
        first = blocks[start]
        spans.append(np.lib.stride_tricks.as_strided(first, (first.nbytes * (end - start),), writeable=False))
        start = end
    return spans


def _follows(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> bool:
    """Whether `other` begins where `one` ends, in the same memory."""
    return other.base is one.base is not None and other.ctypes.data == one.ctypes.data + one.nbytes


def _remove_forsaken_folders() -> None:
    """Of workers of this user that were killed: nobody listens at their sockets any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        file = folder / "blocks"
        try:
            if folder.stat().st_uid != os.getuid() or not file.is_socket():
                continue  # another user's, or its owner is just about to listen
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
                probe.setblocking(False)
                probe.connect(str(file))
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


class _Flight:
    """A message that libzmq may still read."""

    __slots__ = ("indices", "trackers", "transfer")

    def __init__(self, transfer: TransferId, indices: tuple[int, ...], trackers: list[Any]):
        self.transfer, self.indices, self.trackers = transfer, indices, trackers

    def done(self) -> bool:
        while self.trackers and self.trackers[-1].done:
            self.trackers.pop()
        return not self.trackers


class _Link:
    """The sending end of a link."""

    def __init__(self, socket: zmq.Socket[bytes], address: str):
        self.socket = socket
        self.address = address
        self.monitor = socket.get_monitor_socket(_EVENTS)
        self.is_up = False
        self.was_lost = False

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class ZmqTransport:
    """Listens at once at `endpoint`; `address` is then where peers reach it.

    `heartbeat_s`: interval of ZMTP pings; `heartbeat_timeout_s`: silence after which a link is cut.
    `security`: who may connect; None: anyone.
    """

    pulls = False
    reaches_gpu = False
    fixed_blocks = False

    def __init__(
        self,
        endpoint: str,
        *,
        advertise: str | None = None,
        heartbeat_s: float = 2.0,
        heartbeat_timeout_s: float = 10.0,
        security: Security | None = None,
    ):
        self.stats = TransportStats()
        self._context: zmq.Context[Any] = zmq.Context()
        self._security = security or Security(None)
        self._guard = self._security.guard(self._context)
        self._heartbeat_ms = (int(heartbeat_s * 1000), int(heartbeat_timeout_s * 1000))
        self._pool: BlockMemory | None = None
        self._write_block: Write = nowhere
        self._expected = ExpectedBlocks()
        self._links: dict[str, _Link] = {}
        self._flights: deque[_Flight] = deque()
        self._news: list[Completion] = []
        self._peer_of_fd: dict[int, str] = {}
        """Incarnation by open connection, as the PULL socket's monitor names them; empty: nothing awaited came yet."""
        self._check_s = FIRST_CHECK_S
        self._check_at: float | None = None
        self._folder: str | None = None
        self._pull = self._socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._security.secure_server(self._pull)
        self._monitor = self._pull.get_monitor_socket(_EVENTS)
        try:
            self._pull.bind(endpoint)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError("transfer.transport", f"cannot listen: {e.strerror}", value=endpoint) from e
        bound = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        if advertise is not None:
            bound = f"tcp://{advertise}:{bound.rpartition(':')[2]}"
        self.address = f"zmq+{bound}"
        self.reach = f"zmq+{bound.partition(':')[0]}"

    @classmethod
    def tcp(cls, host_port: str = "", **options: Any) -> ZmqTransport:
        """Listen on `HOST[:PORT]` (default `127.0.0.1`, any free port). A wildcard host advertises this machine's."""
        host, _, port = host_port.rstrip("/").partition(":")
        host = host or "127.0.0.1"
        advertise = None
        if host in ("*", "0.0.0.0"):
            advertise = sockets.gethostbyname(sockets.gethostname())
        return cls(f"tcp://{host}:{port or 0}", advertise=advertise, **options)

    @classmethod
    def ipc(cls, **options: Any) -> ZmqTransport:
        """Listen on a socket file in a folder of its own, which `close` removes (of a killed worker, the next one)."""
        _remove_forsaken_folders()
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        transport = cls(f"ipc://{folder}/blocks", **options)
        transport._folder = folder
        return transport

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        self._pool = pool
        self._write_block = write or copying_into(pool)

    # --- sending ----------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            if link.address == address and not link.was_lost:
                return
            self.disconnect(peer)
        socket = self._socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._security.secure_client(socket)
        self._links[peer] = _Link(socket, address)
        socket.connect(address.removeprefix("zmq+"))

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        assert self._pool is not None, "ship before register"
        link = self._links.get(peer)
        size = max(1, min(MAX_BLOCKS_PER_MESSAGE, BYTES_PER_MESSAGE // self._pool.block_bytes))
        for start in range(0, len(blocks), size):
            batch = blocks[start : start + size]
            indices = tuple(index for index, _ in batch)
            trackers: list[Any] = []
            try:
                if link is not None:
                    trackers = self._send(link.socket, transfer, indices, [block for _, block in batch])
            except zmq.ZMQError as e:
                log.warning("%d blocks of transfer %s were not sent: %s", len(batch), transfer, e)
            self._flights.append(_Flight(transfer, indices, trackers))
        self.stats.blocks_shipped += len(blocks)
        self._check_s, self._check_at = FIRST_CHECK_S, None
        return ()

    def _send(
        self, socket: zmq.Socket[bytes], transfer: TransferId, indices: tuple[int, ...], blocks: list[int]
    ) -> list[Any]:
        assert self._pool is not None
        # Below its copy threshold pyzmq would copy a frame and call it sent: here every frame is tracked.
        spans = neighbours_joined([self._pool.block(b) for b in blocks])
        frames = [zmq.Frame(span, track=True, copy=False, copy_threshold=0) for span in spans]
        socket.send(_HEADER.encode(DataHeader(transfer, indices)), zmq.DONTWAIT | zmq.SNDMORE)
        for frame in frames[:-1]:
            socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE, copy=False)
        socket.send(frames[-1], zmq.DONTWAIT, copy=False)
        return [frame.tracker for frame in frames]

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        self._expected.announce(transfer, blocks)

    def cancel(self, transfer: TransferId) -> None:
        """What was shipped for it cannot be taken back; the receiver drops it."""
        self._expected.cancel(transfer)

    def completions(self) -> list[Completion]:
        news, self._news = self._news, []
        self._read_monitors(news)
        self._read_data(news)
        self._find_sent(news)
        return news

    def _read_data(self, news: list[Completion]) -> None:
        budget = MAX_BYTES_PER_CALL
        for _ in range(MAX_MESSAGES_PER_CALL):  # a flood of empty ones must end too
            if budget <= 0:
                return
            try:
                frames = self._pull.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            budget -= sum(len(frame) for frame in frames)
            header = self._header(frames)
            if header is None:
                continue
            written = self._write(header, frames[1:])
            if written:
                # Only who sends what is awaited is that peer: whoever else names it must not be able to hang up for it.
                self._note_peer(frames[0], header.transfer.source, news)
                self.stats.blocks_written += len(written)
                news.append(Received(header.transfer, tuple(written)))

    def _header(self, frames: list[Any]) -> DataHeader | None:
        """None where this is not a message that a transport of this release sends for what is expected."""
        try:
            header = _HEADER.decode(frames[0].buffer)
        except ProtocolError as e:
            self._drop("is malformed: %s", e)
            return None
        sizes = [len(frame) for frame in frames[1:]]
        size, rest = divmod(sum(sizes), len(header.indices))
        expected = {self._size(header.transfer, index) for index in header.indices} - {None}
        if rest or not size or not expected <= {size} or any(length % size for length in sizes):
            what = "of transfer %s has frames of %s bytes for %d blocks of %s"
            self._drop(what, header.transfer, sorted(set(sizes))[:3], len(header.indices), expected)
            return None
        return header

    def _size(self, transfer: TransferId, index: int) -> int | None:
        """Bytes of the block that this index is to be written to; None: it is not awaited."""
        block = self._expected.find(transfer, index)
        return None if block is None or self._pool is None else self._pool.block(block).nbytes

    def _drop(self, what: str, *values: object) -> None:
        self.stats.num_malformed += 1
        if worth_saying(self.stats.num_malformed):
            log.warning(f"dropped a data message (%d so far), which {what}", self.stats.num_malformed, *values)

    def _write(self, header: DataHeader, frames: list[Any]) -> list[int]:
        """Indices of the blocks that are in the pool now; `_header` has looked at the frames."""
        size = sum(map(len, frames)) // len(header.indices)
        indices = iter(header.indices)
        written: list[int] = []
        for frame in frames:
            span = np.frombuffer(frame.buffer, dtype=np.uint8)
            for start in range(0, len(span), size):
                index = next(indices)
                block = self._expected.claim(header.transfer, index)
                if block is None:
                    self.stats.num_dropped += 1
                    continue
                self._write_block(block, span[start : start + size])
                written.append(index)
        return written

    # --- what became of it ------------------------------------------------------------------------

    def _find_sent(self, news: list[Completion]) -> None:
        before = len(self._flights)
        waiting: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.done():
                news.append(Sent(flight.transfer, flight.indices))
            else:
                waiting.append(flight)
        self._flights = waiting
        moved = len(waiting) < before
        self._check_s = FIRST_CHECK_S if moved else min(self._check_s * 2, LAST_CHECK_S)
        self._check_at = None

    def _read_monitors(self, news: list[Completion]) -> None:
        for peer, link in self._links.items():
            for event, _ in self._monitor_events(link.monitor):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    link.is_up, link.was_lost = True, False
                elif event == zmq.EVENT_DISCONNECTED and link.is_up:
                    link.is_up, link.was_lost = False, True
                    news.append(LinkLost(peer, f"the connection to {link.address} was lost"))
        self._read_pull_monitor(news)

    def _read_pull_monitor(self, news: list[Completion]) -> None:
        for event, fd in self._monitor_events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._peer_of_fd[fd] = ""
            elif event == zmq.EVENT_DISCONNECTED and (peer := self._peer_of_fd.pop(fd, "")):
                news.append(LinkLost(peer, "its connection was lost", incoming=True))

    def _note_peer(self, frame: Any, peer: str, news: list[Completion]) -> None:
        """Which connection is whose, so that its loss can be told. A connection's number may be used again."""
        with contextlib.suppress(zmq.ZMQError, ValueError):
            fd = int(frame.get("__fd"))
            if self._peer_of_fd.get(fd) != peer:
                self._read_pull_monitor(news)  # what happened to the former user of that number came before
                if fd in self._peer_of_fd:  # else it is gone already, and this is the last that came over it
                    self._peer_of_fd[fd] = peer

    @staticmethod
    def _monitor_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                message = recv_monitor_message(monitor, zmq.DONTWAIT)
                events.append((int(message["event"]), int(message["value"])))
        return events

    # --- owner ------------------------------------------------------------------------------------

    def pollables(self) -> Sequence[Any]:
        """Changes with `connect` and `disconnect`: ask before each wait."""
        return (self._pull, self._monitor, *(link.monitor for link in self._links.values()))

    def next_deadline(self, now: float) -> float | None:
        if not self._flights:
            return None
        if self._check_at is None:
            self._check_at = now + self._check_s
        return self._check_at

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        if not self._pull.closed:
            self._pull.disable_monitor()
            self._monitor.close(linger=0)
            self._pull.close(linger=0)
        self._guard.close()
        self._context.term()
        self._flights.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        interval, timeout = self._heartbeat_ms
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
        return socket
