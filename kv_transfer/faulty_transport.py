"""A transport around any other one that loses, delays, doubles, reorders and damages blocks, and cuts links.

For tests and rehearsals, never for service: `transfer.transport: faulty+zmq+tcp?drop=0.01&seed=3` runs a whole cluster
over it. Each fault is one that the wire, or a peer, may commit; the rules of `kv_transfer.base` hold for whoever owns
this transport as for any other: after a cancel nothing is written, each shipped block gets its `Sent` exactly once.

              at the sending end (`ship`)                      at the receiving end (`completions`)
    drop      not sent, told as sent; pulled: a void ref       `Received` is never told
    duplicate sent twice; pulled: no such thing                `Received` is told twice
    delay     sent later; pulled: `Sent` is told later         `Received` is told later
    reorder   as delay, for a few calls of `completions`       the same
    slow      sent later, so many bytes a second; pulled: -    `Received` is told later
    corrupt   -                                                the block is damaged once it was written
    truncate  -                                                its second half is zeroed once it was written
    cut       the link is torn down, `LinkLost` is told        `LinkLost` is told; the sender does not know of it

Not over pools that are staged (`baton.engine.staging`): a block that waits would outlive its host copy. Knows what
`kv_transfer.base` knows, and what refs of `kv_transfer.shared_pool` look like.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl

import msgspec

from baton.errors import ConfigError
from baton.protocol import TransferId
from kv_transfer.base import BlockMemory, Completion, KVTransport, LinkLost, Received, Sent, Write, nowhere
from kv_transfer.checksum import copying_into
from kv_transfer.device_pool import is_on_device
from kv_transfer.expected import TransportStats

Fault = Literal["drop", "duplicate", "delay", "reorder", "corrupt", "truncate", "cut"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
Rate = Annotated[float, msgspec.Meta(ge=0)]
"""Below 1: the probability that a block meets the fault. A whole number: the next so many blocks meet it."""

MAX_CALLS = 4
"""Of `completions` that a reordered block waits."""
VOID = 1 << 62
"""Part of a ref (`kv_transfer.shared_pool`) that names a life which its block has not come to."""


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which faults, how many, decided block by block. All in the query of a URL: `?drop=0.01&cut=2&seed=3`."""

    seed: int = 0
    at: Literal["both", "ship", "receive"] = "both"
    """Only the faults of this end."""
    drop: Rate = 0.0
    duplicate: Rate = 0.0
    delay: Rate = 0.0
    reorder: Rate = 0.0
    corrupt: Rate = 0.0
    truncate: Rate = 0.0
    cut: Rate = 0.0
    delay_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.05
    """Seconds that a delayed block waits."""
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Of each end; 0: as fast as it goes."""

    def __post_init__(self) -> None:
        for fault in FAULTS:
            rate = getattr(self, fault)
            if rate >= 1 and rate != int(rate):
                raise ValueError(f"{fault}={rate:g} is neither a probability below 1 nor a number of blocks")


def read_plan(query: str) -> FaultPlan:
    """Raises ConfigError for what is no plan."""
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        return msgspec.convert(fields, FaultPlan, strict=False)
    except ValueError as e:  # msgspec.ValidationError is one
        allowed = f"{', '.join(FaultPlan.__struct_fields__)}, as in ?drop=0.01&cut=2&seed=3"
        raise ConfigError("transfer.transport", f"no plan of faults: {e}", value=query, allowed=allowed) from e


class _Waiting(msgspec.Struct):
    """A block to be sent, or an end of one to be told, at `at` seconds and from call `call` of `completions` on."""

    at: float
    call: int
    what: type[Sent] | type[Received] | None
    """What is to be told; None: the block is to be sent."""
    transfer: TransferId
    index: int
    peer: str = ""
    block: int = -1


class FaultyTransport:
    """`inner` with faults. As other transports it is used by one thread; `arm`, `hold` and `release` by any.

    `clock`: seconds, as given to `next_deadline`.
    """

    def __init__(
        self, inner: KVTransport, plan: FaultPlan | None = None, *, clock: Callable[[], float] = time.monotonic
    ):
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.pulls = inner.pulls
        self.address = inner.address
        self.reaches_gpu = inner.reaches_gpu
        self.fixed_blocks = inner.fixed_blocks
        self.faults: Counter[str] = Counter()
        """How many blocks met which fault."""
        self.num_cancelled = 0
        """Transfers that were cancelled at this end."""
        self._clock = clock
        self._random = random.Random(self.plan.seed)
        self._left = {fault: int(getattr(self.plan, fault)) for fault in FAULTS}
        self._left_lock = threading.Lock()
        self._pool: BlockMemory | None = None
        self._write_block: Write = nowhere
        self._news: list[Completion] = []
        self._losses: dict[str, LinkLost] = {}
        """Those in `_news` of links that this end made."""
        self._waiting: list[_Waiting] = []
        self._extra: Counter[tuple[TransferId, int]] = Counter()
        """`Sent` of `inner` that are not to be told: of copies that its owner does not know of."""
        self._targets: dict[TransferId, dict[int, int]] = {}
        """Block by index, of what was announced and not told yet."""
        self._num_calls = 0
        self._free_at = 0.0
        """When the slow wire has taken what it was given so far."""
        self._held = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def reach(self) -> str:
        """May depend on the pool that is registered."""
        return self.inner.reach

    @property
    def stats(self) -> TransportStats:
        return self.inner.stats

    # --- faults that are asked for, from any thread -------------------------------------------------------

    def arm(self, fault: Fault, count: int = 1) -> None:
        """The next so many blocks meet it, besides those that meet it by chance."""
        with self._left_lock:
            self._left[fault] += count

    def hold(self) -> None:
        """From now on nothing comes in at this end, nor is anything told, until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._notify()

    def _strikes(self, fault: Fault) -> bool:
        rate = getattr(self.plan, fault)
        with self._left_lock:
            counted = self._left[fault] > 0
            self._left[fault] -= counted
        struck = counted or (0 < rate < 1 and self._random.random() < rate)
        self.faults[fault] += struck
        return struck

    def _is_at(self, end: str) -> bool:
        return self.plan.at in ("both", end)

    # --- sending ------------------------------------------------------------------------------------------

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        self._pool = pool
        self._write_block = write or copying_into(pool)
        self.inner.register(pool, write, incarnation=incarnation)

    def connect(self, peer: str, address: str) -> None:
        self.inner.connect(peer, address)

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        if not blocks or not self._is_at("ship"):
            return self.inner.ship(peer, transfer, blocks)
        if sum(self._strikes("cut") for _ in blocks):
            self.disconnect(peer)
            self._losses[peer] = loss = LinkLost(peer, "it was cut on purpose")
            self._tell(loss)
        if self.pulls:
            return self._lend(peer, transfer, blocks)
        passed: list[tuple[int, int]] = []
        for index, block in blocks:
            if self._strikes("drop"):
                self._tell(Sent(transfer, (index,)))
                continue
            copies = 1 + self._strikes("duplicate")
            self._extra.update({(transfer, index): copies - 1} if copies > 1 else {})
            for _ in range(copies):
                if (when := self._when()) is None:
                    passed.append((index, block))
                else:
                    self._waiting.append(_Waiting(*when, None, transfer, index, peer, block))
        if passed:
            self.inner.ship(peer, transfer, passed)
        return ()

    def _lend(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """What is dropped is not lent; its ref is a void one."""
        dropped = [self._strikes("drop") for _ in blocks]
        lent = [block for block, is_dropped in zip(blocks, dropped, strict=True) if not is_dropped]
        refs = iter(given := self.inner.ship(peer, transfer, lent))
        for (index, _), is_dropped in zip(blocks, dropped, strict=True):
            if is_dropped:
                self._tell(Sent(transfer, (index,)))
        if lent and not given:
            return ()  # there is no link
        return tuple(
            VOID | block if is_dropped else next(refs) for (_, block), is_dropped in zip(blocks, dropped, strict=True)
        )

    def _when(self) -> tuple[float, int] | None:
        """At what time and call of `completions` the next block's turn is; None: now."""
        now = self._clock()
        at, call = now, self._num_calls
        if self._strikes("delay"):
            at += self.plan.delay_s
        if self._strikes("reorder"):
            call += self._random.randint(1, MAX_CALLS)
        if self.plan.bytes_per_s:
            assert self._pool is not None
            self._free_at = max(self._free_at, now) + self._pool.block_bytes / self.plan.bytes_per_s
            at = max(at, self._free_at)
            self.faults["slow"] += 1
        return None if (at, call) == (now, self._num_calls) else (at, call)

    def disconnect(self, peer: str) -> None:
        loss = self._losses.pop(peer, None)
        self._news = [news for news in self._news if news is not loss]
        self._drop_unsent(lambda waiting: waiting.peer == peer)
        self.inner.disconnect(peer)

    def _drop_unsent(self, is_meant: Callable[[_Waiting], bool]) -> None:
        for waiting in self._take(lambda waiting: waiting.what is None and is_meant(waiting)):
            self._on_sent(waiting.transfer, waiting.index)

    def _take(self, is_meant: Callable[[_Waiting], bool]) -> list[_Waiting]:
        """Those that are meant, which then wait no more."""
        taken: list[_Waiting] = []
        left: list[_Waiting] = []
        for waiting in self._waiting:
            (taken if is_meant(waiting) else left).append(waiting)
        self._waiting = left
        return taken

    def _on_sent(self, transfer: TransferId, index: int) -> None:
        """A copy of the block is read no more; its owner hears of the last one."""
        key = (transfer, index)
        if self._extra[key] > 0:
            self._extra[key] -= 1
            return
        del self._extra[key]
        if self.pulls and self._is_at("ship") and self._strikes("delay"):
            at = self._clock() + self.plan.delay_s
            self._waiting.append(_Waiting(at, self._num_calls, Sent, transfer, index))
        else:
            self._tell(Sent(transfer, (index,)))

    # --- receiving ----------------------------------------------------------------------------------------

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        if blocks:
            # What is fetched again is written again: that it was here before is not told any more.
            self._drop_untold(transfer, {index for index, _ in blocks})
            self._targets.setdefault(transfer, {}).update(blocks)
        self.inner.receive(peer, transfer, refs, blocks)

    def cancel(self, transfer: TransferId) -> None:
        self.num_cancelled += 1
        self._drop_unsent(lambda waiting: waiting.transfer == transfer)
        self._drop_untold(transfer)
        self._targets.pop(transfer, None)
        self.inner.cancel(transfer)

    def _drop_untold(self, transfer: TransferId, indices: set[int] | None = None) -> None:
        def is_void(what: Any, of: TransferId, index: int) -> bool:
            return what is Received and of == transfer and (indices is None or index in indices)

        self._take(lambda waiting: is_void(waiting.what, waiting.transfer, waiting.index))
        self._news = [
            news
            for news in self._news
            if not (isinstance(news, Received) and is_void(Received, news.transfer, news.indices[0]))
        ]

    def _on_received(self, transfer: TransferId, index: int) -> None:
        targets = self._targets.get(transfer, {})
        block = targets.get(index)
        if block is None or not self._is_at("receive"):
            self._received(transfer, index)
            return
        if self._strikes("drop"):
            if not self.pulls:  # another copy may come
                self.inner.receive(transfer.source, transfer, (), ((index, block),))
            return
        if self._strikes("corrupt"):
            self._damage(block, zero=False)
        if self._strikes("truncate"):
            self._damage(block, zero=True)
        if self._strikes("cut"):
            self._tell(LinkLost(transfer.source, "it was cut on purpose", incoming=True))
        for _ in range(1 + self._strikes("duplicate")):
            if (when := self._when()) is None:
                self._received(transfer, index)
            else:
                self._waiting.append(_Waiting(*when, Received, transfer, index))

    def _received(self, transfer: TransferId, index: int) -> None:
        targets = self._targets.get(transfer)
        if targets is not None:
            targets.pop(index, None)
            if not targets:
                del self._targets[transfer]
        self._tell(Received(transfer, (index,)))

    def _damage(self, block: int, *, zero: bool) -> None:
        """Of a block in the pool that nobody has been told of."""
        pool = self._pool
        assert pool is not None
        memory: Any = pool.block_tensor(block) if is_on_device(pool) else pool.block(block).copy()
        if zero:
            memory[len(memory) // 2 :] = 0
        else:
            memory[self._random.randrange(len(memory))] ^= 1 << self._random.randrange(8)
        if is_on_device(pool):
            int(memory[-1])  # it is done
        else:
            self._write_block(block, memory)  # as if it had come so

    # --- owner --------------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        if self._held:
            self._drain()
            return [] if self._held else self.completions()  # released just now
        self._num_calls += 1
        self._take_turns()
        for event in self.inner.completions():
            match event:
                case Sent(transfer, indices):
                    for index in indices:
                        self._on_sent(transfer, index)
                case Received(transfer, indices):
                    for index in indices:
                        self._on_received(transfer, index)
                case LinkLost():
                    self._tell(event)
        news, self._news = self._news, []
        self._losses.clear()
        self._drain()
        return news

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def _take_turns(self) -> None:
        """Send and tell what has waited long enough."""
        now = self._clock()
        for waiting in self._take(lambda waiting: waiting.at <= now and waiting.call <= self._num_calls):
            if waiting.what is None:
                self.inner.ship(waiting.peer, waiting.transfer, ((waiting.index, waiting.block),))
            elif waiting.what is Received:
                self._received(waiting.transfer, waiting.index)
            else:
                self._tell(Sent(waiting.transfer, (waiting.index,)))

    def pollables(self) -> Sequence[Any]:
        return (self._event,) if self._held else (self._event, *self.inner.pollables())

    def next_deadline(self, now: float) -> float | None:
        if self._held:
            return None
        times = [max(waiting.at, now) for waiting in self._waiting]
        if (inner := self.inner.next_deadline(now)) is not None:
            times.append(inner)
        return min(times, default=None)

    def close(self) -> None:
        if self._event < 0:
            return
        self.inner.close()
        os.close(self._event)
        self._event = -1
        self._waiting.clear()
        self._news.clear()
        self._losses.clear()
        self._targets.clear()
        self._extra.clear()

    def _tell(self, news: Completion) -> None:
        self._news.append(news)
        self._notify()

    def _notify(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)
