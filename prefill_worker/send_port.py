"""The prefill side of hand-overs: joins the engine, the router, and the sessions with decode workers.

Pure: events and `now` in, actions out (`baton.ports`). Knows which request is handed to whom and which
blocks the transport may still read; must not know sockets, memory or how a step is computed.

    router Submit ─► offer ─► (greeting the peer) ─► Offer ─► Accept: engine.grant
                                                        └───► Refuse: held until Replace or abort
    engine ChunkDone ─► ShipBlocks ─► on_shipped ─► HashBlocks ─► on_hashed;  on_sent
    engine PromptDone ─► Commit ─► Ack: HandoffDone;  Nack, abort, expiry, loss: see `_fail`

A link that was lost is made anew, and what D may lack is shipped again (`_relink`): P has every block until the Ack.
At once, as often as `MAX_RELINKS` lets a transfer; while no transfer needs it, after a wait that grows.

Release rule (I4): once granted, the blocks of a request are freed by exactly one `engine.release`, when its
transfer has ended *and* the transport reads none of them. A lease that runs out while blocks are unsent
first tears the link down; the transport then reports them sent.

The driver executes actions in the order in which all calls returned them, on the I/O thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from baton.audit import Holding
from baton.engine.request import ChunkDone, Effect, Ended, PromptDone
from baton.errors import ProtocolError
from baton.layout import KVLayout
from baton.ledger import HoldReason
from baton.ports import Action, CancelTransfer, ConnectPeer, DropLink, HashBlocks, ShipBlocks, ToPeer, ToRouter
from baton.protocol import (
    PROTOCOL_VERSION,
    AttemptFailed,
    HandoffDone,
    HandoffRefused,
    Replace,
    RequestKey,
    Submit,
    TransferId,
    WorkerInfo,
)
from baton.timeline import Mark
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
    Welcome,
)
from kv_transfer.session import Counters, Event, SendSession, Side, State
from kv_transfer.wire_format import Encoding, WireFormat

REPEATS_PER_LEASE = 4
"""A question without an answer is repeated, and D's lease renewed, so often within a lease."""
FIRST_RECONNECT_S, LAST_RECONNECT_S = 0.1, 5.0
"""How long a link that nobody needs now stays down; doubles with each loss until a hand-over went well."""


class SendEngine(Protocol):
    """What the send port needs of `baton.engine.core.EngineCore`."""

    def grant(self, key: RequestKey, now: float) -> None:
        """Credit came: the request may start its first chunk."""
        ...

    def keep(self, key: RequestKey, now: float) -> None:
        """No hand-over any more: run it all here."""
        ...

    def release(self, key: RequestKey, now: float) -> None:
        """Nothing reads the request's blocks any more; unknown keys are a no-op."""
        ...

    def lives_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """For `HashBlocks.lives`."""
        ...

    def abort(self, key: RequestKey, now: float) -> list[Effect]: ...


class _Peer:
    """A decode worker, and how far the introduction has come."""

    def __init__(self, worker: WorkerInfo):
        self.worker = worker
        self.welcome = False
        self.refusal: str | None = None
        self.greeting: list[SendSession] = []
        """Offers that wait for the Welcome."""
        self.backlog: deque[SendSession] = deque()
        """Transfers with blocks that wait for the link's credit, oldest first."""
        self.in_flight = 0
        """Blocks handed to the transport whose `Sent` has not come."""
        self.is_linked = True
        """The transport was asked for a data link, and not to drop it since."""
        self.num_losses = 0
        """Links that went while nobody needed them, since the last hand-over that went well."""


class _Reconnect(NamedTuple):
    """The deadline by which the link to a peer is made anew."""

    peer: str


class SendPort:
    """See the module. `baton.ports.SendPort` says when each method is called."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        fingerprint: str,
        layout: KVLayout,
        engine: SendEngine,
        lease_s: float,
        max_unacked_blocks: int,
        checksummed: bool = True,
        pulls: bool = False,
        reach: str = "",
        encoding: Encoding = "plain",
    ):
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._hello = Hello(PROTOCOL_VERSION, worker_id, incarnation, fingerprint, layout, reach, encoding)
        self._format = WireFormat(layout, encoding)
        self._layout = layout
        self._engine = engine
        self._lease_s = lease_s
        self._repeat_s = lease_s / REPEATS_PER_LEASE
        self._max_in_flight = max_unacked_blocks
        self._checksummed = checksummed
        self._pulls = pulls
        """The transport's `Sent` says that D has the block, not only that it has left."""
        self._peers: dict[str, _Peer] = {}
        self._incarnations: dict[str, str] = {}
        """worker_id -> incarnation of the life that is known now."""
        self._sessions: dict[TransferId, SendSession] = {}
        """Until the blocks are released, so longer than the transfer."""
        self._by_key: dict[RequestKey, SendSession] = {}
        """Transfers that have not ended."""
        self._held: dict[RequestKey, Submit] = {}
        """Hand-off requests without a transfer: refused, the router is to say where to."""
        self._submits: dict[RequestKey, Submit] = {}
        self._deadlines: Deadlines[TransferId | str | _Reconnect] = Deadlines()
        self.counters: Counters = Counter()

    # --- the router -----------------------------------------------------------------------------

    def offer(self, submit: Submit, now: float) -> list[Action]:
        """Offer the request to `submit.decode`; an unknown or unfit worker is a refusal at once."""
        assert submit.decode is not None, submit.key
        peer = self._peers.get(self._incarnations.get(submit.decode, ""))
        if peer is None:
            return self._hold(submit, f"prefill worker {self._worker_id} knows no decode worker {submit.decode}")
        if peer.refusal is not None:
            return self._hold(submit, peer.refusal)
        transfer = TransferId(*submit.key, self._incarnation, peer.worker.incarnation)
        offer = Offer(transfer, submit.prompt, submit.prior, submit.sampling, submit.timeout_s, submit.priority)
        num_blocks = self._layout.num_blocks_for(len(submit.prompt) + len(submit.prior))
        session = SendSession(offer, num_blocks, lease_s=self._lease_s, now=now, counters=self.counters)
        self._sessions[transfer] = self._by_key[submit.key] = session
        self._submits[submit.key] = submit
        self.counters["offered"] += 1
        if not peer.welcome:
            peer.greeting.append(session)
            return []
        return self._say(session, offer, now)

    def replace(self, message: Replace, now: float) -> list[Action]:
        """Offer a held request elsewhere, or keep it. Once the prompt may be under way it is too late: ignored."""
        submit, actions = self._held.pop(message.key, None), list[Action]()
        session = self._by_key.get(message.key)
        if session is not None and session.state is State.OFFERED:
            submit = self._submits[message.key]
            if message.decode == submit.decode:
                return []
            actions = self._abort(session, "the router chose another worker", now)
        if submit is None:
            self.counters["ignored"] += 1
            return actions
        if message.decode is None or message.decode == self._worker_id:
            self._engine.keep(message.key, now)
            return actions
        return actions + self.offer(msgspec.structs.replace(submit, decode=message.decode), now)

    def on_peers(self, workers: tuple[WorkerInfo, ...], now: float) -> list[Action]:
        present = {w.incarnation: w for w in workers if w.incarnation != self._incarnation}
        actions: list[Action] = []
        for incarnation in [known for known in self._peers if known not in present]:
            actions += self._peer_lost(incarnation, now)
        for incarnation, worker in present.items():
            if incarnation not in self._peers:
                self._peers[incarnation] = peer = _Peer(worker)
                # It may have been lost and be back: what was on its way then is not all reported yet.
                peer.in_flight = sum(len(s.unsent) for s in self._sessions.values() if s.transfer.target == incarnation)
                self._incarnations[worker.worker_id] = incarnation
                self._deadlines.set(incarnation, now + self._repeat_s)
                actions += [ConnectPeer(worker), ToPeer(incarnation, self._hello)]
        return actions

    # --- the decode worker ----------------------------------------------------------------------

    def on_message(self, peer: str, message: Any, now: float) -> list[Action]:
        """Raises ProtocolError, with nothing changed, for what a correct peer never sends."""
        if isinstance(message, Welcome | HelloRefused):
            return self._on_greeted(peer, message, now)
        transfer: TransferId = message.transfer
        if transfer.source != self._incarnation:
            self.counters["stale"] += 1
            return []
        if transfer.target != peer:
            raise ProtocolError(f"worker {peer} speaks about transfer {transfer}, which is {transfer.target}'s")
        session = self._sessions.get(transfer)
        if session is None:
            self.counters["unknown"] += 1
            # D reserved for a transfer that is over here: it need not wait for its lease.
            gone = AbortTransfer(transfer, "unknown to the prefill worker")
            return [ToPeer(peer, gone)] if isinstance(message, Accept) else []
        match message:
            case Accept():
                return self._on_accept(session, message, now)
            case Refuse(reason=reason):
                if not session.happens(Event.REFUSE, Side.DECODE):
                    return []
                submit = self._submits[transfer.key]
                self._close(session, now)
                return self._hold(submit, reason)
            case Ack():
                return self._on_taken(session, Event.ACK, now)
            case Nack(recomputing=True):
                return self._on_taken(session, Event.NACK, now)
            case Nack(reason=reason):
                if not session.happens(Event.NACK, Side.DECODE):
                    return []
                return self._fail(session, "transfer", f"decode does not use the KV cache: {reason}", now)
            case AbortTransfer(reason=reason):
                if not session.happens(Event.ABORT, Side.DECODE):
                    return []
                return self._fail(session, "transfer", f"decode ended the transfer: {reason}", now)
        raise ProtocolError(f"{type(message).__name__} is not for a prefill worker")

    def _on_greeted(self, incarnation: str, message: Welcome | HelloRefused, now: float) -> list[Action]:
        peer = self._peers.get(incarnation)
        if peer is None or peer.welcome or peer.refusal is not None:
            self.counters["ignored"] += 1
            return []
        self._deadlines.set(incarnation, None)
        waiting, peer.greeting = [s for s in peer.greeting if not s.ended], []
        if isinstance(message, Welcome) and message.incarnation == incarnation:
            peer.welcome = True
            return [action for session in waiting for action in self._say(session, session.offer, now)]
        if isinstance(message, HelloRefused):
            peer.refusal = f"decode worker {message.worker_id} refused the hand-shake: {message.reason}"
        else:
            peer.refusal = (
                f"at the address of decode worker {peer.worker.worker_id}, incarnation {incarnation}, "
                f"there is now incarnation {message.incarnation}"
            )
        actions: list[Action] = []
        for session in waiting:
            submit = self._submits[session.transfer.key]
            session.happens(Event.REFUSE, Side.DECODE)
            self._close(session, now)
            actions += self._hold(submit, peer.refusal)
        return actions

    def _on_accept(self, session: SendSession, message: Accept, now: float) -> list[Action]:
        if session.accept(message.prefix_blocks, now):
            self._engine.grant(session.transfer.key, now)
            self._schedule(session)
        elif session.ended:  # D does not know: its answers to the Offer and our abort crossed, or that was lost
            return [ToPeer(session.transfer.target, AbortTransfer(session.transfer, "ended on the prefill worker"))]
        else:  # again: the link was lost, and D asks whether P is still there
            return self._ask_again(session, now)
        return []

    def _on_taken(self, session: SendSession, event: Event, now: float) -> list[Action]:
        """D goes on alone, with the KV (Ack) or by computing it itself (Nack, recomputing)."""
        if not session.happens(event, Side.DECODE):
            return []
        moved = len(session.checksums)
        peer = self._peers.get(session.transfer.target)
        if event is Event.ACK and peer is not None:
            peer.num_losses = 0
        self._close(session, now)
        done = HandoffDone(
            self._worker_id,
            session.transfer.key,
            moved,
            moved * self._format.block_bytes,
            {int(Mark.COMMITTED): session.committed_at},
        )
        return [ToRouter(done)]

    # --- the engine -----------------------------------------------------------------------------

    def on_chunk(self, effect: ChunkDone, now: float) -> list[Action]:
        session = self._by_key.get(effect.request.key)
        if session is None or session.state is not State.OPEN:
            return []  # the transfer ended while the step ran
        session.add(effect.blocks)
        peer = self._peers[session.transfer.target]
        self._line_up(session, peer)
        return self._ship(peer, now)

    def on_prompt_done(self, effect: PromptDone, now: float) -> list[Action]:
        session = self._by_key.get(effect.request.key)
        if session is None:
            # Ended while the step ran that finished the prompt: nobody else would free the request.
            self.counters["unknown"] += 1
            self._engine.release(effect.request.key, now)
            return []
        session.first_token = effect.first_token
        return self._commit(session, now)

    def on_ended(self, effect: Ended, now: float) -> list[Action]:
        key = effect.request.key
        self._held.pop(key, None)
        session = self._by_key.get(key)
        if session is None:
            return []
        return self._abort(session, f"the request ended on the prefill worker: {effect.reason}", now)

    # --- the transport --------------------------------------------------------------------------

    def on_shipped(
        self, transfer: TransferId, indices: tuple[int, ...], refs: tuple[int, ...], now: float
    ) -> list[Action]:
        """`refs` are in the order of `indices`. Only now are the blocks hashed: they are on their way meanwhile."""
        session = self._sessions.get(transfer)
        if session is None or session.ended:
            return []
        session.shipped(indices, refs, now)
        actions: list[Action] = []
        if refs:
            actions.append(ToPeer(transfer.target, Data(transfer, indices, refs)))
        blocks, known = session.shipped_blocks, session.checksums
        new = tuple([(i, blocks[i]) for i in indices if i not in known])
        if new:
            actions.append(HashBlocks(transfer, new, self._engine.lives_of([block for _, block in new])))
        return actions

    def on_hashed(self, transfer: TransferId, checksums: dict[int, int], now: float) -> list[Action]:
        session = self._sessions.get(transfer)
        if session is None or session.ended:
            return []
        session.hashed(checksums)
        return self._commit(session, now)

    def on_sent(self, transfer: TransferId, indices: tuple[int, ...], now: float) -> list[Action]:
        session = self._sessions.get(transfer)
        if session is None:
            self.counters["unknown"] += 1
            return []
        num_sent = session.sent(indices, now)
        self._release_if_possible(session, now)
        peer = self._peers.get(transfer.target)
        if peer is None:
            return []
        peer.in_flight -= num_sent
        self._line_up(session, peer)
        return self._ship(peer, now)

    def on_link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        if peer not in self._peers:
            return []
        self.counters["links_cut"] += 1
        return self._relink(peer, f"the link to decode was lost: {reason}", now)

    def on_control_restored(self, peer: str, now: float) -> list[Action]:
        known = self._peers.get(peer)
        if known is None:
            return []
        actions: list[Action] = []
        if not known.welcome and known.refusal is None:
            actions.append(ToPeer(peer, self._hello))
        elif known.welcome:
            for session in self._open_with(peer):
                actions += self._ask_again(session, now)
        return actions

    # --- time -----------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in self._deadlines.due(now):
            if isinstance(key, str):
                actions.append(ToPeer(key, self._hello))
                self._deadlines.set(key, now + self._repeat_s)
            elif isinstance(key, _Reconnect):
                actions += self._link(self._peers[key.peer])
            elif (session := self._sessions.get(key)) is not None:
                lease_at = session.lease_at
                if lease_at is not None and lease_at <= now:
                    actions += self._expire(session, now)
                elif not session.ended and session.said_at + self._repeat_s <= now:
                    actions += self._ask_again(session, now)
                else:
                    self._schedule(session)
        return actions

    def holdings(self) -> list[Holding]:
        return [self._holding(session) for session in self._sessions.values()]

    def num_open(self) -> int:
        """Transfers that may still hold blocks here."""
        return sum(s.granted for s in self._sessions.values())

    # --- inside ---------------------------------------------------------------------------------

    def _holding(self, session: SendSession) -> Holding:
        incarnation = session.transfer.target
        peer = self._peers.get(incarnation)
        if session.ended:
            reason = HoldReason.IN_TRANSPORT
        elif session.state is State.OFFERED:
            reason = HoldReason.AWAITING_CREDIT
        else:
            reads = session.unsent or session.queued or session.state is State.OPEN
            reason = HoldReason.SHIPPING if reads else HoldReason.AWAITING_ACK
        return Holding(
            session.transfer.key,
            reason,
            session.changed_at,
            session.lease_at,
            max(session.shipped_blocks, default=-1) + 1,
            incarnation if peer is None else peer.worker.worker_id,
            incarnation,
        )

    def _ask_again(self, session: SendSession, now: float) -> list[Action]:
        """Say what the present state says to D, which is safe to be said again: in OPEN, that P is still at it."""
        return [action for question in self._questions(session) for action in self._say(session, question, now)]

    def _questions(self, session: SendSession) -> list[Offer | Data | Commit]:
        if session.state is State.OFFERED:
            return [session.offer]
        # A Data without refs renews D's lease. If the transport pulls, the one that had them may have been lost.
        unfetched = session.unfetched()
        messages: list[Offer | Data | Commit] = []
        if session.state is State.OPEN or unfetched:
            messages.append(Data(session.transfer, tuple(unfetched), tuple(unfetched.values())))
        if session.state is not State.OPEN:
            messages.append(session.commit_message(self._checksummed))
        return messages

    def _say(self, session: SendSession, message: Any, now: float) -> list[Action]:
        session.said_at = now
        self._schedule(session)
        return [ToPeer(session.transfer.target, message)]

    def _schedule(self, session: SendSession) -> None:
        times = [] if session.lease_at is None else [session.lease_at]
        if not session.ended:
            times.append(session.said_at + self._repeat_s)
        self._deadlines.set(session.transfer, min(times, default=None))

    def _line_up(self, session: SendSession, peer: _Peer) -> None:
        """What may have gone with a link goes first, and alone: an index is on its way once at most."""
        if session.resend:
            session.requeue()
        if session.queued and not session.resend and session not in peer.backlog:
            peer.backlog.append(session)

    def _ship(self, peer: _Peer, now: float) -> list[Action]:
        """Ship what waits, oldest transfer first, as far as the link's credit goes."""
        actions: list[Action] = []
        while peer.backlog and peer.in_flight < self._max_in_flight:
            session = peer.backlog[0]
            blocks = session.take(self._max_in_flight - peer.in_flight, now)
            if blocks:
                peer.in_flight += len(blocks)
                actions += self._link(peer)
                actions.append(ShipBlocks(session.transfer.target, session.transfer, blocks))
                self._schedule(session)
            if not session.queued:
                peer.backlog.popleft()
        return actions

    def _commit(self, session: SendSession, now: float) -> list[Action]:
        commit = session.commit(self._checksummed, now)
        return self._say(session, commit, now) if commit is not None else []

    def _hold(self, submit: Submit, reason: str) -> list[Action]:
        assert submit.decode is not None
        self._held[submit.key] = submit
        return [ToRouter(HandoffRefused(self._worker_id, submit.key, submit.decode, reason))]

    def _abort(self, session: SendSession, reason: str, now: float) -> list[Action]:
        session.happens(Event.ABORT, Side.PREFILL)
        return [self._tell_abort(session, reason), *self._close(session, now)]

    def _tell_abort(self, session: SendSession, reason: str) -> Action:
        return ToPeer(session.transfer.target, AbortTransfer(session.transfer, reason))

    def _fail(self, session: SendSession, code: str, text: str, now: float) -> list[Action]:
        """The transfer has ended and took the attempt with it."""
        key = session.transfer.key
        actions = self._close(session, now, end_request=True)
        return [*actions, ToRouter(AttemptFailed(self._worker_id, key, code, text))]

    def _expire(self, session: SendSession, now: float) -> list[Action]:
        actions: list[Action] = []
        if not session.ended:
            session.happens(Event.EXPIRE, Side.PREFILL)
            actions.append(self._tell_abort(session, "the prefill worker's lease ran out"))
            what = f"{len(session.unsent)} blocks unsent" if session.unsent else "no answer to the Commit"
            text = f"no progress for {self._lease_s:g} s: {what}"
            actions += self._fail(session, "transfer", text, now)
        if session.unsent:
            problem = "the link was torn down because another transfer made no progress on it"
            actions += self._relink(session.transfer.target, problem, now)
        return actions

    def _relink(self, peer: str, problem: str, now: float) -> list[Action]:
        """Tear the link down, make it anew when it is needed, and ship again what may have gone with it.

        D is told that each transfer goes on; it waits for that word.
        """
        actions = self._drop_link(peer)
        known = self._peers.get(peer)
        if known is not None:
            actions += self._link_in_time(known, now)
        for session in self._open_with(peer):
            if not session.relink(self._pulls):
                session.happens(Event.LOST, Side.PREFILL)
                actions.append(self._tell_abort(session, problem))
                actions += self._fail(session, "transfer", problem, now)
                continue
            if known is None or not known.welcome:
                continue
            actions += self._ask_again(session, now)
            if session.resend and session in known.backlog:
                known.backlog.remove(session)
            self._line_up(session, known)
        return actions + (self._ship(known, now) if known is not None else [])

    def _drop_link(self, peer: str) -> list[Action]:
        """Nothing but `Sent` comes of what is unsent on the link now.

        For a peer that is lost, too: the transport may still read blocks that were meant for it.
        """
        for session in self._sessions.values():
            if session.transfer.target == peer and session.unsent:
                session.link_dropped = True
                session.refs.clear()  # void, with the link
                self._schedule(session)
        known = self._peers.get(peer)
        if known is None:
            return [DropLink(peer, forget=True)]
        known.is_linked = False
        return [DropLink(peer)]

    def _link_in_time(self, peer: _Peer, now: float) -> list[Action]:
        """Now if a transfer has blocks on the way, which may be done so often only; else a peer could make us spin."""
        incarnation = peer.worker.incarnation
        if any(session.shipped_blocks for session in self._open_with(incarnation)):
            return self._link(peer)
        wait_s = min(FIRST_RECONNECT_S * 2.0 ** min(peer.num_losses, 10), LAST_RECONNECT_S)
        peer.num_losses += 1
        self._deadlines.set(_Reconnect(incarnation), now + wait_s)
        return []

    def _link(self, peer: _Peer) -> list[Action]:
        """Make the link unless there is one."""
        if peer.is_linked:
            return []
        peer.is_linked = True
        self._deadlines.set(_Reconnect(peer.worker.incarnation), None)
        return [ConnectPeer(peer.worker)]

    def _peer_lost(self, incarnation: str, now: float) -> list[Action]:
        worker_id = self._peers.pop(incarnation).worker.worker_id
        actions = self._drop_link(incarnation)
        for session in self._open_with(incarnation):
            session.happens(Event.LOST, Side.PREFILL)
            actions += self._fail(session, "peer_lost", f"decode worker {worker_id} is lost", now)
        self._deadlines.set(incarnation, None)
        self._deadlines.set(_Reconnect(incarnation), None)
        if self._incarnations.get(worker_id) == incarnation:
            del self._incarnations[worker_id]
        return actions

    def _open_with(self, peer: str) -> list[SendSession]:
        return [s for s in self._by_key.values() if s.transfer.target == peer]

    def _close(self, session: SendSession, now: float, *, end_request: bool = False) -> list[Action]:
        """Forget an ended transfer, save for what still reads its blocks."""
        key = session.transfer.key
        del self._by_key[key], self._submits[key]
        session.queued.clear()
        session.resend.clear()
        actions: list[Action] = []
        if session.unsent:  # D needs them no more, whatever the end: it has them, or makes them, or never will
            actions.append(CancelTransfer(session.transfer))
        if end_request and session.first_token is None:  # else it is HANDED, and `release` ends it
            self._engine.abort(key, now)
        self._schedule(session)
        self._release_if_possible(session, now)
        return actions

    def _release_if_possible(self, session: SendSession, now: float) -> None:
        if session.releasable:
            if session.granted:
                self._engine.release(session.transfer.key, now)
            del self._sessions[session.transfer]
            self._deadlines.set(session.transfer, None)
