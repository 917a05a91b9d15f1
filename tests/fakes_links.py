"""Links between workers whose control messages are lost, late, doubled and out of order; and a TCP wire to be cut."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from baton.ports import Action, FromDecode, FromPrefill, PeerEvent, PeerLinks, ToPeer


class MessageFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, per message and direction; `delay_s`: the longest that a late one takes."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02


class FaultyLinks:
    """`PeerLinks` around others. Session messages meet faults as they leave and as they come; blocks are left alone.

    Late messages change their order with others and, as they may go out after what happened since, with the blocks.
    """

    def __init__(self, inner: PeerLinks, faults: MessageFaults):
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._late: list[tuple[float, Action | PeerEvent]] = []
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, action: Action) -> list[PeerEvent]:
        if not isinstance(action, ToPeer):
            return self._inner.execute(action)
        for _ in range(self._copies(action)):
            self._inner.execute(action)
        return []

    def events(self) -> list[PeerEvent]:
        now = time.monotonic()
        due = [message for at, message in self._late if at <= now]
        self._late = [late for late in self._late if late[0] > now]
        events: list[PeerEvent] = []
        for message in due:
            events += self._inner.execute(message) if isinstance(message, ToPeer) else [message]  # type: ignore[list-item]
        for event in self._inner.events():
            is_message = isinstance(event, FromDecode | FromPrefill)
            events += [event] * (self._copies(event) if is_message else 1)
        return events

    def _copies(self, message: Action | PeerEvent) -> int:
        """How many go on now."""
        faults = self._faults
        if self._random.random() < faults.drop:
            self.counts["drop"] += 1
            return 0
        copies = 1
        if self._random.random() < faults.duplicate:
            self.counts["duplicate"] += 1
            copies = 2
        if self._random.random() < faults.delay:
            self.counts["delay"] += 1
            self._late.append((time.monotonic() + self._random.uniform(0, faults.delay_s), message))
            copies -= 1
        return copies

    def next_deadline(self, now: float) -> float | None:
        times = [at for at, _ in self._late]
        if (inner := self._inner.next_deadline(now)) is not None:
            times.append(inner)
        return min(times, default=None)


class TcpProxy:
    """A wire in between: who connects to `address` is joined to `target`. Both are `tcp://HOST:PORT`, of any scheme.

    `cut` resets those that are open, `freeze` stops carrying bytes (`thaw` goes on), `idle_s` resets each that has been
    still for so long, as middleboxes do. One thread, which `close` ends.
    """

    def __init__(self, target: str, *, idle_s: float | None = None):
        self.target = target
        self._idle_s = idle_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"{target.partition('://')[0]}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_accepted = 0
        self.num_reset = 0
        """Connections that were cut, on purpose or for being idle."""
        self.num_bytes = 0
        """Carried so far, in both directions."""
        self._other: dict[socket.socket, socket.socket] = {}
        self._moved_at: dict[socket.socket, float] = {}
        self._is_frozen = False
        self._wake, self._woken = socket.socketpair()
        self._orders: list[str] = []
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="tcp-proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every open connection, complete on return; new ones are accepted."""
        self._order("cut")

    def freeze(self) -> None:
        self._order("freeze")

    def thaw(self) -> None:
        self._order("thaw")

    def close(self) -> None:
        self._order("close")
        self._thread.join()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, what: str) -> None:
        with self._done:
            self._orders.append(what)
            self._wake.send(b"x")
            assert self._done.wait_for(lambda: what not in self._orders, 20), f"the proxy does not {what}"

    def _serve(self) -> None:
        is_open = True
        while is_open:
            moving = [] if self._is_frozen else list(self._other)
            readable, _, _ = select.select(
                [self._woken, self._listener, *moving], [], [], self._idle_s and self._idle_s / 4
            )
            for sock in readable:
                if sock is self._woken:
                    is_open = self._obey()
                elif sock is self._listener:
                    self._accept()
                elif sock in self._other:
                    self._forward(sock)
            self._reset_idle()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def _obey(self) -> bool:
        self._woken.recv(4096)
        with self._done:
            orders, self._orders = self._orders, []
            for order in orders:
                if order in ("cut", "close"):
                    self._cut_all()
                else:
                    self._is_frozen = order == "freeze"
            self._done.notify_all()
        return "close" not in orders

    def _cut_all(self) -> None:
        while self._other:
            self.num_reset += 1
            self._reset(next(iter(self._other)))

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        try:
            host, _, port = self.target.partition("://")[2].rpartition(":")
            theirs = socket.create_connection((host, int(port)))
        except OSError:
            ours.close()
            return
        self.num_accepted += 1
        for one, other in ((ours, theirs), (theirs, ours)):
            self._other[one] = other
            self._moved_at[one] = time.monotonic()

    def _forward(self, sock: socket.socket) -> None:
        other = self._other[sock]
        try:
            data = sock.recv(1 << 16)
            if data:
                other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._reset(sock)
            return
        self.num_bytes += len(data)
        self._moved_at[sock] = self._moved_at[other] = time.monotonic()

    def _reset_idle(self) -> None:
        if self._idle_s is not None:
            still = [sock for sock, at in self._moved_at.items() if at + self._idle_s < time.monotonic()]
            for sock in still:
                if sock in self._other:  # else it went with its other end
                    self.num_reset += 1
                    self._reset(sock)

    def _reset(self, sock: socket.socket) -> None:
        for one in (sock, self._other.pop(sock, None)):
            if one is not None:
                self._other.pop(one, None)
                self._moved_at.pop(one, None)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
                one.close()


class RewritingLinks:
    """`PeerLinks` around others that show `rewrite(event)` in place of each event."""

    def __init__(self, inner: PeerLinks, rewrite: Callable[[PeerEvent], PeerEvent]):
        self._inner = inner
        self._rewrite = rewrite

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def events(self) -> list[PeerEvent]:
        return [self._rewrite(event) for event in self._inner.events()]
