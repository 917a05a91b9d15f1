"""The router's two ZeroMQ sockets: bytes in, bytes out, who is reachable.

Knows endpoints and socket options; must not know messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from baton.codec import MAX_MESSAGE_BYTES
from baton.errors import ClusterError
from baton.security import Security

FRONT_HWM = 20_000
"""Messages buffered for one client that does not read; one more and the client counts as stuck."""
BACK_HWM = 100_000
RECEIVE_QUEUE = 256
"""Messages of one peer that are read ahead: more wait in the peer's own memory, not in ours."""
HEARTBEAT_MS = 5_000
"""ZMTP heartbeats: they end half-open connections, which TCP alone may keep for hours."""

# Plain ints: arithmetic on pyzmq's enums takes longer than the calls that they are for.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)


class Unreachable(Exception):
    """The peer is gone, or its buffer is full. `stuck` tells the two apart."""

    def __init__(self, stuck: bool):
        super().__init__("does not read its messages" if stuck else "is not connected")
        self.stuck = stuck


class RouterSocket:
    """A bound ROUTER socket that never blocks and never drops silently."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        *,
        hwm: int,
        key: str,
        security: Security | None = None,
        watched: bool = False,
    ):
        """Bind to `host:port`, 0 for any port; ClusterError names `key` as the configuration to change.

        `hwm`: messages that may wait for a peer that does not read. `security`: who may connect (None: anyone).
        `watched`: `num_lost` tells of connections that ended.
        """
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects keeps its routing id
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if security is not None:
            security.secure_server(self.socket)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
        self._monitor: zmq.Socket[bytes] | None = None
        if watched:
            self._monitor = self.socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        bound = f"[{host}]" if ":" in host else host
        try:
            self.socket.bind(f"tcp://{bound}:{port or '*'}")
        except zmq.ZMQError as e:
            self.close(0.0)
            if e.errno == zmq.EADDRINUSE:
                raise ClusterError(
                    f"{key}: port {port} of {host} is in use; set {key} to a free port, or to 0 for any"
                ) from e
            raise ClusterError(
                f"{key}: cannot listen on {host}:{port} ({e.strerror}); set router.host to an address of this machine"
            ) from e
        real_port = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://{reachable(host)}:{real_port}"
        """What others connect to."""

    @property
    def fd(self) -> int:
        """Readable when there may be news: then, and after each send, `has_news` tells (ZeroMQ's is edge-triggered)."""
        return int(self.socket.getsockopt(zmq.FD))

    def has_news(self) -> bool:
        """Whether a message waits to be read."""
        return bool(self.socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def received(self, limit: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Up to `limit` waiting messages, each with its sender's routing id; never waits."""
        receive = self.socket.recv
        option: Callable[[int], Any] = self.socket.getsockopt
        for _ in range(limit):
            if not option(_EVENTS) & _POLLIN:  # asking costs a tenth of the exception that a vain try raises
                return
            peer = receive(_NOBLOCK)
            frames = []
            while option(_RCVMORE):
                frames.append(receive(_NOBLOCK))
            yield peer, frames

    def send(self, peer: bytes, data: bytes) -> None:
        """Queue one message; raises Unreachable instead of waiting or dropping it."""
        try:
            self.socket.send(peer, _NOBLOCK_MORE)  # raises here or not at all: the rest of a message is never refused
            self.socket.send(data, _NOBLOCK)
        except zmq.Again as e:
            raise Unreachable(stuck=True) from e
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable(stuck=False) from e

    @property
    def lost_fd(self) -> int:
        """Readable when a connection may have ended, if `num_lost` was called before; of a watched socket."""
        assert self._monitor is not None
        return int(self._monitor.getsockopt(zmq.FD))

    def num_lost(self) -> int:
        """Connections that ended since the last call. Whose they were, only a message to their peer tells."""
        assert self._monitor is not None
        lost = 0
        while self._monitor.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
            self._monitor.recv_multipart(_NOBLOCK)
            lost += 1
        return lost

    def close(self, linger_s: float) -> None:
        """Give what is queued `linger_s` to leave."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self.socket.close(linger=int(linger_s * 1000))


def reachable(host: str) -> str:
    """The address under which others reach a socket bound to `host`."""
    if host in ("0.0.0.0", "*"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing: asks which interface would
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
