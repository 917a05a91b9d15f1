"""The decode side of hand-overs: admission, verification, adoption.

Pure: events and `now` in, actions out (`baton.ports`). Knows whose blocks are reserved here and what must
come before a request may decode; must not know sockets, memory or how a step is computed.

    Offer ─► waits, first come first served ─► engine.reserve ─► ReceiveBlocks, Accept (what is here need not come)
        └──► Refuse: it can never fit, or it is of a former life
    blocks, Commit ─► verified: engine.adopt, Ack
                 └──► wrong, or missing for a lease: engine.recompute, Nack

From the Commit on D has all it needs (the request from the Offer, the first token), so no fault of the KV's
way ends the attempt: D computes the prompt itself. Before it, an expired lease or a lost peer does.

No block is reused while anything can still write it (I5). `engine.release` runs inside the call that ends
the transfer, before the driver executes the `CancelTransfer` which that call returns. In between the engine
may hand the block out and write it. That is safe because the transport writes only within its
`completions()`, which runs on the I/O thread, and so do all calls here that can end a transfer, and their
actions: the transport is cancelled before it can write again. `on_blocks_free` may be called on any thread,
as it ends nothing; but its actions go the same way as all others, in the order of the calls.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, Protocol

from baton.audit import Holding
from baton.engine.request import EngineRequest
from baton.errors import LayoutError, ProtocolError, RequestError
from baton.layout import KVLayout
from baton.ledger import HoldReason
from baton.ports import Action, CancelTransfer, ReceiveBlocks, ToPeer, ToRouter
from baton.protocol import PROTOCOL_VERSION, AttemptFailed, RequestKey, TransferId
from decode_worker.waiting import WaitingOffers
from kv_transfer.deadlines import Deadlines
from kv_transfer.messages import (
    AbortTransfer,
    Accept,
    Ack,
    Commit,
    Data,
    Hello,
    HelloRefused,
    Nack,
    Offer,
    Refuse,
    ToPrefill,
    Welcome,
)
from kv_transfer.session import MAX_RELINKS, Counters, Event, RecvSession, Side, State
from kv_transfer.wire_format import MAX_WIRE_BLOCK_BYTES, Landing, WireFormat

MAX_PEERS = 1024
"""Lives of prefill workers that are remembered. More are refused while all of these have open transfers."""
SOME_OFFERS = 64
"""So many may wait, whatever is in them."""
MAX_OFFERS, MAX_OFFERED_TOKENS = 1 << 14, 1 << 24
"""Of one prefill worker: offers that may wait for blocks here, and tokens in them. More are refused."""
MAX_ANSWERS = 4096
"""Ended transfers whose answer is remembered, for questions that come late or again."""


class ReceiveEngine(Protocol):
    """What the receive port needs of `baton.engine.core.EngineCore`."""

    def reserve(self, request: EngineRequest, num_tokens: int, now: float) -> list[int] | None:
        """Hold blocks for `num_tokens` tokens of this request; None: they are not free now.

        Sets `request.num_prefix_blocks`: so many blocks of its context are here already, and are not sent.
        """
        ...

    def is_coming(self, request: EngineRequest) -> bool:
        """Whether all KV that the request needs is just being received for another one: it had better wait."""
        ...

    def can_ever_hold(self, num_tokens: int) -> bool: ...

    def adopt(self, key: RequestKey, first_token: int, now: float) -> None:
        """The KV of all context tokens is in the reserved blocks: decode."""
        ...

    def recompute(self, key: RequestKey, first_token: int, now: float) -> None:
        """Compute here what was to be sent, into the reserved blocks, then decode."""
        ...

    def release(self, key: RequestKey, now: float) -> None:
        """Free the reserved blocks; unknown keys are a no-op."""
        ...


class ReceivePort:
    """See the module. `baton.ports.ReceivePort` says when each method is called."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        fingerprint: str,
        layout: KVLayout,
        engine: ReceiveEngine,
        lease_s: float,
        expected_growth: int,
        verify: bool = True,
        pulls: bool = False,
        reach: str = "",
        fixed_blocks: bool = False,
    ):
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._layout = layout
        self._engine = engine
        self._lease_s = lease_s
        self._expected_growth = expected_growth
        self._verify = verify
        self._reach = reach
        """Where blocks can come from: `KVTransport.reach`."""
        self._fixed_blocks = fixed_blocks
        """The transport carries blocks of this pool's format only."""
        self._format = WireFormat(layout)
        self._formats: dict[str, WireFormat] = {}
        """What the blocks of each welcomed incarnation are on the wire."""
        self._pulls = pulls
        """The transport fetches what a `Data` names; else blocks are announced with the Accept."""
        self._greeted: OrderedDict[str, str] = OrderedDict()
        """worker_id by incarnation of the prefill workers that were welcomed, those heard of last at the end."""
        self._lives: dict[str, str] = {}
        """worker_id -> the incarnation that introduced itself last."""
        self._sessions: dict[TransferId, RecvSession] = {}
        """Transfers that have not ended."""
        self._by_key: dict[RequestKey, RecvSession] = {}
        self._waiting = WaitingOffers()
        """Offers without blocks, first come first served within a priority: nobody overtakes the first that waits for
        room, so it cannot starve. Those that wait for another transfer's blocks are no obstacle."""
        self._answers: OrderedDict[TransferId, ToPrefill] = OrderedDict()
        self._deadlines: Deadlines[TransferId] = Deadlines()
        self.counters: Counters = Counter()

    # --- the prefill worker ---------------------------------------------------------------------

    def on_message(self, peer: str, message: Any, now: float) -> list[Action]:
        """Raises ProtocolError, with nothing changed, for what a correct peer never sends."""
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        transfer: TransferId = message.transfer
        if transfer.source != peer:
            raise ProtocolError(f"worker {peer} speaks about transfer {transfer}, which is {transfer.source}'s")
        if transfer.target != self._incarnation:
            self.counters["stale"] += 1
            if not isinstance(message, Offer):
                return []
            reason = f"offer is for incarnation {transfer.target}, {self._worker_id} is now {self._incarnation}"
            return [ToPeer(peer, Refuse(transfer, reason))]
        if isinstance(message, Offer):
            return self._on_offer(peer, message, now)
        session = self._sessions.get(transfer)
        if session is None:
            return self._on_late(message)
        match message:
            case Data():
                return self._on_data(session, message, now)
            case Commit():
                is_new = session.commit(message, now)
                self._heard_of(session)
                return self._settle(session, now) if is_new else []
            case AbortTransfer():
                session.happens(Event.ABORT, Side.PREFILL)
                return self._close(session, AbortTransfer(transfer, "ended by the prefill worker"), now, tell=False)
        raise ProtocolError(f"{type(message).__name__} is not for a decode worker")

    def _on_hello(self, peer: str, hello: Hello, now: float) -> list[Action]:
        if hello.incarnation != peer:
            raise ProtocolError(f"worker {peer} introduces itself as incarnation {hello.incarnation}")
        reason = self._unfit(hello)
        if reason is not None:
            self.counters["hello_refused"] += 1
            return [ToPeer(peer, HelloRefused(self._worker_id, reason))]
        actions: list[Action] = []
        if peer not in self._greeted:
            # A new life: the other one is over. Should this Hello be a late one of the dead life instead (names do
            # not tell which is older), that costs the living one its open transfers, but it is not shut out.
            former = self._lives.get(hello.worker_id)
            if former is not None:
                actions = self._peer_lost(former, f"{hello.worker_id} was restarted as {peer}", now)
            if not self._make_room():
                self.counters["hello_refused"] += 1
                reason = f"{self._worker_id} has open transfers of {MAX_PEERS} prefill workers already"
                return [*actions, ToPeer(peer, HelloRefused(self._worker_id, reason))]
            self._lives[hello.worker_id] = peer
            self._greeted[peer] = hello.worker_id
        self._greeted.move_to_end(peer)
        self._formats[peer] = WireFormat(hello.layout, hello.encoding)
        return [*actions, ToPeer(peer, Welcome(self._worker_id, self._incarnation))]

    def _make_room(self) -> bool:
        """Whether one more life can be remembered; for it the one that was heard of longest ago is forgotten.

        One with open transfers is not.
        """
        if len(self._greeted) < MAX_PEERS:
            return True
        busy = {transfer.source for transfer in self._sessions}
        oldest = next((peer for peer in self._greeted if peer not in busy), None)
        if oldest is None:
            return False
        worker_id = self._greeted.pop(oldest)
        self._formats.pop(oldest, None)
        if self._lives.get(worker_id) == oldest:
            del self._lives[worker_id]
        return True

    def _unfit(self, hello: Hello) -> str | None:
        """Why KV blocks of that worker cannot be used here, naming both values."""
        pairs = (
            ("protocol version", hello.version, PROTOCOL_VERSION),
            ("model fingerprint", hello.fingerprint, self._fingerprint),
            ("reach of the KV transport", hello.reach, self._reach),
        )
        for what, theirs, ours in pairs:
            if theirs != ours:
                return f"{what} differs: {hello.worker_id} has {theirs}, {self._worker_id} has {ours}"
        try:
            self._layout.require_compatible(hello.layout, ours=self._worker_id, theirs=hello.worker_id)
        except LayoutError as e:
            return str(e)
        return self._not_carried(WireFormat(hello.layout, hello.encoding), hello.worker_id)

    def _not_carried(self, theirs: WireFormat, worker_id: str) -> str | None:
        """Why the transport cannot carry blocks of this format, if they are not like those here."""
        ours = self._format
        if not self._fixed_blocks and theirs.block_bytes > MAX_WIRE_BLOCK_BYTES:
            return (
                f"KV blocks are too large to be sent: {worker_id} has blocks of {theirs.layout.block_size} tokens in "
                f"{theirs.block_bytes} bytes, {self._worker_id} takes at most {MAX_WIRE_BLOCK_BYTES} bytes; lower "
                "engine.block_size"
            )
        if not self._fixed_blocks or theirs == ours:
            return None
        if theirs.layout != ours.layout:
            what, there, here = "block_size", str(theirs.layout.block_size), str(ours.layout.block_size)
        else:
            what, there, here = "encoding", theirs.encoding, ours.encoding
        return (
            f"{what} of KV blocks differs: {worker_id} has {there}, {self._worker_id} has {here}, and this transport "
            f"({self._reach}) moves blocks as they are; set transfer.transport: zmq+tcp"
        )

    def _on_offer(self, peer: str, offer: Offer, now: float) -> list[Action]:
        transfer = offer.transfer
        session = self._sessions.get(transfer)
        if session is not None:
            session.happens(Event.OFFER, Side.PREFILL)  # again; answer again, the Accept may be lost
            self._heard_of(session)
            return [] if session.state is State.OFFERED else [ToPeer(peer, Accept(transfer, session.prefix_blocks))]
        if transfer in self._answers:
            self.counters["ignored"] += 1
            return [ToPeer(peer, self._answers[transfer])]
        if peer not in self._greeted:
            raise ProtocolError(f"worker {peer} makes an offer before its Hello")
        self._greeted.move_to_end(peer)
        num_context = len(offer.prompt) + len(offer.prior)
        wire = self._formats[peer]
        num_blocks = wire.layout.num_blocks_for(num_context)
        session = RecvSession(offer, num_blocks, lease_s=self._lease_s, now=now, counters=self.counters)
        session.format = wire
        self.counters["offered"] += 1
        reason = self._inadmissible(offer) or self._overload(offer)
        if reason is not None:
            session.happens(Event.REFUSE, Side.DECODE)
            return [self._remember(transfer, Refuse(transfer, reason))]
        request = EngineRequest(
            transfer.key,
            offer.prompt,
            offer.sampling,
            prior=offer.prior,
            deadline=None if offer.timeout_s is None else now + offer.timeout_s,
            priority=offer.priority,
        )
        self._sessions[transfer] = self._by_key[transfer.key] = session
        self._waiting.add(session, request)
        return self._admit(now)

    def _inadmissible(self, offer: Offer) -> str | None:
        """Why this offer can never be accepted."""
        if not offer.prompt:
            return "the prompt is empty"
        if offer.transfer.key in self._by_key:
            return f"attempt {offer.transfer.key} is being handed over already"
        num_tokens = len(offer.prompt) + max(offer.sampling.max_tokens - 1, len(offer.prior))
        if not self._engine.can_ever_hold(num_tokens):  # the last token is never computed: it needs no KV
            return f"{num_tokens} tokens can never fit the KV pool of {self._worker_id}"
        return None

    def _overload(self, offer: Offer) -> str | None:
        """Why this offer cannot even wait: its worker has too many waiting here."""
        if len(self._waiting) < SOME_OFFERS:
            return None
        peer = offer.transfer.source
        num_offers, num_tokens = self._waiting.load_of(peer)
        if num_offers < MAX_OFFERS and num_tokens + len(offer.prompt) + len(offer.prior) <= MAX_OFFERED_TOKENS:
            return None
        return f"{num_offers} offers of {peer} with {num_tokens} tokens wait at {self._worker_id} already"

    def _on_data(self, session: RecvSession, message: Data, now: float) -> list[Action]:
        indices = set(message.indices)
        if not indices <= set(session.sent_indices()) or not len(indices) == len(message.indices) == len(message.refs):
            raise ProtocolError(
                f"transfer {session.transfer}: Data names blocks outside of the transfer, or not one ref for each"
            )
        # Again with another ref: the link was lost, and what was lent over it is void. What is here already is fetched
        # again too: P does not know, and would wait for it with the link's credit.
        pairs = zip(message.indices, message.refs, strict=True)
        new = [pair for pair in pairs if session.is_lent_anew(*pair)]
        limit = session.num_blocks * (MAX_RELINKS + 1)
        if len(session.lent) + len(new) > limit and len(session.lent.union(new)) > limit:
            raise ProtocolError(f"transfer {session.transfer}: Data lends blocks anew more often than links are made")
        session.happens(Event.DATA, Side.PREFILL)
        if session.state is State.OPEN:
            session.renew(now)
        self._heard_of(session)
        if not indices:  # P is still at it
            return []
        if not new or not self._pulls:
            self.counters["ignored"] += 1
            return []
        blocks = session.lend(new)
        refs = tuple(ref for _, ref in new)
        return [ReceiveBlocks(session.transfer.source, session.transfer, refs, blocks, session.landing)]

    def _on_late(self, message: Data | Commit | AbortTransfer) -> list[Action]:
        """For a transfer that has ended here, or that was never heard of."""
        transfer = message.transfer
        answer = self._answers.get(transfer)
        self.counters["unknown" if answer is None else "ignored"] += 1
        if isinstance(message, AbortTransfer):
            if answer is None:  # it overtook its Offer, which must not be accepted when it comes
                self._remember(transfer, AbortTransfer(transfer, "ended by the prefill worker"))
            return []
        return [ToPeer(transfer.source, answer or AbortTransfer(transfer, "unknown to the decode worker"))]

    # --- the transport, the engine, the router --------------------------------------------------

    def on_received(self, transfer: TransferId, checksums: dict[int, int], now: float) -> list[Action]:
        session = self._sessions.get(transfer)
        if session is None or session.state is State.OFFERED:
            self.counters["unknown"] += 1
            return []
        session.receive(checksums, now)
        return self._settle(session, now)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def on_blocks_free(self, now: float) -> list[Action]:
        return self._admit(now) if self._waiting else []

    def on_abort(self, key: RequestKey, now: float) -> list[Action]:
        session = self._by_key.get(key)
        if session is None:
            return []
        session.happens(Event.ABORT, Side.DECODE)
        return self._close(session, AbortTransfer(session.transfer, "aborted by the router"), now)

    def on_link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The link from P was lost. If P lives, it makes a new one, and answers within `RELINK_S`."""
        actions: list[Action] = []
        for session in self._sessions.values():
            if session.transfer.source == peer:
                session.lose_link(reason, now)
                self._schedule(session)
                if session.state is not State.OFFERED:
                    actions.append(ToPeer(peer, Accept(session.transfer, session.prefix_blocks)))
        return actions

    # --- time -----------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for transfer in self._deadlines.due(now):
            session = self._sessions.get(transfer)
            if session is None or session.lease_at is None:
                continue
            missing = len(session.sent_indices()) - len(session.received)
            text = f"no progress for {self._lease_s:g} s with {missing} blocks missing"
            if session.lease_at > now:
                self._schedule(session)
            elif session.lost_at is not None:
                actions += self._lose(session, session.loss, now)
            elif session.state is State.COMMITTED:
                actions += self._recompute(session, text, now)
            else:
                session.happens(Event.EXPIRE, Side.DECODE)
                actions += self._fail(session, "transfer", text, now)
        return actions

    def holdings(self) -> list[Holding]:
        names = {incarnation: worker_id for worker_id, incarnation in self._lives.items()}
        return [self._holding(session, names) for session in self._sessions.values()]

    def num_open(self) -> int:
        """Transfers that hold blocks here."""
        return sum(bool(s.blocks) for s in self._sessions.values())

    def num_waiting(self) -> int:
        """Offers that wait for blocks."""
        return len(self._waiting)

    # --- inside ---------------------------------------------------------------------------------

    def _holding(self, session: RecvSession, names: dict[str, str]) -> Holding:
        if session.state is State.OFFERED:
            reason = HoldReason.AWAITING_BLOCKS
        elif session.state is State.COMMITTED:
            reason = HoldReason.COMMITTED
        else:
            reason = HoldReason.RECEIVING if session.received else HoldReason.RESERVED
        source = session.transfer.source
        peer, blocks = names.get(source, source), session.blocks
        since, lease_at = session.changed_at, session.lease_at
        return Holding(session.transfer.key, reason, since, lease_at, len(blocks), peer, source, blocks)

    def _admit(self, now: float) -> list[Action]:
        """Reserve for waiting offers as far as blocks are free. The receive is posted before the Accept is said."""
        actions: list[Action] = []
        for session, request in self._waiting:
            transfer = session.transfer
            if self._engine.is_coming(request):
                continue  # that transfer has its blocks, so it ends, and `_close` comes here again
            # Never more than `_inadmissible` found room for, or the head would wait for ever.
            growth = max(request.max_len - 1 - request.num_context, 0)
            try:
                blocks = self._engine.reserve(request, request.num_context + min(growth, self._expected_growth), now)
            except RequestError as e:
                session.happens(Event.REFUSE, Side.DECODE)
                actions.append(self._forget(session, Refuse(transfer, str(e))))
                continue
            if blocks is None:
                break
            self._waiting.discard(session)
            self._accept(session, request, blocks, now)
            if not self._pulls and session.sent_indices():
                pairs = session.announce(session.sent_indices())
                actions.append(ReceiveBlocks(transfer.source, transfer, (), pairs, session.landing))
            actions.append(ToPeer(transfer.source, Accept(transfer, session.prefix_blocks)))
            self._schedule(session)
        return actions

    def _accept(self, session: RecvSession, request: EngineRequest, blocks: list[int], now: float) -> None:
        wire = session.format
        if wire is None or wire == self._format:
            session.accept(blocks, request.num_prefix_blocks, now)
            return
        # What is here are whole blocks of this pool, or all. A wire block that goes on behind it is sent in full; what
        # that repeats is not written, as others may be reading it.
        num_context = request.num_context
        here = min(request.num_prefix_blocks * self._layout.block_size, num_context)
        prefix_blocks = session.num_blocks if here == num_context else here // wire.layout.block_size
        local = tuple(blocks[: self._layout.num_blocks_for(num_context)])
        session.accept(local, prefix_blocks, now, landing=Landing(wire, local, num_context, here))

    def _heard_of(self, session: RecvSession) -> None:
        """P lives. That alone is no progress: in COMMITTED it only repeats what it said."""
        session.lost_at = None
        self._schedule(session)

    def _peer_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """P is gone for good."""
        actions: list[Action] = []
        for session in [s for s in self._sessions.values() if s.transfer.source == peer]:
            if not session.ended:  # else the engine refused it when the end of another one before made room for it
                actions += self._lose(session, reason, now)
        return actions

    def _lose(self, session: RecvSession, reason: str, now: float) -> list[Action]:
        """P is lost. What is committed D finishes alone; the rest goes back to the router."""
        if session.state is State.COMMITTED:
            return self._recompute(session, f"the link was lost: {reason}", now)
        session.happens(Event.LOST, Side.DECODE)
        return self._fail(session, "peer_lost", f"the prefill worker or the link to it is lost: {reason}", now)

    def _settle(self, session: RecvSession, now: float) -> list[Action]:
        """Adopt, recompute, or wait for more."""
        verdict = session.verdict(self._verify)
        if verdict is None:
            self._schedule(session)
            return []
        if verdict:
            self.counters["corrupt"] += 1
            return self._recompute(session, verdict, now)
        assert session.committed is not None
        session.happens(Event.ACK, Side.DECODE)
        self._engine.adopt(session.transfer.key, session.committed.first_token, now)
        return self._close(session, Ack(session.transfer), now, release=False)

    def _recompute(self, session: RecvSession, reason: str, now: float) -> list[Action]:
        """The KV that came is not used: D computes it, into the blocks it has reserved."""
        assert session.committed is not None
        session.happens(Event.NACK, Side.DECODE)
        self._engine.recompute(session.transfer.key, session.committed.first_token, now)
        return self._close(session, Nack(session.transfer, reason, recomputing=True), now, release=False)

    def _fail(self, session: RecvSession, code: str, text: str, now: float) -> list[Action]:
        """The transfer has ended and took the attempt with it."""
        key = session.transfer.key
        failed = ToRouter(AttemptFailed(self._worker_id, key, code, text))
        return [*self._close(session, AbortTransfer(session.transfer, text), now), failed]

    def _close(
        self, session: RecvSession, answer: ToPrefill, now: float, *, tell: bool = True, release: bool = True
    ) -> list[Action]:
        """Forget an ended transfer, save for the answer it got; let the next one in."""
        transfer = session.transfer
        reply = self._forget(session, answer)
        actions: list[Action] = []
        # What was lent twice may have come by the earlier ref: the transport may still write it by the other.
        if len(session.received) < len(session.announced) or len(session.lent) > len(session.announced):
            actions.append(CancelTransfer(transfer))
        if release and session.blocks:
            self._engine.release(transfer.key, now)
        if tell:
            actions.append(reply)
        return actions + self._admit(now)

    def _forget(self, session: RecvSession, answer: ToPrefill) -> ToPeer:
        transfer = session.transfer
        del self._sessions[transfer], self._by_key[transfer.key]
        self._waiting.discard(session)
        self._deadlines.set(transfer, None)
        return self._remember(transfer, answer)

    def _remember(self, transfer: TransferId, answer: ToPrefill) -> ToPeer:
        self._answers[transfer] = answer
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        return ToPeer(transfer.source, answer)

    def _schedule(self, session: RecvSession) -> None:
        self._deadlines.set(session.transfer, session.lease_at)
