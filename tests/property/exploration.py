"""Every behaviour of one small hand-over world, within bounds: an explicit-state search over the real ports.

      router ──submit, abort, replace, peers──┐                 ┌──abort──────── router
                                              ▼                 ▼
        engine ◄──► SendPort ── wire: a set of messages ──► ReceivePort ◄──► engine
                       │                                        ▲
                       └── frames: held ─► flying ─► (arrives) ─┘      pushing
                           held ─► fetched (D copies) ─► Sent          pulling
                           held ─► dropped ─► Sent              the link was torn down, or the transfer cancelled
                           flying ─► old ─► arrives late, or never     the link was cut

A world is `(P's side, D's side, wire, frames, router, faults left)`. In each world every event that could come next
does: any message on the wire is delivered (so they come in any order), dropped or delivered twice; any frame moves on,
is lost or corrupted; an engine works; the router aborts; a link or a control connection is cut; a worker is killed and
starts as a new incarnation while what the former one said is still under way; time jumps to the next deadline. Faults
are paid for out of `Bounds`, and so is time that passes while something is under way; all else is free.

Why that ends and why it is quick:

* A side is a port, its engine and its transport, and an event happens at one side. Sides are interned by all that
  decides what they do next (`_Prefill.key`, `_Decode.key`), and what an event does to a side is computed once, however
  many worlds the side is part of. Most steps of the search are therefore two look-ups.
* Times are ages: a side is the same whether it is reached after 4 s or after 400 s. Ages that no rule looks at are left
  out.
* The wire holds a message twice at most: what is said a third time is merged with its copies that are still under way.
  So the space is finite without a bound on depth or on time.
* Reasons in messages are left out, and blocks are given out lowest first.

What is checked is in `_Prefill.check`, `_Decode.check`, `Explorer._check` and `Explorer._check_ends`. A world's fair
successor is what a network without further faults does next. Every world's chain of fair successors must come to a
world in which nothing can happen, nobody holds or waits for anything, and each request has ended; as the chains run
through the explored graph, that is checked from every world, not from a sample.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from baton.engine.request import ChunkDone, Effect, Ended, EngineRequest, PromptDone
from baton.errors import ProtocolError
from baton.ports import (
    Action,
    CancelTransfer,
    ConnectPeer,
    DropLink,
    HashBlocks,
    ReceiveBlocks,
    ShipBlocks,
    ToPeer,
    ToRouter,
)
from baton.protocol import AttemptFailed, HandoffDone, HandoffRefused, Replace, RequestKey, Submit, TransferId
from baton.sampling_params import SamplingParams
from decode_worker.receive_port import ReceivePort
from decode_worker.waiting import WaitingOffers
from kv_transfer.deadlines import Deadlines
from kv_transfer.messages import Refuse
from kv_transfer.session import RecvSession, SendSession, State
from prefill_worker.send_port import SendPort, _Peer
from tests.fakes_transfer import LAYOUT, key_of, worker_info

LEASE = 8.0
REPEAT = 3.0
"""Seconds between repeated questions. Two in a lease, where the real ports ask four times: one may be lost."""
DAMAGE = 1000
"""Added to the content of a block that is corrupted."""


class Wanted(NamedTuple):
    """A request of the small world. Its prompt fills `num_blocks` blocks, one chunk each; of one family is alike."""

    num_blocks: int
    family: int


@dataclass(frozen=True)
class Bounds:
    """A world, and how many faults of each kind one path may see; `faults` bounds their sum."""

    requests: tuple[Wanted, ...]
    blocks_p: int = 2
    blocks_d: int = 2
    max_in_flight: int = 2
    pulls: bool = False
    faults: int = 0
    drops: int = 0
    duplicates: int = 0
    losses: int = 0
    corruptions: int = 0
    cuts: int = 0
    """Of the data link; heard of by both sides, each in its own time, or (`half_cuts`) by either alone."""
    half_cuts: bool = False
    control_cuts: int = 0
    """All messages under way are lost, P hears of it."""
    aborts: int = 0
    crashes_p: int = 0
    crashes_d: int = 0
    delays: int = 0
    """Deadlines that pass while something is under way. Engines may take as long as they like at no cost."""
    split_steps: bool = False
    """A step of P's engine begins and ends: other events come in between."""
    handshake: bool = False
    """Hello and Welcome are explored too."""
    no_failure: bool = False
    """Check that no attempt ever fails."""
    no_recompute: bool = False
    """Check that D never has to compute what was sent."""


FAULTS = (
    "drops",
    "duplicates",
    "losses",
    "corruptions",
    "cuts",
    "control_cuts",
    "aborts",
    "crashes_p",
    "crashes_d",
    "delays",
)


class Violation(AssertionError):
    """An invariant does not hold. `path`: the events that lead there, shortest first found."""

    def __init__(self, what: str, path: tuple[str, ...] = ()):
        super().__init__("\n  ".join([f"{what}, after {len(path)} events:", *path]))
        self.what, self.path = what, path


def require(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)


def content(family: int, index: int) -> int:
    return 16 * (family + 1) + index


def _age(now: float, at: float) -> float:
    """No rule looks further back than two leases."""
    return min(now - at, 2 * LEASE)


def _bare(message: Any) -> Any:
    """Without what is for people only."""
    return msgspec.structs.replace(message, reason="") if hasattr(message, "reason") else message


def _later(deadlines: Deadlines[Any]) -> Deadlines[Any]:
    """A copy; it forgets in which order keys with one deadline came."""
    copy: Deadlines[Any] = Deadlines()
    for key, when in sorted(deadlines._when.items(), key=lambda entry: (entry[1], str(entry[0]))):
        copy.set(key, when)
    return copy


# --- the two sides --------------------------------------------------------------------------------


class _SendEngine:
    """Books of the prefill side: `{request: [blocks computed, *block ids]}`. Strict: nothing is freed twice."""

    def __init__(self, num_blocks: int, wanted: dict[RequestKey, Wanted]):
        self.num_blocks, self.wanted = num_blocks, wanted
        self.free = list(range(num_blocks))
        self.waiting: set[RequestKey] = set()
        self.granted: dict[RequestKey, tuple[int, tuple[int, ...]]] = {}
        """(blocks computed, block ids), until `release`."""
        self.ended: set[RequestKey] = set()
        self.stepping: RequestKey | None = None
        self.late: set[RequestKey] = set()
        """Released while its step ran: free when that ends."""
        self.kept: list[RequestKey] = []
        """Runs here alone now; for the world to take."""

    def copy(self) -> _SendEngine:
        new = _SendEngine.__new__(_SendEngine)
        new.__dict__.update(self.__dict__)
        new.free, new.waiting, new.granted = self.free.copy(), self.waiting.copy(), self.granted.copy()
        new.ended, new.late, new.kept = self.ended.copy(), self.late.copy(), []
        return new

    def key(self) -> Hashable:
        granted = tuple(sorted(self.granted.items()))
        return frozenset(self.waiting), granted, frozenset(self.ended), self.stepping, frozenset(self.late)

    def grant(self, key: RequestKey, now: float) -> None:
        require(key in self.waiting, f"{key} gets credit twice")
        self.waiting.discard(key)
        self.granted[key] = 0, ()

    def keep(self, key: RequestKey, now: float) -> None:
        require(key in self.waiting, f"{key} is kept, but does not wait")
        self.waiting.discard(key)
        self.kept.append(key)

    def can_step(self) -> list[RequestKey]:
        room = len(self.free)
        return [
            key
            for key, (computed, blocks) in self.granted.items()
            if key not in self.ended
            and computed < self.wanted[key].num_blocks
            and (blocks or room >= self.wanted[key].num_blocks)
        ]

    def begin(self, key: RequestKey) -> None:
        computed, blocks = self.granted[key]
        if not blocks:  # all or none, so that no two requests wait for each other
            count = self.wanted[key].num_blocks
            blocks, self.free = tuple(self.free[:count]), self.free[count:]
        self.granted[key] = computed, blocks
        self.stepping = key

    def end(self) -> list[Effect]:
        key, self.stepping = self.stepping, None
        assert key is not None
        if key in self.late:
            self.late.discard(key)
            self._free(key)
            return []
        if key in self.ended:
            return []
        computed, blocks = self.granted[key]
        self.granted[key] = computed + 1, blocks
        request = REQUEST.of(key, self.wanted[key])
        effects: list[Effect] = [ChunkDone(request, ((computed, blocks[computed]),))]
        if computed + 1 == len(blocks):
            effects.append(PromptDone(request, 7))
        return effects

    def release(self, key: RequestKey, now: float) -> None:
        require(key in self.granted and key not in self.late, f"{key} is released twice, or was never granted")
        if self.stepping == key:
            self.late.add(key)
            self.ended.add(key)
        else:
            self._free(key)

    def _free(self, key: RequestKey) -> None:
        self.free = sorted([*self.free, *self.granted.pop(key)[1]])
        self.ended.discard(key)

    def lives_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(0 for _ in blocks)

    def abort(self, key: RequestKey, now: float) -> list[Effect]:
        if key in self.waiting:
            self.waiting.discard(key)
        elif key not in self.granted or key in self.ended:
            return []
        else:
            self.ended.add(key)
        return [Ended(REQUEST.of(key, self.wanted[key]), "abort")]


class _ReceiveEngine:
    """Books of the decode side. Blocks of adopted requests are shared with their like while one of them lives."""

    def __init__(self, num_blocks: int, wanted: dict[RequestKey, Wanted]):
        self.num_blocks, self.wanted = num_blocks, wanted
        self.free = list(range(num_blocks))
        self.reserved: dict[RequestKey, tuple[tuple[int, ...], int]] = {}
        """(block ids, of which so many are shared)."""
        self.decoding: dict[RequestKey, tuple[tuple[int, ...], bool]] = {}
        """(block ids, whether the KV is what was sent)."""
        self.memory: dict[int, int] = {}
        """Content by block id; of blocks in use that were written."""
        self.taken: set[RequestKey] = set()
        """Went from reserved to decoding once."""

    def copy(self) -> _ReceiveEngine:
        new = _ReceiveEngine.__new__(_ReceiveEngine)
        new.__dict__.update(self.__dict__)
        new.free, new.reserved, new.decoding = self.free.copy(), self.reserved.copy(), self.decoding.copy()
        new.memory, new.taken = self.memory.copy(), self.taken.copy()
        return new

    def key(self) -> Hashable:
        parts = (self.reserved, self.decoding, self.memory)
        return *(tuple(sorted(part.items())) for part in parts), frozenset(self.taken)

    def _shared(self, wanted: Wanted) -> tuple[int, ...]:
        for key, (blocks, adopted) in self.decoding.items():
            if adopted and self.wanted[key].family == wanted.family:
                return blocks[: wanted.num_blocks]
        return ()

    def can_ever_hold(self, num_tokens: int) -> bool:
        return -(-num_tokens // LAYOUT.block_size) <= self.num_blocks

    def is_coming(self, request: EngineRequest) -> bool:
        family = self.wanted[request.key].family
        return any(self.wanted[key].family == family for key in self.reserved)

    def reserve(self, request: EngineRequest, num_tokens: int, now: float) -> list[int] | None:
        key = request.key
        require(key not in self.reserved and key not in self.taken, f"{key} is reserved for twice")
        shared = self._shared(self.wanted[key])
        count = -(-num_tokens // LAYOUT.block_size) - len(shared)
        if count > len(self.free):
            return None
        blocks, self.free = (*shared, *self.free[:count]), self.free[count:]
        request.num_prefix_blocks = len(shared)  # read at once and never again, so copies of the side may share it
        self.reserved[key] = blocks, len(shared)
        return list(blocks)

    def _take(self, key: RequestKey, adopted: bool) -> None:
        require(key in self.reserved and key not in self.taken, f"{key} decodes twice, or without blocks")
        self.taken.add(key)
        self.decoding[key] = self.reserved.pop(key)[0], adopted

    def adopt(self, key: RequestKey, first_token: int, now: float) -> None:
        self._take(key, True)

    def recompute(self, key: RequestKey, first_token: int, now: float) -> None:
        self._take(key, False)

    def release(self, key: RequestKey, now: float) -> None:
        require(key in self.reserved, f"{key} is released twice, or was never reserved for")
        self._let_go(self.reserved.pop(key)[0])

    def finish(self, key: RequestKey) -> None:
        self._let_go(self.decoding.pop(key)[0])

    def _let_go(self, blocks: tuple[int, ...]) -> None:
        held = self.held()
        gone = [block for block in blocks if block not in held]
        for block in gone:
            self.memory.pop(block, None)
        self.free = sorted(self.free + gone)

    def held(self) -> Counter[int]:
        return Counter(b for blocks, _ in (*self.reserved.values(), *self.decoding.values()) for b in blocks)


class _Requests:
    """`EngineRequest`s by key: what the ports read of them never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[RequestKey, Wanted], EngineRequest] = {}

    def of(self, key: RequestKey, wanted: Wanted) -> EngineRequest:
        if (key, wanted) not in self._known:
            self._known[key, wanted] = EngineRequest(key, prompt_of(wanted), SAMPLING, handoff=True)
        return self._known[key, wanted]


SAMPLING = SamplingParams(max_tokens=2)
REQUEST = _Requests()


def prompt_of(wanted: Wanted) -> tuple[int, ...]:
    """One token short of full blocks, so that no block is needed for growth."""
    first = 100 * wanted.family
    return tuple(range(first, first + LAYOUT.block_size * wanted.num_blocks - 1))


RECOMPUTED = "recomputed"
Output = tuple[Any, ...]
"""What a side's event asks of the world: `("say", link, message)`, `("ship", frame)`, `("drop", peer)`, ..."""


class _Side:
    """What both have. An event: copy, call the port, check; see `Explorer._apply`."""

    port: Any
    ends: dict[TransferId, str]
    incarnation: str

    def __init__(self, incarnation: str, bounds: Bounds, wanted: dict[RequestKey, Wanted]):
        self.incarnation, self.bounds, self.wanted, self.now = incarnation, bounds, wanted, 0.0
        self.ends = {}
        self.out: list[Output] = []

    def _copy(self) -> Any:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.ends, new.out = self.ends.copy(), []
        return new

    def note_ends(self, before: list[Any]) -> None:
        """Write down how sessions ended that were open `before` the event, or that came with it."""
        for session in {id(s): s for s in (*before, *self.port._sessions.values())}.values():
            transfer = session.transfer
            if session.ended and (transfer not in self.ends or self.ends[transfer] != RECOMPUTED):
                on_its_own = session.state is State.FAILED and self.is_recomputed(transfer.key)
                self.note_end(transfer, RECOMPUTED if on_its_own else session.state.value)

    def is_recomputed(self, key: RequestKey) -> bool:
        """Whether decode goes on although the transfer failed, as far as this event or side tells."""
        raise NotImplementedError

    def note_end(self, transfer: TransferId, end: str) -> None:
        known = self.ends.setdefault(transfer, end)
        require(known == end, f"{self.incarnation}: {transfer} ended as {known}, and again as {end}")

    def check_book(self) -> None:
        counters = self.port.counters
        ended = sum(counters[end] for end in ("done", "refused", "failed", "expired", "aborted"))
        num_open = sum(not session.ended for session in self.port._sessions.values())
        require(counters["offered"] == ended + num_open, f"{self.incarnation}: a transfer ended twice, or not at all")

    def tick(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.port.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.act(self.port.on_deadline(self.now))

    def act(self, actions: list[Action]) -> None:
        raise NotImplementedError

    def check_deadline(self) -> None:
        deadline = self.port.next_deadline()
        require(deadline is None or deadline > self.now, f"{self.incarnation}: a deadline in the past spins")

    def wait(self) -> float | None:
        deadline = self.port.next_deadline()
        return None if deadline is None else deadline - self.now


class Frame(NamedTuple):
    """A block on its way."""

    transfer: TransferId
    index: int
    ref: int
    """How often the index was shipped: names the copy."""
    block: int
    value: int
    phase: str


class _Prefill(_Side):
    port: SendPort

    def __init__(self, incarnation: str, bounds: Bounds, wanted: dict[RequestKey, Wanted]):
        super().__init__(incarnation, bounds, wanted)
        self.engine = _SendEngine(bounds.blocks_p, wanted)
        self.copies: dict[tuple[TransferId, int], int] = {}
        """How often each index was shipped."""
        self.linked: frozenset[str] = frozenset()
        """Peers to which the transport was asked for a link."""
        self.port = SendPort(
            worker_id="prefill-0",
            incarnation=incarnation,
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            max_unacked_blocks=bounds.max_in_flight,
            pulls=bounds.pulls,
        )
        self.port._repeat_s = REPEAT

    def copy(self) -> _Prefill:
        new: _Prefill = self._copy()
        new.copies = self.copies.copy()
        new.engine = self.engine.copy()
        old, port = self.port, SendPort.__new__(SendPort)
        port.__dict__.update(old.__dict__)
        counters = port.counters = Counter()
        dict.update(counters, old.counters)
        port._engine = new.engine
        sessions = {transfer: _copy_send(session, counters) for transfer, session in old._sessions.items()}
        by_id = {id(old._sessions[transfer]): session for transfer, session in sessions.items()}
        port._sessions = sessions
        port._by_key = {key: by_id[id(session)] for key, session in old._by_key.items()}
        port._held, port._submits = old._held.copy(), old._submits.copy()
        port._incarnations = old._incarnations.copy()
        port._deadlines = _later(old._deadlines)
        port._peers = {}
        for name, peer in old._peers.items():
            twin = port._peers[name] = _Peer.__new__(_Peer)
            twin.__dict__.update(peer.__dict__)
            _copy_others(twin)
            twin.greeting = [by_id[id(s)] for s in peer.greeting if id(s) in by_id]
            # A session that is gone may still stand in the backlog, with nothing queued.
            twin.backlog = deque(by_id.get(id(s)) or _copy_send(s, counters) for s in peer.backlog)
        _copy_others(port)
        new.port = port
        return new

    def key(self) -> Hashable:
        port, now = self.port, self.now
        sessions = tuple(sorted((t, _send_key(s, now)) for t, s in port._sessions.items()))
        peers = tuple(
            (
                name,
                peer.welcome,
                peer.refusal is None,
                tuple(s.transfer for s in peer.greeting),
                tuple((s.transfer, not s.queued) for s in peer.backlog),
                peer.in_flight,
                _others_key(peer),
            )
            for name, peer in sorted(port._peers.items())
        )
        return (
            self.incarnation,
            sessions,
            frozenset(port._by_key),
            frozenset(port._held),
            peers,
            tuple(sorted(port._incarnations.items())),
            frozenset((key, when - now) for key, when in port._deadlines._when.items()),
            self.engine.key(),
            frozenset(self.copies.items()),
            frozenset(self.ends.items()),
            self.linked,
            _others_key(port),
        )

    def check(self) -> None:
        engine = self.engine
        held = [block for _, blocks in engine.granted.values() for block in blocks]
        require(sorted(held + engine.free) == list(range(engine.num_blocks)), "I3: a source block is free and held")
        self.check_book()
        self.check_deadline()
        for session in self.port._sessions.values():
            under_way = [*session.unsent, *(index for index, _ in session.queued)]
            require(len(under_way) == len(set(under_way)), f"an index of {session.transfer} is on its way twice")
        for transfer in (*self.port._sessions, *self.ends):
            require(transfer.source == self.incarnation, f"I9: {self.incarnation} works for a former life")

    @property
    def is_idle(self) -> bool:
        port = self.port
        books = (port._sessions, port._by_key, port._held, port._submits, self.engine.waiting, self.engine.granted)
        return not any(books) and not any(peer.in_flight for peer in port._peers.values())

    def happens(self, event: tuple[Any, ...]) -> None:
        port, now = self.port, self.now
        before = list(port._sessions.values())
        match event:
            case ("hear", link, message):
                self.act(port.on_message(link, message, now))
            case ("sent", transfer, index):
                self.act(port.on_sent(transfer, (index,), now))
            case ("step", key):
                self.engine.begin(key)
                self._end_step()
            case ("begin", key):
                self.engine.begin(key)
            case ("end",):
                self._end_step()
            case ("submit", key):
                self.engine.waiting.add(key)
                self.act(port.offer(Submit(key, prompt_of(self.wanted[key]), SAMPLING, decode="decode-0"), now))
            case ("abort", key):
                for effect in self.engine.abort(key, now):
                    assert isinstance(effect, Ended)
                    self.act(port.on_ended(effect, now))
            case ("replace", key):
                self.act(port.replace(Replace(key, None), now))
            case ("peers", incarnation):
                self.act(port.on_peers((worker_info(incarnation),), now))
            case ("cut", peer):
                self.act(port.on_link_lost(peer, "cut", now))
            case ("restored", peer):
                self.act(port.on_control_restored(peer, now))
            case ("tick", seconds):
                self.tick(seconds)
            case _:
                raise AssertionError(event)
        self.out += [("kept", key) for key in self.engine.kept]
        self.engine.kept.clear()
        self.note_ends(before)

    def is_recomputed(self, key: RequestKey) -> bool:
        return ("moved", key) in self.out

    def _end_step(self) -> None:
        for effect in self.engine.end():
            if isinstance(effect, PromptDone):
                self.act(self.port.on_prompt_done(effect, self.now))
            else:
                assert isinstance(effect, ChunkDone)
                self.act(self.port.on_chunk(effect, self.now))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToPeer(peer, message):
                    self.out.append(("say", peer, _bare(message)))
                case ShipBlocks(peer, transfer, blocks):
                    require(peer in self.linked, f"blocks are shipped to {peer}, to which there is no link")
                    refs = []
                    computed, held = self.engine.granted.get(transfer.key, (0, ()))
                    for index, block in blocks:
                        require(index < computed and held[index] == block, f"I4: block {index} is shipped unfinished")
                        ref = self.copies[transfer, index] = self.copies.get((transfer, index), 0) + 1
                        value = content(self.wanted[transfer.key].family, index)
                        self.out.append(("ship", Frame(transfer, index, ref, block, value, "held")))
                        refs.append(ref)
                    named = tuple(refs) if self.bounds.pulls else ()
                    self.act(self.port.on_shipped(transfer, tuple(i for i, _ in blocks), named, self.now))
                case HashBlocks(transfer, blocks):
                    checksums = {i: content(self.wanted[transfer.key].family, i) for i, _ in blocks}
                    self.act(self.port.on_hashed(transfer, checksums, self.now))
                case CancelTransfer(transfer):
                    if self.bounds.pulls:
                        self.out.append(("cancel", transfer))
                case DropLink(peer):
                    self.linked -= {peer}
                    self.out.append(("drop", peer))
                case ToRouter(AttemptFailed(_, key)):
                    self.out.append(("failed", key))
                case ToRouter(HandoffRefused(_, key)):
                    self.out.append(("refused", key))
                case ToRouter(HandoffDone(_, key)):
                    self.out.append(("moved", key))
                case ConnectPeer(worker):
                    self.linked |= {worker.incarnation}
                case _:
                    raise AssertionError(action)


class _Decode(_Side):
    port: ReceivePort

    def __init__(self, incarnation: str, bounds: Bounds, wanted: dict[RequestKey, Wanted]):
        super().__init__(incarnation, bounds, wanted)
        self.engine = _ReceiveEngine(bounds.blocks_d, wanted)
        self.writable: dict[tuple[TransferId, int], int] = {}
        """Block id, by transfer and index, that the transport may write."""
        self.fetching: dict[tuple[TransferId, int], int] = {}
        """Of a transport that pulls: by which ref."""
        self.port = ReceivePort(
            worker_id="decode-0",
            incarnation=incarnation,
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            expected_growth=1,
            pulls=bounds.pulls,
        )

    def copy(self) -> _Decode:
        new: _Decode = self._copy()
        new.engine = self.engine.copy()
        new.writable, new.fetching = self.writable.copy(), self.fetching.copy()
        old, port = self.port, ReceivePort.__new__(ReceivePort)
        port.__dict__.update(old.__dict__)
        counters = port.counters = Counter()
        dict.update(counters, old.counters)
        port._engine = new.engine
        port._greeted, port._lives = old._greeted.copy(), old._lives.copy()
        port._sessions = {transfer: _copy_receive(session, counters) for transfer, session in old._sessions.items()}
        by_id = {id(old._sessions[transfer]): session for transfer, session in port._sessions.items()}
        port._by_key = {key: by_id[id(session)] for key, session in old._by_key.items()}
        port._waiting = WaitingOffers()
        for session, request in old._waiting:
            port._waiting.add(by_id[id(session)], request)
        port._answers = old._answers.copy()
        port._deadlines = _later(old._deadlines)
        _copy_others(port)
        new.port = port
        return new

    def key(self) -> Hashable:
        port, now = self.port, self.now
        return (
            self.incarnation,
            tuple(sorted((t, _receive_key(s, now)) for t, s in port._sessions.items())),
            frozenset(port._by_key),
            tuple(session.transfer for session, _ in port._waiting),
            frozenset((t, type(a), getattr(a, "recomputing", None)) for t, a in port._answers.items()),
            frozenset(port._greeted),
            tuple(sorted(port._lives.items())),
            frozenset((key, when - now) for key, when in port._deadlines._when.items()),
            self.engine.key(),
            frozenset(self.writable.items()),
            frozenset(self.fetching.items()),
            frozenset(self.ends.items()),
            _others_key(port),
        )

    def check(self) -> None:
        engine = self.engine
        held = engine.held()
        require(sorted([*held, *engine.free]) == list(range(engine.num_blocks)), "I3: a target block is free and held")
        for (transfer, index), block in self.writable.items():
            blocks, num_shared = engine.reserved.get(transfer.key, ((), 0))
            own = index < len(blocks) and blocks[index] == block and index >= num_shared and held[block] == 1
            require(own, f"I5: block {index} of {transfer} was given away and may still be written")
        for key, (blocks, adopted) in engine.decoding.items():
            family = self.wanted[key].family
            right = all(engine.memory.get(block) == content(family, i) for i, block in enumerate(blocks))
            require(right or not adopted, f"I11: {key} decodes from a wrong KV cache")
        recomputed = self.bounds.no_recompute and RECOMPUTED in self.ends.values()
        require(not recomputed, "decode computes a prompt again, between healthy peers")
        self.check_book()
        self.check_deadline()
        self.port._waiting.check()
        for transfer in (*self.port._sessions, *self.ends):
            require(transfer.target == self.incarnation, f"I9: {self.incarnation} works for a former life")

    @property
    def is_idle(self) -> bool:
        port, engine = self.port, self.engine
        books = (port._sessions, port._by_key, port._waiting, engine.reserved, engine.decoding, self.writable)
        return not any(books)

    def happens(self, event: tuple[Any, ...]) -> None:
        port, now = self.port, self.now
        before = list(port._sessions.values())
        match event:
            case ("hear", sender, message):
                self.act(port.on_message(sender, message, now))
            case ("arrive", transfer, index, ref, value):
                block = self.writable.get((transfer, index))
                if block is not None and (not self.bounds.pulls or self.fetching[transfer, index] == ref):
                    del self.writable[transfer, index]
                    self.fetching.pop((transfer, index), None)
                    self.engine.memory[block] = value
                    self.act(port.on_received(transfer, {index: value}, now))
            case ("finish", key):
                self.engine.finish(key)
                self.out.append(("finished", key))
                self.act(port.on_blocks_free(now))
            case ("abort", key):
                self.act(port.on_abort(key, now))
                if key in self.engine.decoding:
                    self.engine.finish(key)
                    self.act(port.on_blocks_free(now))
            case ("cut", peer):
                self.act(port.on_link_lost(peer, "cut", now))
            case ("tick", seconds):
                self.tick(seconds)
            case _:
                raise AssertionError(event)
        self.note_ends(before)

    def is_recomputed(self, key: RequestKey) -> bool:
        return key in self.engine.taken

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToPeer(peer, message):
                    self.out.append(("say", peer, _bare(message)))
                    if isinstance(message, Refuse) and message.transfer.target == self.incarnation:
                        self.note_end(message.transfer, "refused")
                case ReceiveBlocks(_, transfer, refs, blocks):
                    require(len(refs) == len(blocks) * self.bounds.pulls, "refs for a transport that pushes, or none")
                    self.writable.update({(transfer, index): block for index, block in blocks})
                    self.fetching.update({(transfer, i): ref for ref, (i, _) in zip(refs, blocks, strict=False)})
                case CancelTransfer(transfer):
                    self.writable = {at: block for at, block in self.writable.items() if at[0] != transfer}
                    self.fetching = {at: ref for at, ref in self.fetching.items() if at[0] != transfer}
                case ToRouter(AttemptFailed(_, key)):
                    self.out.append(("failed", key))
                case _:
                    raise AssertionError(action)


# --- copies and keys of sessions ------------------------------------------------------------------

_SEND_COPIED = ("unsent", "shipped_blocks", "resend", "checksums", "refs", "queued")
_RECEIVE_COPIED = ("announced", "refs", "lent", "received")


def _copy_send(session: SendSession, counters: Counter[str]) -> SendSession:
    new = SendSession.__new__(SendSession)
    fields = new.__dict__
    fields.update(session.__dict__)
    for name in _SEND_COPIED:
        fields[name] = fields[name].copy()
    fields["_counters"] = counters
    _copy_others(new)
    return new


def _send_key(s: SendSession, now: float) -> Hashable:
    ended = s.ended
    waits = bool(s.unsent) or s.state is State.COMMITTED
    return (
        s.state.value,
        s.prefix_blocks,
        s.granted,
        tuple(s.queued),
        frozenset(s.unsent),
        frozenset(s.shipped_blocks.items()),
        frozenset(s.resend),
        s.num_relinks,
        frozenset(s.checksums.items()),
        frozenset(s.refs.items()),
        s.first_token or 0,
        s.link_dropped,
        _age(now, s.renewed_at) if waits else 0,
        0 if ended else _age(now, s.said_at),
        _others_key(s),
    )


def _copy_receive(session: RecvSession, counters: Counter[str]) -> RecvSession:
    new = RecvSession.__new__(RecvSession)
    fields = new.__dict__
    fields.update(session.__dict__)
    for name in _RECEIVE_COPIED:
        fields[name] = fields[name].copy()
    fields["_counters"] = counters
    _copy_others(new)
    return new


def _receive_key(s: RecvSession, now: float) -> Hashable:
    return (
        s.state.value,
        s.prefix_blocks,
        s.blocks,
        frozenset(s.announced),
        frozenset(s.refs.items()),
        frozenset(s.lent),
        frozenset(s.received.items()),
        -1.0 if s.lost_at is None else s.lost_at - now,
        s.committed.checksums if s.committed is not None else (),
        s.committed is not None,
        _age(now, s.renewed_at) if s.state in (State.OPEN, State.COMMITTED) else 0,
        _others_key(s),
    )


KNOWN_FIELDS: dict[type, set[str]] = {
    SendSession: {
        *("offer", "transfer", "num_blocks", "prefix_blocks", "state", "lease_s", "renewed_at", "changed_at"),
        *("_counters", "granted", "queued", "unsent", "shipped_blocks", "resend", "num_relinks", "checksums", "refs"),
        *("first_token", "said_at", "committed_at", "link_dropped"),
    },
    RecvSession: {
        *("offer", "transfer", "num_blocks", "prefix_blocks", "state", "lease_s", "renewed_at", "changed_at"),
        *("_counters", "blocks", "announced", "refs", "lent", "lost_at", "loss", "received", "committed"),
    },
    _Peer: {"worker", "welcome", "refusal", "greeting", "backlog", "in_flight", "is_linked", "num_losses"},
    SendPort: {
        *("_worker_id", "_incarnation", "_hello", "_layout", "_engine", "_lease_s", "_repeat_s", "_max_in_flight"),
        *("_checksummed", "_pulls", "_peers", "_incarnations", "_sessions", "_by_key", "_held", "_submits"),
        *("_deadlines", "counters"),
    },
    ReceivePort: {
        *("_worker_id", "_incarnation", "_fingerprint", "_layout", "_engine", "_lease_s", "_expected_growth"),
        *("_verify", "_reach", "_pulls", "_greeted", "_lives", "_sessions", "_by_key", "_waiting", "_answers"),
        *("_deadlines", "counters"),
    },
}
"""What is copied, and in the keys or left out on purpose. All else that a class has is copied and compared as it is."""


def _others(thing: Any) -> list[str]:
    return sorted(vars(thing).keys() - KNOWN_FIELDS[type(thing)])


def _copy_others(thing: Any) -> None:
    for name in _others(thing):
        value = getattr(thing, name)
        if isinstance(value, dict | set | list | deque):
            setattr(thing, name, value.copy())


def _others_key(thing: Any) -> Hashable:
    return tuple(_frozen(getattr(thing, name)) for name in _others(thing))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return frozenset((key, _frozen(entry)) for key, entry in value.items())
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, list | deque):
        return tuple(_frozen(entry) for entry in value)
    hash(value)  # raises TypeError: teach the explorer what it is
    return value


# --- the search -----------------------------------------------------------------------------------

OPEN, FINISHED, FAILED, ABORTED = range(4)
"""What the router knows of a request."""
Event = tuple[Any, ...]


class World(NamedTuple):
    p: int
    d: int
    wire: frozenset[int]
    """Messages and notices under way, by number; of what is on the wire twice `~number` too."""
    frames: frozenset[Frame]
    router: tuple[tuple[int, int], ...]
    """(attempt, `OPEN`, `FINISHED`, `FAILED` or `ABORTED`) of each request."""
    left: tuple[int, ...]
    """What may still go wrong: of all kinds together, then of each of `FAULTS`."""


class _Item(NamedTuple):
    """On the wire. A notice (of the router, or that a link was cut) is neither lost nor doubled."""

    to: str
    """`p` or `d`."""
    life: str
    """A message: who says it, or, to P, whom it is for. A notice: for which life."""
    link: str
    """To or from which incarnation of D, as P has it."""
    message: Any
    is_notice: bool = False


@dataclass
class Result:
    bounds: Bounds
    num_states: int = 0
    num_transitions: int = 0
    depth: int = 0
    """Events of the longest of the shortest paths."""
    num_terminal: int = 0
    num_sides: int = 0
    exhausted: bool = False
    """Nothing was left to explore: the space within the bounds is covered."""
    seconds: float = 0.0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Pairs of ends of one transfer at P and D, both alive, that were seen."""
    outcomes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """What became of the requests, over the terminal worlds."""

    def __str__(self) -> str:
        rate = self.num_states / max(self.seconds, 1e-9)
        return (
            f"{self.num_states} worlds, {self.num_transitions} transitions, {self.num_sides} sides, "
            f"depth {self.depth}, {self.num_terminal} terminal, exhausted: {self.exhausted}, "
            f"{self.seconds:.1f} s ({rate:.0f} worlds/s)"
        )


COMPATIBLE: dict[str, set[str]] = {
    "done": {"done"},
    RECOMPUTED: {RECOMPUTED},
    "refused": {"refused"},
    "failed": {"done", RECOMPUTED, "failed", "expired", "aborted"},
    "expired": {"done", RECOMPUTED, "failed", "expired", "aborted"},
    "aborted": {"done", RECOMPUTED, "refused", "failed", "expired", "aborted"},
}


class Explorer:
    """Breadth first, so that the first violation found has a shortest path. `explore` may be called once."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.result = Result(bounds)
        self._num_attempts = 1 + bounds.crashes_p + bounds.crashes_d
        keys = range(len(bounds.requests))
        self._numbers = {key_of(i + 1, a): i for i in keys for a in range(self._num_attempts)}
        self._wanted = {key: bounds.requests[i] for key, i in self._numbers.items()}
        self._sides: list[Any] = []
        self._side_ids: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Output, ...]]] = {}
        self._items: list[_Item] = []
        self._item_ids: dict[Hashable, int] = {}
        self._seen_ends: set[tuple[int, int]] = set()
        self._seen_reads: set[tuple[int, frozenset[Frame]]] = set()
        self._parents: dict[World, tuple[World, Event] | None] = {}

    # --- parts: sides and what is on the wire -------------------------------------------------------

    def _intern(self, side: Any) -> int:
        key = side.key()
        number = self._side_ids.get(key)
        if number is None:
            number = self._side_ids[key] = len(self._sides)
            self._sides.append(side)
        return number

    def _item(self, item: _Item) -> int:
        said = item.message
        key = (*item[:3], said if item.is_notice else (type(said), msgspec.msgpack.encode(said)))
        number = self._item_ids.get(key)
        if number is None:
            number = self._item_ids[key] = len(self._items)
            self._items.append(item)
        return number

    def _apply(self, number: int, event: Event, name: Event) -> tuple[int, tuple[Output, ...]]:
        """What the event does to that side, and what it asks for. `name`: the event, hashable."""
        step = self._steps.get((number, name))
        if step is None:
            side = self._sides[number].copy()
            try:
                side.happens(event)
                side.check()
            except Violation:
                raise
            except ProtocolError as e:
                raise Violation(f"correct peers, and yet: {e}") from e
            except (AssertionError, LookupError) as e:
                raise Violation(f"{type(e).__name__} in a port: {e}") from e
            out, side.out = tuple(side.out), []
            step = self._steps[number, name] = self._intern(side), out
        return step

    # --- the world ----------------------------------------------------------------------------------

    def start(self) -> World:
        bounds = self.bounds
        left = (bounds.faults, *(getattr(bounds, kind) for kind in FAULTS))
        p, d = _Prefill("P0", bounds, self._wanted), _Decode("D0", bounds, self._wanted)
        router = tuple((0, OPEN) for _ in bounds.requests)
        world = World(self._intern(p), self._intern(d), frozenset(), frozenset(), router, left)
        world = self._at_p(world, ("peers", "D0"))
        while world.wire and not bounds.handshake:
            world = self._deliver(world, min(world.wire))
        for i in range(len(bounds.requests)):
            world = self._at_p(world, ("submit", key_of(i + 1)))
        return world

    def _at_p(self, world: World, event: Event, name: Event | None = None) -> World:
        number, out = self._apply(world.p, event, name or event)
        world = world._replace(p=number) if number != world.p else world
        return self._emit(world, self._sides[number], out) if out else world

    def _at_d(self, world: World, event: Event, name: Event | None = None, link: str = "") -> World:
        number, out = self._apply(world.d, event, name or event)
        world = world._replace(d=number) if number != world.d else world
        return self._emit(world, self._sides[number], out, link) if out else world

    def _emit(self, world: World, side: Any, out: tuple[Output, ...], link: str = "") -> World:
        """Put what a side asked for on its way."""
        is_p = isinstance(side, _Prefill)
        wire, frames, router = set(world.wire), set(world.frames), list(world.router)
        for output in out:
            match output:
                case ("say", peer, message):
                    if is_p:
                        item = _Item("d", side.incarnation, peer, message)
                    else:
                        transfer = getattr(message, "transfer", None)
                        if transfer is None and peer != self._sides[world.p].incarnation:
                            continue  # a Welcome for a life that is over has nobody to go to
                        item = _Item("p", peer, link if transfer is None else transfer.target, message)
                    number = self._item(item)
                    wire.add(~number if number in wire else number)
                case ("ship", frame):
                    frames.add(frame)
                case ("cancel", transfer):
                    for frame in [f for f in frames if f.transfer == transfer and f.phase == "held"]:
                        _move(frames, frame, "dropped")
                case ("drop", peer):
                    _cut(frames, side.incarnation, peer, drop=True)
                case ("failed", key):
                    self._failed(key, wire, router, "d" if is_p else "p", world)
                case ("refused", key):
                    wire.add(self._item(_Item("p", side.incarnation, "", ("replace", key), True)))
                case ("kept" | "finished", key):
                    i = self._numbers[key]
                    if router[i] == (key.attempt, OPEN):
                        router[i] = key.attempt, FINISHED
        return world._replace(wire=frozenset(wire), frames=frozenset(frames), router=tuple(router))

    def _failed(self, key: RequestKey, wire: set[int], router: list[tuple[int, int]], other: str, world: World) -> None:
        """The attempt failed: the router ends it on the other side and, after a crash, tries again."""
        i = self._numbers[key]
        if router[i] != (key.attempt, OPEN):
            return
        require(not self.bounds.no_failure, f"attempt {key} failed, between healthy peers")
        self._tell_abort(key, wire, world, other)
        if key.attempt + 1 < self._num_attempts:
            router[i] = key.attempt + 1, OPEN
            life = self._sides[world.p].incarnation
            again = ("submit", key_of(i + 1, key.attempt + 1))
            wire.add(self._item(_Item("p", life, "", again, True)))
        else:
            router[i] = key.attempt, FAILED

    def _tell_abort(self, key: RequestKey, wire: set[int], world: World, sides: str) -> None:
        for to in sides:
            life = self._sides[world.p if to == "p" else world.d].incarnation
            wire.add(self._item(_Item(to, life, "", ("abort", key), True)))

    def _deliver(self, world: World, number: int, *, keep: bool = False) -> World:
        item = self._items[number]
        if not keep:
            world = world._replace(wire=_less(world.wire, number))
        if item.is_notice:
            return (self._at_p if item.to == "p" else self._at_d)(world, item.message)
        if item.to == "p":
            return self._at_p(world, ("hear", item.link, item.message), ("hear", number))
        return self._at_d(world, ("hear", item.life, item.message), ("hear", number), item.link)

    def _pay(self, world: World, kind: str) -> World | None:
        at = 1 + FAULTS.index(kind)
        if not world.left[0] or not world.left[at]:
            return None
        left = list(world.left)
        left[0] -= 1
        left[at] -= 1
        return world._replace(left=tuple(left))

    # --- what can happen ------------------------------------------------------------------------------

    def successors(self, world: World) -> Iterator[tuple[Event, Callable[[], World]]]:
        """Each event with what comes of it. The first that is no choice of an adversary is the fair one."""
        for number in sorted(number for number in world.wire if number >= 0):
            yield ("deliver", number), lambda n=number: self._deliver(world, n)
        yield from self._frame_moves(world)
        under_way = bool(world.wire) or any(True for _ in self._frame_moves(world))
        p, d = self._sides[world.p], self._sides[world.d]
        if p.engine.stepping is not None:
            yield ("end step",), lambda: self._at_p(world, ("end",))
        else:
            step = "begin" if self.bounds.split_steps else "step"
            for key in p.engine.can_step():
                yield (step, key), lambda k=key: self._at_p(world, (step, k))
        for key in d.engine.decoding:
            yield ("finish", key), lambda k=key: self._at_d(world, ("finish", k))
        waits = [wait for side in (p, d) if (wait := side.wait()) is not None]
        if waits:
            if not under_way:
                yield ("tick", min(waits)), lambda: self._tick(world, min(waits))
            elif paid := self._pay(world, "delays"):
                yield ("tick while all is slow", min(waits)), lambda: self._tick(paid, min(waits))

    def _tick(self, world: World, seconds: float) -> World:
        return self._at_d(self._at_p(world, ("tick", seconds)), ("tick", seconds))

    def _frame_moves(self, world: World) -> Iterator[tuple[Event, Callable[[], World]]]:
        d = self._sides[world.d]
        for frame in sorted(world.frames):
            event = (frame.phase, frame.transfer, frame.index, frame.ref)
            if frame.phase in ("fetched", "dropped"):
                yield ("sent", *event), lambda f=frame: self._sent(world, f, None)
            elif frame.phase in ("flying", "old"):
                yield ("arrives", *event), lambda f=frame: self._arrives(world, f, f.value)
            elif not self.bounds.pulls:
                yield ("leaves", *event), lambda f=frame: self._sent(world, f, "flying")
            elif d.fetching.get((frame.transfer, frame.index)) == frame.ref:
                yield ("fetched", *event), lambda f=frame: self._arrives(world, f, f.value)

    def _sent(self, world: World, frame: Frame, phase: str | None) -> World:
        frames = world.frames - {frame}
        if phase is not None:
            frames |= {frame._replace(phase=phase)}
        world = world._replace(frames=frames)
        if self._sides[world.p].incarnation != frame.transfer.source:
            return world
        return self._at_p(world, ("sent", frame.transfer, frame.index))

    def _arrives(self, world: World, frame: Frame, value: int) -> World:
        frames = world.frames - {frame}
        if frame.phase == "held":
            frames |= {frame._replace(phase="fetched")}
        event = ("arrive", frame.transfer, frame.index, frame.ref, value)
        return self._at_d(world._replace(frames=frames), event)

    def adversary(self, world: World) -> Iterator[tuple[Event, Callable[[], World]]]:
        """What may happen and need not: faults, and what becomes of what was on a link that was cut."""
        for frame in world.frames:
            event = (frame.phase, frame.transfer, frame.index, frame.ref)
            if frame.phase in ("old", "dead"):
                yield ("is lost", *event), lambda f=frame: world._replace(frames=world.frames - {f})
            elif frame.phase == "dropped" and not self.bounds.pulls:
                yield ("leaves late", *event), lambda f=frame: self._sent(world, f, "old")
        if not world.left[0]:
            return
        p, d = self._sides[world.p], self._sides[world.d]
        messages = [number for number in world.wire if number >= 0 and not self._items[number].is_notice]
        if paid := self._pay(world, "drops"):
            for number in messages:
                yield ("drop", number), lambda w=paid, n=number: w._replace(wire=_less(w.wire, n))
        if paid := self._pay(world, "duplicates"):
            for number in messages:
                yield ("duplicate", number), lambda w=paid, n=number: self._deliver(w, n, keep=True)
        for frame in world.frames:
            event = (frame.phase, frame.transfer, frame.index, frame.ref)
            if frame.phase == "flying" and (paid := self._pay(world, "losses")):
                yield ("is lost", *event), lambda w=paid, f=frame: w._replace(frames=w.frames - {f})
            fetched = d.fetching.get((frame.transfer, frame.index)) == frame.ref and frame.phase in ("held", "dead")
            if (frame.phase in ("flying", "old") or (self.bounds.pulls and fetched)) and (
                paid := self._pay(world, "corruptions")
            ):
                yield ("is corrupted", *event), lambda w=paid, f=frame: self._arrives(w, f, f.value + DAMAGE)
        if paid := self._pay(world, "cuts"):
            yield ("cut",), lambda w=paid: self._cut(w, "pd")
            if self.bounds.half_cuts:
                for who in "pd":
                    yield ("cut, heard by", who), lambda w=paid, who=who: self._cut(w, who)
        if paid := self._pay(world, "control_cuts"):
            restored = self._item(_Item("p", p.incarnation, "", ("restored", d.incarnation), True))
            wire = world.wire - {copy for number in messages for copy in (number, ~number)} | {restored}
            yield ("control is cut",), lambda w=paid, wire=wire: w._replace(wire=wire)
        if paid := self._pay(world, "aborts"):
            for i, (attempt, status) in enumerate(world.router):
                if status == OPEN:
                    yield ("router aborts", i), lambda w=paid, i=i, a=attempt: self._abort(w, i, a)
        if paid := self._pay(world, "crashes_p"):
            for polite in (True, False):
                yield ("P is killed", polite), lambda w=paid, polite=polite: self._crash_p(w, polite)
        if paid := self._pay(world, "crashes_d"):
            yield ("D is killed",), lambda w=paid: self._crash_d(w)

    def _cut(self, world: World, who: str) -> World:
        p, d = self._sides[world.p].incarnation, self._sides[world.d].incarnation
        frames, wire = set(world.frames), set(world.wire)
        _cut(frames, p, d, drop=False)
        for to, life, event in (("p", p, ("cut", d)), ("d", d, ("cut", p))):
            if to in who:
                wire.add(self._item(_Item(to, life, "", event, True)))
        return world._replace(frames=frozenset(frames), wire=frozenset(wire))

    def _abort(self, world: World, i: int, attempt: int) -> World:
        router, wire = list(world.router), set(world.wire)
        router[i] = attempt, ABORTED
        self._tell_abort(key_of(i + 1, attempt), wire, world, "pd")
        return world._replace(router=tuple(router), wire=frozenset(wire))

    def _crash_p(self, world: World, polite: bool) -> World:
        """What D's transport had taken, or (shared memory) can still reach, may come or not."""
        former, d = self._sides[world.p].incarnation, self._sides[world.d]
        frames: set[Frame] = set()
        for frame in world.frames:
            if frame.phase in ("held", "flying", "old", "dead") or not self.bounds.pulls:
                frames.add(frame._replace(phase="dead" if self.bounds.pulls else "old"))
        wire = {n for n in world.wire if self._items[max(n, ~n)].to == "d" or self._is_session(max(n, ~n))}
        if polite:
            wire.add(self._item(_Item("d", d.incarnation, "", ("cut", former), True)))
        return self._restart(
            world, world.router, wire, frames, new_p=_Prefill(_next(former), self.bounds, self._wanted)
        )

    def _crash_d(self, world: World) -> World:
        former = self._sides[world.d].incarnation
        wire = {n for n in world.wire if self._items[max(n, ~n)].to == "p" or self._is_session(max(n, ~n))}
        new = _Decode(_next(former), self.bounds, self._wanted)
        frames = {f for f in world.frames if f.phase not in ("flying", "old", "dead")}
        world = world._replace(d=self._intern(new), wire=frozenset(wire), frames=frozenset(frames))
        p = self._sides[world.p].incarnation
        wire.add(self._item(_Item("p", p, "", ("peers", new.incarnation), True)))
        return self._restart(world, world.router, wire, frames, skip="")

    def _is_session(self, number: int) -> bool:
        """A message about a transfer: what is for a former life may be heard by the next one."""
        return hasattr(self._items[number].message, "transfer")

    def _restart(
        self,
        world: World,
        router: tuple[tuple[int, int], ...],
        wire: set[int],
        frames: set[Frame],
        new_p: _Prefill | None = None,
        skip: str = "",
    ) -> World:
        """The router tries again what ran on the worker that was killed, unless decode has all it needs."""
        decoding = self._sides[world.d].engine.decoding
        new_router = list(router)
        if new_p is not None:
            world = world._replace(p=self._intern(new_p))
        for i, (attempt, status) in enumerate(router):
            key = key_of(i + 1, attempt)
            if status == OPEN and key not in decoding:
                self._failed(key, wire, new_router, "d" if new_p is not None else "p", world)
        world = world._replace(wire=frozenset(wire), frames=frozenset(frames), router=tuple(new_router))
        if new_p is not None:
            world = self._at_p(world, ("peers", self._sides[world.d].incarnation))
        return world

    # --- what always holds ----------------------------------------------------------------------------

    def _check(self, world: World) -> None:
        """I4, across the two: what the transport may read is what the request holds. And compatible ends."""
        if (world.p, world.frames) not in self._seen_reads:
            self._seen_reads.add((world.p, world.frames))
            p = self._sides[world.p]
            for frame in world.frames:
                if frame.transfer.source == p.incarnation and frame.phase in ("held", "dropped"):
                    _, blocks = p.engine.granted.get(frame.transfer.key, (0, ()))
                    own = frame.index < len(blocks) and blocks[frame.index] == frame.block
                    require(own, f"I4: block {frame.index} of {frame.transfer} was given away and may still be read")
        if (world.p, world.d) not in self._seen_ends:
            self._seen_ends.add((world.p, world.d))
            self._check_ends(self._sides[world.p], self._sides[world.d])

    def _check_ends(self, p: _Prefill, d: _Decode) -> None:
        """What one side may conclude of the other.

        P done: D has adopted. P refused: D has refused. P's Nack: D goes on alone. In these D has ended before P. P
        failed, expired or aborted says nothing of D: its answer may be lost or late, and it may have gone on. D done
        or gone on alone: P, if it still waits, waits for just that answer. No P ever regards as refused what D took.
        """
        for transfer, end in p.ends.items():
            if transfer.target != d.incarnation:
                continue
            other = d.ends.get(transfer)
            if other is not None:
                self.result.ends[end, other] += 1
                require(other in COMPATIBLE[end], f"ends of {transfer} do not fit: {end} at P, {other} at D")
            else:
                require(end in ("failed", "expired", "aborted"), f"P has {transfer} {end}, D has not ended it")
        for transfer, end in d.ends.items():
            session = p.port._sessions.get(transfer)
            if end in ("done", RECOMPUTED) and session is not None and not session.ended:
                require(session.state is State.COMMITTED, f"D went on with {transfer}, {session.state} at P")

    def _check_terminal(self, world: World) -> None:
        for side in (self._sides[world.p], self._sides[world.d]):
            require(side.is_idle, f"nothing can happen any more, and {side.incarnation} still holds or waits")
        under_way = [frame for frame in world.frames if frame.phase != "dead"]  # those nobody will ever fetch
        require(not under_way, "nothing can happen any more, and a block is still under way")
        require(all(status != OPEN for _, status in world.router), "a request without an end")
        self.result.num_terminal += 1
        self.result.outcomes[tuple(status for _, status in world.router)] += 1

    # --- breadth first ----------------------------------------------------------------------------------

    def explore(self, max_states: int | None = None) -> Result:
        """Raises Violation, with a shortest path. `max_states`: give up there, `exhausted` is False then."""
        began = time.perf_counter()
        collects = gc.isenabled()
        gc.disable()  # nothing here is garbage before the end, and there is a lot to look through
        try:
            self._search(max_states)
        finally:
            if collects:
                gc.enable()
        self.result.seconds = time.perf_counter() - began
        return self.result

    def _search(self, max_states: int | None) -> None:
        result, parents = self.result, self._parents
        start = self.start()
        self._check(start)
        parents[start] = None
        fair: dict[World, World | None] = {}
        level, depth = [start], 0
        while level and (max_states is None or len(parents) < max_states):
            result.depth = depth
            following: list[World] = []
            for world in level:
                ways, first = list(self.successors(world)), True
                if not ways:
                    self._guard(world, None, lambda w=world: self._check_terminal(w))
                    fair[world] = None
                ways += self.adversary(world)
                for event, follow in ways:
                    new = self._guard(world, event, follow)
                    result.num_transitions += 1
                    if first and world not in fair:
                        fair[world] = new
                    first = False
                    if new not in parents:
                        parents[new] = world, event
                        self._guard(world, event, lambda w=new: self._check(w))
                        following.append(new)
            level, depth = following, depth + 1
        result.exhausted = not level
        result.num_states, result.num_sides = len(parents), len(self._sides)
        if result.exhausted:
            self._check_liveness(fair)

    def _guard(self, world: World, event: Event | None, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Violation as e:
            raise Violation(e.what, self._path(world, event)) from e

    def _path(self, world: World, event: Event | None) -> tuple[str, ...]:
        events = [] if event is None else [event]
        while (step := self._parents[world]) is not None:
            world = step[0]
            events.append(step[1])
        return tuple(self._tell(event) for event in reversed(events))

    def _tell(self, event: Event) -> str:
        what, *rest = event
        if what in ("deliver", "drop", "duplicate"):
            item = self._items[rest[0]]
            text = item.message if item.is_notice else type(item.message).__name__
            return f"{what} to {item.to.upper()} ({item.life}): {text}"
        return " ".join(str(part) for part in event)

    def _check_liveness(self, fair: dict[World, World | None]) -> None:
        """Every chain of fair successors comes to an end."""
        good: set[World] = set()
        for start in fair:
            chain, on_it, world = [], set[World](), start
            while world not in good:
                if world in on_it:
                    raise Violation(
                        "livelock: without further faults the same world comes again", self._path(world, None)
                    )
                chain.append(world)
                on_it.add(world)
                following = fair[world]
                if following is None:
                    break
                world = following
            good.update(chain)


def _less(wire: frozenset[int], number: int) -> frozenset[int]:
    """Without one copy; `~number` is the second one."""
    return wire - {~number if ~number in wire else number}


def _next(incarnation: str) -> str:
    return f"{incarnation[0]}{int(incarnation[1:]) + 1}"


def _move(frames: set[Frame], frame: Frame, phase: str) -> None:
    frames.remove(frame)
    frames.add(frame._replace(phase=phase))


def _cut(frames: set[Frame], source: str, target: str, *, drop: bool) -> None:
    """The link goes: what is on it comes late or never; P's transport lets go of the rest once it is torn down."""
    for frame in [f for f in frames if f.transfer.source == source and f.transfer.target == target]:
        if frame.phase == "flying":
            _move(frames, frame, "old")
        elif drop and frame.phase == "held":
            _move(frames, frame, "dropped")
