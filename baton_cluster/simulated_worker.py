"""SimulatedWorker: one life of one worker under a virtual clock; the counterpart of `baton.worker`.

Drives the same WorkerCore: gives it its events, executes its actions, lets its steps and its transfers
take the time that the models say. Decides nothing. There is no memory: a block is a number, its
checksum a constant.

    step    planned at t, complete at t + step_s(plan); the next one is planned at once if there is work
    message arrives `latency_s` later, or never if the receiver's life is over by then
    blocks  leave one after the other at `bytes_per_s` (then the source is `sent`) and arrive `latency_s` later
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.engine.request import EngineRequest, StepPlan
from baton.errors import ProtocolError
from baton.plain_steps import PlainSteps
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    CancelTransfer,
    ConnectPeer,
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
    ToRouter,
)
from baton.protocol import Abort, AskPrefixes, Heartbeat, Peers, Replace, Submit, TransferId
from baton.step_log import StepRecord, StepShape
from baton.worker_core import WorkerCore
from baton_cluster.latency import LatencyModel, LinkModel, StepFailed
from baton_cluster.network import Network
from baton_cluster.run_ahead import RunAhead
from baton_cluster.virtual_clock import Alarm, VirtualClock
from kv_transfer.expected import ExpectedBlocks
from kv_transfer.messages import Hello
from kv_transfer.wire_format import Encoding, WireFormat

CHECKSUM = 1
DAMAGED = 2
PIECES_PER_LEASE = 8
"""A large transfer is seen to make progress, as on a real link, so often within a lease."""

NextToken = Callable[[EngineRequest], int] | int
"""The made-up token after `request.tokens`; the function may raise StepFailed. A number: always that one."""
IsDamaged = Callable[[TransferId, int], bool]
"""Whether the block of this index arrives damaged."""


class _Piece:
    """Some blocks on their way."""

    __slots__ = ("dropped", "indices", "transfer")

    def __init__(self, transfer: TransferId, indices: tuple[int, ...]):
        self.transfer = transfer
        self.indices = indices
        self.dropped = False
        """The link was torn down before they had left."""


class _DataLink:
    """One direction between two workers."""

    __slots__ = ("free_at", "unsent")

    def __init__(self) -> None:
        self.free_at = 0.0
        """When all that was shipped has left."""
        self.unsent: dict[_Piece, None] = {}


class SimulatedWorker:
    """`fabric`: every worker by incarnation, dead ones too. `to_router(incarnation, message)` sends."""

    def __init__(
        self,
        core: WorkerCore,
        *,
        clock: VirtualClock,
        link: LinkModel,
        latency: LatencyModel,
        next_token: NextToken,
        is_damaged: IsDamaged | None,
        fabric: dict[str, SimulatedWorker],
        to_router: Callable[[str, Any], None],
        heartbeat_s: float,
        lease_s: float,
        encoding: Encoding = "plain",
        on_step: Callable[[StepRecord], None] | None = None,
        network: Network | None = None,
        ahead: RunAhead | None = None,
    ):
        self.core = core
        self.info = core.info
        self.alive = True
        self.reachable = True
        """Whether its connections are open, as far as others can tell."""
        self.busy_s = 0.0
        """Time in steps so far."""
        self.bytes_sent = self.bytes_received = 0
        """KV blocks handed over so far. Load reports leave it out: it would cost a copy of each."""
        self.num_protocol_errors = 0
        self.num_undeliverable = 0
        self._clock = clock
        self._link = link
        self._step_s = latency.step_s
        self._next_token = next_token
        self._is_damaged = is_damaged
        self._fabric = fabric
        self._to_router = to_router
        self._ahead = ahead if isinstance(next_token, int) else None
        """Where all tokens are the same, and nobody wants to see each step."""
        self._network = network
        """Where links share something."""
        self._heartbeat_s = heartbeat_s
        self._on_step = on_step
        self._record: StepRecord | None = None
        """Of the step under way, for `on_step`."""
        self._block_bytes = WireFormat(self.info.layout, encoding).block_bytes
        """Of what it sends."""
        self._piece_blocks = max(1, int(link.bytes_per_s * lease_s / PIECES_PER_LEASE / self._block_bytes))
        self._outbox: deque[Action] = deque()
        self._execute: dict[type[Action], Callable[[Any], None]] = {
            ToRouter: self._tell_router,
            ToPeer: self._say,
            ShipBlocks: self._ship,
            HashBlocks: self._hash,
            ReceiveBlocks: self._receive,
            CancelTransfer: self._cancel,
            ConnectPeer: self._connect,
            DropLink: self._drop,
        }
        self._plan: StepPlan | None = None
        self._alarm = Alarm(clock, core.next_deadline, self._on_alarm)
        self._links: dict[str, _DataLink] = {}
        """By the incarnation of the peer that this worker is connected to."""
        self._controlled: set[str] = set()
        """Decode workers that messages reach, whether there is a data link or not."""
        self._senders: set[str] = set()
        """Incarnations that blocks came from."""
        self._expected = ExpectedBlocks()

    # --- what happens to it -----------------------------------------------------------------------

    def beat(self) -> None:
        """Now and then every `heartbeat_s`, as long as it lives."""
        if self.alive:
            beat = Heartbeat(self.info.incarnation, self.core.load(), self.core.take_prefix_news())
            self._to_router(self.info.incarnation, beat)
            self._clock.after(self._heartbeat_s, self.beat)

    def on_router_message(self, message: Submit | Replace | Abort | Peers | AskPrefixes) -> None:
        if self.alive:
            self._take(self.core.on_router_message(message, self._clock.now))

    def on_peer_event(self, event: PeerEvent) -> None:
        if not self.alive:
            return
        try:
            actions = self.core.on_peer_event(event, self._clock.now)
        except ProtocolError:  # a port refuses a message before it changes anything
            self.num_protocol_errors += 1
            return
        self._take(actions)

    def on_disconnected(self, peer: str) -> None:
        """The other side's process has ended."""
        for incoming, peers in ((False, self._links), (True, self._senders)):
            if peer in peers:
                self.on_peer_event(DataLinkLost(peer, "the connection was lost", incoming))

    def kill(self) -> None:
        """Its life is over at once: nothing is done, said or heard any more."""
        self.alive = False
        self._alarm.stop()

    def num_held_blocks(self) -> int:
        return self.core.num_held_blocks() if self.alive else 0

    # --- events into actions ------------------------------------------------------------------------

    def _take(self, actions: list[Action]) -> None:
        """Execute what the core answered to an event, and what follows from that."""
        if actions:
            self._outbox.extend(actions)
            while self._outbox:
                action = self._outbox.popleft()
                self._execute[type(action)](action)
        self._alarm.update()
        if self._plan is None:
            self._start_step()

    def _on_alarm(self) -> None:
        self._take(self.core.on_deadline(self._clock.now))

    def _tell_router(self, action: ToRouter) -> None:
        self._to_router(self.info.incarnation, action.message)

    def _hash(self, action: HashBlocks) -> None:
        hashed = Hashed(action.transfer, dict.fromkeys(dict(action.blocks), CHECKSUM))
        self._outbox.extend(self.core.on_peer_event(hashed, self._clock.now))

    def _receive(self, action: ReceiveBlocks) -> None:
        self._expected.announce(action.transfer, action.blocks)

    def _cancel(self, action: CancelTransfer) -> None:
        self._expected.cancel(action.transfer)

    def _connect(self, action: ConnectPeer) -> None:
        self._links.setdefault(action.worker.incarnation, _DataLink())
        self._controlled.add(action.worker.incarnation)

    def _drop(self, action: DropLink) -> None:
        self._drop_link(action.peer)
        if action.forget:
            self._controlled.discard(action.peer)

    # --- steps --------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        now = self._clock.now
        plan = self.core.next_step(now)
        if plan is None:
            return
        self._plan = plan
        self._clock.at(self._begin_step(plan, now), self._end_step, plan)

    def _begin_step(self, plan: StepPlan, now: float) -> float:
        """It starts now; when it ends."""
        seconds = self._step_s(plan)
        self.busy_s += seconds
        if self._on_step is not None:
            shape, occupancy = StepShape.of(plan), self.core.engine.occupancy()
            self._record = StepRecord(self.info.worker_id, now, seconds, shape, *occupancy)
        return now + seconds

    def _run_ahead(self, plan: StepPlan, token: int, ahead: RunAhead) -> bool:
        """`plan` ends now and `is_plain`: end it, and all that follow it as long as nobody disturbs. False: somebody
        does at once, and nothing was done."""
        core, latency_s, end = self.core, ahead.latency_s, self._clock.now
        horizon = ahead.horizon()
        if end + latency_s >= horizon or not ahead.takes(
            self.info.incarnation, steps := core.engine.plain_steps(token)
        ):
            return False
        following: StepPlan | None = plan
        while following is not None:
            steps.add(end + latency_s, core.finish_plain_step(following, token, end))
            following = core.next_step(end)
            if following is None:
                break
            end = self._begin_step(following, end)
            if end + latency_s >= horizon or not core.is_plain(following, token):
                self._plan = following
                self._clock.at(end, self._end_step, following)
                break
            self._tell_step()
        ahead.tell(self.info.incarnation, steps)
        return True

    def _tell_step(self) -> None:
        if self._on_step is not None:
            assert self._record is not None
            self._on_step(self._record)

    def _end_step(self, plan: StepPlan) -> None:
        if not self.alive:
            return
        self._plan = None
        self._tell_step()
        next_token, ahead = self._next_token, self._ahead
        tokens: list[int | None]
        plain: PlainSteps | None = None
        try:
            if not isinstance(next_token, int):
                tokens = [next_token(item.request) if item.samples else None for item in plan.items]
            elif plan.in_batch.stop - plan.in_batch.start < len(plan.items):
                tokens = [next_token if item.samples else None for item in plan.items]
            elif ahead and self.core.is_plain(plan, next_token) and self._run_ahead(plan, next_token, ahead):
                return
            else:
                tokens = [next_token] * len(plan.items)
        except StepFailed as e:
            self._take(self.core.fail_step(plan, f"{type(e).__name__}: {e}", self._clock.now))
            return
        if ahead is not None:
            assert isinstance(next_token, int)
            plain = PlainSteps(next_token, [], [])
            plain.arrivals.append(self._clock.now + ahead.latency_s)
            actions = self.core.finish_step(plan, tokens, self._clock.now, plain)
        else:
            actions = self.core.finish_step(plan, tokens, self._clock.now)
        if len(actions) == 1 and type(first := actions[0]) is ToRouter:
            # Nothing was said to peers, so no deadline was brought forward.
            self._to_router(self.info.incarnation, first.message)
            self._start_step()
        else:
            self._take(actions)

    # --- other workers ------------------------------------------------------------------------------

    def _say(self, action: ToPeer) -> None:
        """To the decode worker whose incarnation is `peer`, or back to the prefill worker of that incarnation."""
        peer, message = action.peer, action.message
        transfer: TransferId | None = getattr(message, "transfer", None)
        outgoing = isinstance(message, Hello) or (transfer is not None and transfer.source == self.info.incarnation)
        receiver = self._fabric.get(peer)
        if receiver is None or (outgoing and peer not in self._controlled):
            self.num_undeliverable += 1
            return
        event = (FromPrefill if outgoing else FromDecode)(self.info.incarnation, message)
        self._clock.after(self._link.latency_s, receiver.on_peer_event, event)

    def _ship(self, action: ShipBlocks) -> None:
        peer, transfer, blocks = action.peer, action.transfer, action.blocks
        self.bytes_sent += len(blocks) * self._block_bytes
        link, receiver = self._links.get(peer), self._fabric.get(peer)
        indices = tuple([index for index, _ in blocks])
        for start in range(0, len(blocks), self._piece_blocks):
            piece = _Piece(transfer, indices[start : start + self._piece_blocks])
            if link is None or receiver is None:
                self._clock.after(0, self.on_peer_event, BlocksSent(transfer, piece.indices))
                continue
            link.unsent[piece] = None
            num_bytes = len(piece.indices) * self._block_bytes
            if self._network is not None:
                left = partial(self._left, link, receiver, piece)
                self._network.send(self.info.incarnation, peer, num_bytes, left)
                continue
            link.free_at = max(link.free_at, self._clock.now) + num_bytes / self._link.bytes_per_s
            self._clock.at(link.free_at, self._sent, link, receiver, piece)
            self._clock.at(link.free_at + self._link.latency_s, receiver.arrived, self.info.incarnation, piece)
        shipped = Shipped(transfer, indices, ())
        self._outbox.extend(self.core.on_peer_event(shipped, self._clock.now))

    def _left(self, link: _DataLink, receiver: SimulatedWorker, piece: _Piece) -> None:
        self._clock.after(self._link.latency_s, receiver.arrived, self.info.incarnation, piece)
        self._sent(link, receiver, piece)

    def _sent(self, link: _DataLink, receiver: SimulatedWorker, piece: _Piece) -> None:
        # Blocks for a dead receiver stay in the socket until the link is dropped.
        if not piece.dropped and receiver.alive:
            del link.unsent[piece]
            self.on_peer_event(BlocksSent(piece.transfer, piece.indices))

    def _drop_link(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if self._network is not None:
            self._network.drop(self.info.incarnation, peer)
        for piece in link.unsent if link else ():
            piece.dropped = True
            self._clock.after(0, self.on_peer_event, BlocksSent(piece.transfer, piece.indices))

    def arrived(self, sender: str, piece: _Piece) -> None:
        """Blocks of `sender` are here; what was not announced is dropped."""
        if piece.dropped or not self.alive:
            return
        self._senders.add(sender)
        transfer = piece.transfer
        checksums = dict.fromkeys(self._expected.claim_all(transfer, piece.indices), CHECKSUM)
        if self._is_damaged is not None:
            checksums = {i: DAMAGED if self._is_damaged(transfer, i) else CHECKSUM for i in checksums}
        if checksums:
            self.bytes_received += len(checksums) * self._fabric[sender]._block_bytes
            self.on_peer_event(BlocksReceived(transfer, checksums))
