"""The links of `kv_transfer.group_transport`, each with a thread, a socket and a process group of its own.

    source   connects ──── Hello: block size ───────────────► target   listens
             ◄──────────── Welcome: the store, the link's name ────
             ◄═══════════ both make the group ═══════════►
             header of a batch ─────────────────────────────►          has room for it
             ◄──────────────────────────────── go ──────────          receive is posted
             blocks ════════ (group) ═══════════════════════►          into scratch memory

All that is not payload goes over the socket. So every length is checked before anything is allocated or posted, a peer
that is gone shows as the end of a stream, and no group waits for a peer that is not there. The target names the next
batch's `go` when it has scratch memory for it: that is what holds the source back.

Gloo and NCCL themselves trust whom they are connected to, as torch.distributed does: use a network that you trust.

Knows sockets, batches and groups; must not know which blocks of a pool are expected.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from baton.codec import Codec
from baton.errors import ProtocolError
from baton.protocol import PROTOCOL_VERSION, TransferId
from kv_transfer import link_memory
from kv_transfer.base import Completion, Sent
from kv_transfer.group_backend import LINK_TIMEOUT_S, SOURCE, TARGET, Backend, Group
from kv_transfer.link_memory import MAX_BLOCKS_PER_BATCH, NUM_SCRATCH
from kv_transfer.messages import BlockIndex

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 4096

_HELLO = struct.Struct("!8sHQ")
"""Scheme, protocol version, bytes of a block."""
_WELCOME = struct.Struct("!8sHH16s")
"""Scheme, protocol version, the port of the target's store, the link's name."""
_LENGTH = struct.Struct("!H")
_GO = b"\x01"


class BatchHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=85):
    """Before each batch: its transfer, and of each block that follows the index in it."""

    transfer: TransferId
    indices: Annotated[tuple[BlockIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS_PER_BATCH)]


HEADER: Codec[BatchHeader] = Codec(BatchHeader, max_bytes=MAX_HEADER_BYTES)


class Batch(NamedTuple):
    """Blocks to send together."""

    transfer: TransferId
    indices: tuple[int, ...]
    blocks: tuple[torch.Tensor, ...]
    written: Any
    """See `Backend.written`."""


class Arrival(NamedTuple):
    """A batch in scratch memory, shape `[blocks, block_bytes]`; `link.release(scratch)` when it is used no more."""

    link: IncomingLink
    header: BatchHeader
    scratch: torch.Tensor


class Malformed(NamedTuple):
    """The link to `peer` (empty: unknown) brought what no transport of this release sends, and was torn down."""

    peer: str
    problem: str


class Lost(NamedTuple):
    """What `LinkLost` is made of, unless the link was torn down meanwhile."""

    link: Link
    reason: str


class Ended(NamedTuple):
    """The last that the link's thread does."""

    link: Link


News = Completion | Arrival | Malformed | Lost | Ended


def blocks_per_batch(backend: Backend) -> int:
    return link_memory.blocks_per_batch(backend.max_message_bytes, backend.block_bytes)


class Link:
    """One end. `tell` takes the news of its thread, `watch` the connected socket, whose end is then told to `end`."""

    peer = ""
    """The other worker's incarnation; empty until it is known."""

    def __init__(
        self, sock: socket.socket, backend: Backend, tell: Callable[[News], None], watch: Callable[[int], None]
    ):
        self.sock = sock
        self.fd = sock.fileno()
        self._backend = backend
        self._tell = tell
        self._watch = watch
        self._lock = threading.Condition()
        self._group: Group | None = None
        self.is_up = False
        """The group was made."""
        self._reason = ""
        self._is_told_lost = False
        self.is_over = False
        self.thread = threading.Thread(target=self._run, name=f"kv-{backend.scheme}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def end(self, reason: str = "") -> None:
        """Tear it down, whatever it waits for. `reason`: why it was lost; empty: it is an act of this side, no loss.

        Its thread ends at once, but for one that is making a group (`LINK_TIMEOUT_S`), or that gloo forgot to wake
        (`BATCH_TIMEOUT_S`).
        """
        with self._lock:
            if self.is_over:
                return
            self.is_over, self._reason = True, reason
            group = self._group
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if group is None or group.abort():
            self._clean_up()

    # --- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except ProtocolError as e:
            self._tell(Malformed(self.peer, str(e)))
            self.end(f"malformed: {e}")
        except (OSError, RuntimeError) as e:  # RuntimeError is what torch raises
            if not self.is_up and not self.is_over:
                log.warning("no %s link with %s: %s", self._backend.scheme, self.peer or "a peer", e)
            self.end(str(e) or type(e).__name__)
        finally:
            self.end()
            if self._group is not None:
                self._group.close()
            self._clean_up()
            if self.is_up:
                self._tell_lost()
            self._group = None
            self.sock.close()
            self._tell(Ended(self))

    def _tell_lost(self) -> None:
        """Once, and only what is over for a reason."""
        with self._lock:
            is_due = self._reason and self.peer and not self._is_told_lost
            self._is_told_lost = True
        if is_due:
            self._tell(Lost(self, self._reason))

    def _serve(self) -> None:
        raise NotImplementedError

    def _clean_up(self) -> None:
        """The group touches no memory any more."""

    def _connected(self) -> None:
        """From now on `end` ends whatever waits for the socket. Raises ConnectionError if it has been called before."""
        with self._lock:
            if self.is_over:
                raise ConnectionError("the link was ended while it was being made")
            self._watch(self.fd)

    def _make_group(self, host: str, port: int, name: bytes, rank: int) -> Group:
        """Raises RuntimeError if it cannot be made."""
        limit = timedelta(seconds=LINK_TIMEOUT_S)
        # A connection of its own: an operation that waits for the peer holds up all others of that connection.
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        mine = dist.PrefixStore(name.hex(), store)  # type: ignore[attr-defined]
        group = self._backend.open_group(mine, rank)
        with self._lock:
            if not self.is_over:
                self._group, self.is_up = group, True
                return group
        group.close()
        raise ConnectionError("the link was ended while it was being made")

    def _read(self, num_bytes: int) -> bytes:
        """Raises ConnectionError at the end of the stream."""
        data = b""
        while len(data) < num_bytes:
            part = self.sock.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("the connection was closed")
            data += part
        return data

    def _scheme(self) -> bytes:
        return f"kv-{self._backend.scheme}".encode().ljust(8)


class OutgoingLink(Link):
    """The source's end of a link, to be connected to `(host, port)`. Batches wait until it is up."""

    def __init__(
        self,
        peer: str,
        host: str,
        port: int,
        backend: Backend,
        tell: Callable[[News], None],
        watch: Callable[[int], None],
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(socket.socket(family, socket.SOCK_STREAM), backend, tell, watch)
        self.peer = peer
        self.host, self.port = host, port
        self._queue: deque[Batch] = deque()
        self._sending: Batch | None = None

    def ship(self, batch: Batch) -> bool:
        """False: the link is over, nobody will read this batch; that it was lost has been told."""
        with self._lock:
            if not self.is_over:
                self._queue.append(batch)
                self._lock.notify_all()
                return True
        self._tell_lost()
        return False

    def withdraw(self, transfer: TransferId) -> list[Batch]:
        """Take back what has not begun."""
        with self._lock:
            mine = [batch for batch in self._queue if batch.transfer == transfer]
            self._queue = deque(batch for batch in self._queue if batch.transfer != transfer)
        return mine

    def _serve(self) -> None:
        self.sock.settimeout(LINK_TIMEOUT_S)
        self.sock.connect((self.host, self.port))
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connected()
        self.sock.sendall(_HELLO.pack(self._scheme(), PROTOCOL_VERSION, self._backend.block_bytes))
        scheme, version, port, name = _WELCOME.unpack(self._read(_WELCOME.size))
        if (scheme, version) != (self._scheme(), PROTOCOL_VERSION):
            raise ProtocolError(f"welcome of {scheme!r}, protocol version {version}, expected {PROTOCOL_VERSION}")
        group = self._make_group(self.host, port, name, SOURCE)
        while (batch := self._next()) is not None:
            header = HEADER.encode(BatchHeader(batch.transfer, batch.indices))
            self.sock.sendall(_LENGTH.pack(len(header)) + header)
            if self._read(1) != _GO:
                raise ProtocolError("not the answer to a header")
            group.send(batch.blocks, batch.written)
            with self._lock:
                is_told = self._sending is None
                self._sending = None
            if not is_told:
                self._tell(Sent(batch.transfer, batch.indices))

    def _next(self) -> Batch | None:
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self.is_over)
            self._sending = self._queue.popleft() if not self.is_over else None
            return self._sending

    def _clean_up(self) -> None:
        with self._lock:
            rest = [*([self._sending] if self._sending is not None else []), *self._queue]
            self._queue.clear()
            self._sending = None
        if rest:
            self._tell_lost()
        for batch in rest:
            self._tell(Sent(batch.transfer, batch.indices))


class IncomingLink(Link):
    """The target's end of a link that was accepted. `host`, `store_port`: where this side's store is."""

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        store_port: int,
        backend: Backend,
        tell: Callable[[News], None],
        watch: Callable[[int], None],
    ):
        super().__init__(sock, backend, tell, watch)
        self._host, self._store_port = host, store_port
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()

    def release(self, scratch: torch.Tensor) -> None:
        self._free.put(scratch)

    def end(self, reason: str = "") -> None:
        super().end(reason)
        self._free.put(None)

    def _serve(self) -> None:
        self.sock.settimeout(LINK_TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connected()
        scheme, version, block_bytes = _HELLO.unpack(self._read(_HELLO.size))
        expected = (self._scheme(), PROTOCOL_VERSION, self._backend.block_bytes)
        if (scheme, version, block_bytes) != expected:
            raise ProtocolError(f"hello of {(scheme, version, block_bytes)}, expected {expected}")
        self.sock.settimeout(None)
        name = uuid.uuid4().bytes
        self.sock.sendall(_WELCOME.pack(self._scheme(), PROTOCOL_VERSION, self._store_port, name))
        group = self._make_group(self._host, self._store_port, name, TARGET)
        for _ in range(NUM_SCRATCH):
            self._free.put(self._backend.scratch(blocks_per_batch(self._backend)))
        while (scratch := self._free.get()) is not None:
            header = self._header()
            self.peer = header.transfer.source
            posted = group.post_receive([scratch[i] for i in range(len(header.indices))])
            self.sock.sendall(_GO)
            group.wait(posted)
            if self.is_over:  # what an aborted receive left is not what was sent
                return
            self._tell(Arrival(self, header, scratch))

    def _header(self) -> BatchHeader:
        """Raises ProtocolError for what no transport of this release sends."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_HEADER_BYTES:
            raise ProtocolError(f"header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
        header = HEADER.decode(self._read(length))
        limit = blocks_per_batch(self._backend)
        if len(header.indices) > limit:
            raise ProtocolError(f"batch of {len(header.indices)} blocks, more than the {limit} allowed")
        return header
