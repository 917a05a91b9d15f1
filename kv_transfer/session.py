"""The life of one transfer, on both of its sides: states, one transition table, leases.

Pure. Knows messages' order and meaning, block indices and leases; must not know engines, routers,
sockets or clocks (`prefill_worker.send_port` and `decode_worker.receive_port` join it to those).

Both sides run the same automaton. An event that one side causes, the other side observes as a
message, so one table serves both; `CAUSED_BY` says who may cause what.

              offer                accept              commit               ack
       P ────────────► OFFERED ────────────► OPEN ────────────► COMMITTED ────────► DONE
                          │                  │ ▲ data              │ ▲ data
                          ├─refuse► REFUSED  └─┘                   └─┘
                          │                                        ├─nack──► FAILED
                          │                                        │
                          └────── in each of the three: abort ──► ABORTED
                                                        lost ───► FAILED      peer or link is gone
                                  in OPEN, COMMITTED:   expire ─► EXPIRED     no progress for a lease

A cell of the table says what an event does in a state: go on, be ignored (late or repeated: counted),
or nothing at all: such a message is one that no correct peer sends, however the wire delays, repeats or
reorders (ProtocolError), and a bug where this side caused it.

P asks and D answers. A question may be repeated (the ports do so after a silence), and gets the same
answer again; so a lost message delays a transfer, it does not decide it. (Idea: the transition tables of
h11, and idempotent requests.)

Leases. P's runs while P waits for D or for the wire: frames are unsent, or the Commit is unanswered. D's runs
from Accept to the end. Waiting for credit is nobody's lease, and while P's own engine is what takes
long, P renews D's lease (an empty `Data`). For the answer to its Commit P waits longer than a lease: D's began
later, and D, which can go on without the blocks that are missing, is to decide first.

A lost link ends nothing by itself. P makes a new one and ships again what D may lack, under the same transfer: D writes
each block once, whichever copy comes first. D asks P whether it is still there (its Accept again) and waits
`RELINK_S` for a word: what P said on its own may have come before D heard of the loss. Only then does P count as lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from typing import ClassVar, Final

from baton.errors import ProtocolError
from baton.protocol import TransferId
from kv_transfer.messages import Commit, Offer
from kv_transfer.wire_format import LANDS, Landing, WireFormat

ANSWER_LEASES: Final = 2
"""Leases that P waits for the answer to a Commit whose blocks have all left."""
MAX_RELINKS: Final = 3
"""New links that one transfer may need. One that has seen more fails: a new attempt elsewhere is the better bet."""
RELINK_S: Final = 1.0
"""Seconds from the loss of a link for which D waits to hear of the transfer again."""


class _Key(Enum):
    """Members are looked up for each message; Enum's own hash is of their names, and computed in Python."""

    __hash__ = object.__hash__


class Side(_Key):
    PREFILL = "prefill"
    DECODE = "decode"


class State(_Key):
    OFFERED = "offered"
    """No credit yet; nobody holds blocks for the transfer."""
    OPEN = "open"
    """D has reserved blocks; P computes and ships."""
    COMMITTED = "committed"
    """P has named all blocks and the first token; D may miss some that the Commit overtook."""
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    EXPIRED = "expired"
    ABORTED = "aborted"


ENDS: Final = frozenset({State.DONE, State.REFUSED, State.FAILED, State.EXPIRED, State.ABORTED})


class Event(_Key):
    OFFER = "offer"
    ACCEPT = "accept"
    REFUSE = "refuse"
    DATA = "data"
    COMMIT = "commit"
    ACK = "ack"
    NACK = "nack"
    ABORT = "abort"
    EXPIRE = "expire"
    LOST = "lost"


CAUSED_BY: Final[dict[Event, frozenset[Side]]] = {
    Event.OFFER: frozenset({Side.PREFILL}),
    Event.ACCEPT: frozenset({Side.DECODE}),
    Event.REFUSE: frozenset({Side.DECODE}),
    Event.DATA: frozenset({Side.PREFILL}),
    Event.COMMIT: frozenset({Side.PREFILL}),
    Event.ACK: frozenset({Side.DECODE}),
    Event.NACK: frozenset({Side.DECODE}),
    Event.ABORT: frozenset(Side),
    Event.EXPIRE: frozenset(Side),
    Event.LOST: frozenset(Side),
}


class Ignored(Enum):
    """The event comes late or again: nothing happens, it is counted."""

    IGNORED = "ignored"


_ = Ignored.IGNORED
S, E = State, Event

TRANSITIONS: Final[dict[State, dict[Event, State | Ignored]]] = {
    S.OFFERED: {
        E.OFFER: _,
        E.ACCEPT: S.OPEN,
        E.REFUSE: S.REFUSED,
        E.ABORT: S.ABORTED,
        E.LOST: S.FAILED,
    },
    S.OPEN: {
        E.OFFER: _,
        E.ACCEPT: _,
        E.REFUSE: _,  # of D's next life, to a copy of the Offer that came late; the router tells of the loss
        E.DATA: S.OPEN,
        E.COMMIT: S.COMMITTED,
        E.ABORT: S.ABORTED,
        E.EXPIRE: S.EXPIRED,
        E.LOST: S.FAILED,
    },
    S.COMMITTED: {
        E.OFFER: _,
        E.ACCEPT: _,
        E.REFUSE: _,
        E.DATA: S.COMMITTED,
        E.COMMIT: _,
        E.ACK: S.DONE,
        E.NACK: S.FAILED,
        E.ABORT: S.ABORTED,
        E.EXPIRE: S.EXPIRED,
        E.LOST: S.FAILED,
    },
    **{end: dict.fromkeys(Event, _) for end in (S.DONE, S.REFUSED, S.FAILED, S.EXPIRED, S.ABORTED)},
}

Counters = Counter[str]
"""What a port counts: transfers `offered`, their ends by state, and `ignored`, `unknown`, `stale`, ... messages."""


class Session:
    """One side of one transfer. `SendSession` and `RecvSession` add what the side holds."""

    side: ClassVar[Side]

    def __init__(self, offer: Offer, num_blocks: int, *, lease_s: float, now: float, counters: Counters):
        self.offer = offer
        self.transfer: TransferId = offer.transfer
        self.num_blocks = num_blocks
        """Blocks of the transfer's context, those that D holds already included."""
        self.prefix_blocks = 0
        """The first so many blocks are at D already and are not sent."""
        self.state = State.OFFERED
        self.lease_s = lease_s
        self.renewed_at = now
        """Seconds; when the transfer last made progress."""
        self.changed_at = now
        """Seconds; when it came to its present state, of those that wait for the other side."""
        self._counters = counters

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    def happens(self, event: Event, by: Side) -> bool:
        """Apply the table. True: the event took effect; False: it was ignored and counted.

        Raises ProtocolError, with nothing changed, for what a correct peer never sends.
        """
        cell = TRANSITIONS[self.state].get(event) if by in CAUSED_BY[event] else None
        if cell is None:
            assert by is not self.side, f"{self} must not {event.value}"
            raise ProtocolError(
                f"transfer {self.transfer}: {event.value} from {by.value} worker in state {self.state.value}; "
                "the peer breaks the hand-over protocol, check that both run the same release"
            )
        if cell is Ignored.IGNORED:
            self._counters["ignored"] += 1
            return False
        self.state = cell
        if cell in ENDS:
            self._counters[cell.value] += 1
        return True

    def sent_indices(self) -> range:
        """Indices of the blocks that travel."""
        return range(self.prefix_blocks, self.num_blocks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.transfer} {self.state.value} blocks={self.num_blocks}>"


class SendSession(Session):
    """P's side: what is computed, what is shipped, and what may still be read (I4)."""

    side = Side.PREFILL

    def __init__(self, offer: Offer, num_blocks: int, *, lease_s: float, now: float, counters: Counters):
        super().__init__(offer, num_blocks, lease_s=lease_s, now=now, counters=counters)
        self.granted = False
        """The engine was given credit, so it may hold blocks: the transfer owes it one release."""
        self.queued: deque[tuple[int, int]] = deque()
        """`(index, block id)`: final, and waiting for the link's credit."""
        self.unsent: set[int] = set()
        """Indices that were handed to the transport and may still be read there."""
        self.shipped_blocks: dict[int, int] = {}
        """Block ids by index, of what was ever handed to the transport."""
        self.resend: set[int] = set()
        """Indices that may have gone with a link. Queued again once the transport reads none of them."""
        self.num_relinks = 0
        self.checksums: dict[int, int] = {}
        self.refs: dict[int, int] = {}
        """Of a transport that pulls: by what D fetches each unsent block."""
        self.first_token: int | None = None
        self.said_at = now
        """Seconds; when D last heard of this transfer."""
        self.committed_at = now
        """Seconds; meaningful from COMMITTED on."""
        self.link_dropped = False
        """The link was torn down for this transfer: its `Sent`s come, there is nothing left to wait for."""

    def accept(self, prefix_blocks: int, now: float) -> bool:
        """D has reserved blocks. Raises ProtocolError if it claims more blocks than there are."""
        if prefix_blocks > self.num_blocks:
            raise ProtocolError(
                f"transfer {self.transfer}: decode claims {prefix_blocks} prefix blocks of {self.num_blocks}"
            )
        if not self.happens(Event.ACCEPT, Side.DECODE):
            return False
        self.prefix_blocks = prefix_blocks
        self.granted = True
        self.renewed_at = self.said_at = self.changed_at = now
        return True

    def add(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks `(index, block id)` are final in memory."""
        assert self.state is State.OPEN, self
        if self.prefix_blocks:
            blocks = [pair for pair in blocks if pair[0] >= self.prefix_blocks]
        self.queued.extend(blocks)

    def take(self, limit: int, now: float) -> tuple[tuple[int, int], ...]:
        """Up to `limit` queued blocks, to be shipped now."""
        queued = self.queued
        if len(queued) <= limit:
            blocks = tuple(queued)
            queued.clear()
        else:
            blocks = tuple([queued.popleft() for _ in range(limit)])
        if blocks:
            if not self.unsent:
                self.renewed_at = now  # the lease starts to run
            self.happens(Event.DATA, Side.PREFILL)
            self.unsent.update(dict(blocks))
            self.shipped_blocks.update(blocks)
        return blocks

    def relink(self, pulls: bool) -> bool:
        """The link is torn down and made anew: ship again what D may lack. False: that has been done often enough.

        `pulls`: the transport's `Sent` says that D has the block; else it says only that the block has left.
        """
        if self.num_relinks == MAX_RELINKS:
            return False
        if self.shipped_blocks:
            self.num_relinks += 1
            self.resend |= self.unsent if pulls else self.shipped_blocks.keys()
        return True

    def requeue(self) -> None:
        """Queue what went with the link, unless the transport still reads some of it or the transfer has ended."""
        if not self.unsent and not self.ended:
            again = self.resend - {index for index, _ in self.queued}  # from an earlier loss, for want of credit
            self.queued.extendleft((index, self.shipped_blocks[index]) for index in sorted(again, reverse=True))
            self.resend.clear()
            self.link_dropped = False

    def shipped(self, indices: tuple[int, ...], refs: tuple[int, ...], now: float) -> None:
        """`refs`, of a transport that pulls, are in the order of `indices`; else empty."""
        self.refs.update(zip(indices, refs, strict=False))
        self.said_at = now

    def hashed(self, checksums: dict[int, int]) -> None:
        """By index, of blocks that were shipped."""
        self.checksums.update(checksums)

    def unfetched(self) -> dict[int, int]:
        """Refs, by index, that D has not used yet as far as P knows; empty of a transport that pushes."""
        return {index: ref for index, ref in self.refs.items() if index in self.unsent}

    def sent(self, indices: Iterable[int], now: float) -> int:
        """The transport reads these no more. Returns how many it had not told before."""
        before = len(self.unsent)
        indices = tuple(indices)
        self.unsent.difference_update(indices)
        if self.refs:
            for index in indices:
                self.refs.pop(index, None)
        if len(self.unsent) != before:
            self.renewed_at = now
        return before - len(self.unsent)

    def commit(self, checksummed: bool, now: float) -> Commit | None:
        """The Commit, once the first token is known and every block has been shipped; then never again."""
        if self.state is not State.OPEN or self.first_token is None or len(self.checksums) < len(self.sent_indices()):
            return None
        self.happens(Event.COMMIT, Side.PREFILL)
        self.renewed_at = self.said_at = self.committed_at = self.changed_at = now
        return self.commit_message(checksummed)

    def commit_message(self, checksummed: bool) -> Commit:
        assert self.first_token is not None
        checksums = tuple([self.checksums.get(i, 0) for i in self.sent_indices()])
        return Commit(self.transfer, self.first_token, checksums, checksummed)

    @property
    def releasable(self) -> bool:
        """Ended, and nothing reads its blocks: only now may they be reused (I4)."""
        return self.ended and not self.unsent

    @property
    def lease_at(self) -> float | None:
        """When the lease runs out; None while P waits for neither D nor the wire."""
        if self.link_dropped:
            return None
        if self.unsent:
            return self.renewed_at + self.lease_s
        return self.renewed_at + ANSWER_LEASES * self.lease_s if self.state is State.COMMITTED else None


class RecvSession(Session):
    """D's side: what is reserved, what has come, and what it must equal."""

    side = Side.DECODE

    def __init__(self, offer: Offer, num_blocks: int, *, lease_s: float, now: float, counters: Counters):
        super().__init__(offer, num_blocks, lease_s=lease_s, now=now, counters=counters)
        self.blocks: tuple[int, ...] = ()
        """Block ids by index, as far as the transfer writes them; empty while there is no credit."""
        self.format: WireFormat | None = None
        """Of its blocks on the wire; None: that of the pool."""
        self.landing: Landing | None = None
        """Of blocks in another format than the pool's: where they go. `blocks` has then nothing to do with indices."""
        self.announced: set[int] = set()
        """Indices the transport was told to write."""
        self.refs: dict[int, int] = {}
        """Of a transport that pulls: by what each announced block is fetched, as P said last."""
        self.lent: set[tuple[int, int]] = set()
        """Of a transport that pulls: every `(index, ref)` that P has named."""
        self.lost_at: float | None = None
        """When P counts as lost, unless it is heard of before; None: no link was lost."""
        self.loss = ""
        """How the link was lost."""
        self.received: dict[int, int] = {}
        """Checksum of what is now in the pool, by index."""
        self.committed: Commit | None = None

    def accept(self, blocks: Iterable[int], prefix_blocks: int, now: float, *, landing: Landing | None = None) -> None:
        """Local block ids, at least those of the context, are reserved."""
        self.happens(Event.ACCEPT, Side.DECODE)
        self.landing = landing
        self.blocks = tuple(blocks)[: self.num_blocks] if landing is None else landing.blocks
        assert landing is not None or len(self.blocks) == self.num_blocks, self
        self.prefix_blocks = prefix_blocks
        self.changed_at = now
        self.renewed_at = now

    def renew(self, now: float) -> None:
        """Blocks came, or P says that it is still computing."""
        self.renewed_at = now
        self.lost_at = None

    def lose_link(self, reason: str, now: float) -> None:
        """The link is gone; P may make a new one. An offer cannot be asked about: it is repeated within a lease."""
        wait_s = self.lease_s if self.state is State.OFFERED else RELINK_S
        self.lost_at, self.loss = now + wait_s, reason

    def announce(self, indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """`(index, block id)` of these blocks, which the transport may write from now on; LANDS where they land."""
        indices = tuple(indices)
        self.announced.update(indices)
        if self.landing is not None:
            return tuple([(index, LANDS) for index in indices])
        blocks = self.blocks
        return tuple([(index, blocks[index]) for index in indices])

    def is_lent_anew(self, index: int, ref: int) -> bool:
        """Whether the block is to be fetched by this ref, now or again; a repetition of an earlier word is not."""
        return (index, ref) not in self.lent if index in self.received else self.refs.get(index) != ref

    def lend(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Announce these `(index, ref)`. What is fetched again is not here until then: its block may be torn."""
        pairs = tuple(pairs)
        self.refs.update(pairs)
        self.lent.update(pairs)
        for index, _ in pairs:
            self.received.pop(index, None)
        return self.announce(index for index, _ in pairs)

    def receive(self, checksums: dict[int, int], now: float) -> None:
        """Blocks are in the pool. What was not announced or is here already counts as ignored."""
        new = checksums
        if not (checksums.keys() <= self.announced and checksums.keys().isdisjoint(self.received)):
            new = {i: c for i, c in checksums.items() if i in self.announced and i not in self.received}
            self._counters["ignored"] += len(checksums) - len(new)
        if new:
            self.received.update(new)
            self.renew(now)

    def commit(self, message: Commit, now: float) -> bool:
        if not self.happens(Event.COMMIT, Side.PREFILL):
            return False
        self.committed = message
        self.changed_at = now
        self.renew(now)
        return True

    def verdict(self, verify: bool) -> str | None:
        """None: something is missing. Empty: all is here and right. Else: why the KV must not be used."""
        commit = self.committed
        if commit is None:
            return None
        indices = self.sent_indices()
        if len(commit.checksums) != len(indices):
            return f"Commit names {len(commit.checksums)} blocks, {len(indices)} were to be sent"
        if len(self.received) < len(indices):
            return None
        if verify and commit.checksummed:
            wrong = [i for i, checksum in zip(indices, commit.checksums, strict=True) if self.received[i] != checksum]
            if wrong:
                return f"checksum of block {wrong[0]} differs ({len(wrong)} of {len(indices)} blocks do)"
        return ""

    @property
    def lease_at(self) -> float | None:
        """When D gives P up: its lease runs out, or P was not heard of since the link was lost."""
        lease = self.renewed_at + self.lease_s if self.state in (State.OPEN, State.COMMITTED) else None
        return min((at for at in (lease, self.lost_at) if at is not None), default=None)
