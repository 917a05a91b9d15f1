"""A prefill and a decode worker's ports over a wire that loses, repeats, reorders, delays and corrupts.

Whatever Hypothesis does to them: after every event each block is free or held once (I3), no source block
that the transport may still read has been given away (I4), no target block that the transport may
still write has been given away (I5), nobody decodes from a wrong KV cache; and once the wire is whole again,
every transfer has ended exactly once on both sides and nobody holds a block.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from kv_transfer.session import ENDS, MAX_RELINKS
from kv_transfer.shared_pool import LentBlocks
from prefill_worker.send_port import SendPort
from tests.fakes_transfer import LAYOUT, FakeEngine, FakePool, key_of, worker_info

LEASE = 8.0
BLOCKS_P, BLOCKS_D = 8, 10
PICK = st.integers(0, 1 << 16)
COPIES = [1, 1, 1, 1, 2, 2, 0]
FATES = ["arrives"] * 6 + ["lost", "corrupt"]


class Worker:
    """What both lives have: an engine, memory (block id -> content), and a name."""

    def __init__(self, incarnation: str, num_blocks: int):
        self.incarnation = incarnation
        self.engine = FakeEngine(num_blocks, sharing=True)
        self.memory: dict[int, int] = dict.fromkeys(range(num_blocks), 0)


class Prefill(Worker):
    def __init__(self, incarnation: str, pulls: bool = False):
        super().__init__(incarnation, BLOCKS_P)
        self.port = SendPort(
            worker_id="prefill-0",
            incarnation=incarnation,
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            max_unacked_blocks=3,
            pulls=pulls,
        )
        self.lent = LentBlocks(FakePool(BLOCKS_P, 1), shared=False)
        """Of a transport that pulls."""
        self.reading: Counter[tuple[TransferId, int]] = Counter()
        """(transfer, index) that the transport may still read."""


class Decode(Worker):
    def __init__(self, incarnation: str, pulls: bool = False):
        super().__init__(incarnation, BLOCKS_D)
        self.port = ReceivePort(
            worker_id="decode-0",
            incarnation=incarnation,
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            expected_growth=4,
            pulls=pulls,
        )
        self.writable: dict[TransferId, dict[int, int]] = {}
        """Block id by index, that the transport may write."""
        self.wanted: dict[tuple[TransferId, int], int] = {}
        """Of a transport that pulls: the index by transfer and ref."""


class Frame:
    """A block on its way. Its content is read from P's memory when it arrives: zero-copy."""

    def __init__(self, transfer: TransferId, index: int, block: int, source: Prefill, ref: int):
        self.transfer, self.index, self.block, self.source, self.ref = transfer, index, block, source, ref


def content(tokens: Sequence[int], index: int) -> int:
    """What the block at `index` of a prompt holds: depends on all tokens up to its end."""
    return hash(tuple(tokens[: (index + 1) * LAYOUT.block_size])) & 0xFFFF_FFFF


class HandOver(RuleBasedStateMachine):
    pulls = False
    """The transport pulls: a frame is what P has lent, D fetches it once it has heard its ref, P can take it back."""

    @initialize(lent_elsewhere=st.booleans())
    def start(self, lent_elsewhere: bool = False) -> None:
        """`lent_elsewhere`: other transfers, to another decode worker, lend all of P's blocks all the time."""
        self.now = 0.0
        self.num_requests = self.num_lives = 0
        self.wire: list[tuple[str, str, Any]] = []
        """(from, to, message)."""
        self.frames: list[Frame] = []
        self.late: list[tuple[TransferId, int, int]] = []
        """(transfer, index, content) of blocks that were on a link when it was cut, and may still arrive."""
        self.failed: Counter[RequestKey] = Counter()
        self.moved: list[int] = []
        """Blocks that each hand-over moved, as P tells the router."""
        self.offered: set[RequestKey] = set()
        self.tokens: dict[RequestKey, tuple[int, ...]] = {}
        """Each request's prompt."""
        self.p, self.d = Prefill("P0", self.pulls), Decode("D0", self.pulls)
        for block in range(BLOCKS_P if lent_elsewhere else 0):
            self.p.lent.lend(block)
        self.act(self.p, self.p.port.on_peers((worker_info("D0"),), self.now))
        while self.wire:
            self.hear(self.wire.pop(0))

    # --- the driver -------------------------------------------------------------------------------

    def act(self, worker: Prefill | Decode, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToPeer(peer, message):
                    self.wire.append((worker.incarnation, peer, message))
                case ShipBlocks(_, transfer, blocks):
                    assert isinstance(worker, Prefill)
                    refs = []
                    for index, block in blocks:
                        refs.append(worker.lent.lend(block))
                        worker.reading[transfer, index] += 1
                        self.frames.append(Frame(transfer, index, block, worker, refs[-1]))
                    named = tuple(refs) if self.pulls else ()
                    shipped = tuple(index for index, _ in blocks)
                    self.act(worker, worker.port.on_shipped(transfer, shipped, named, self.now))
                case HashBlocks(transfer, blocks):
                    assert isinstance(worker, Prefill)
                    checksums = {index: worker.memory[block] for index, block in blocks}
                    self.act(worker, worker.port.on_hashed(transfer, checksums, self.now))
                case ReceiveBlocks(_, transfer, refs, blocks):
                    assert isinstance(worker, Decode)
                    assert len(refs) == len(blocks) * self.pulls
                    worker.writable.setdefault(transfer, {}).update(blocks)
                    worker.wanted.update({(transfer, ref): i for ref, (i, _) in zip(refs, blocks, strict=False)})
                case CancelTransfer(transfer):
                    if isinstance(worker, Decode):
                        worker.writable.pop(transfer, None)
                    elif self.pulls:
                        for frame in [f for f in self.frames if f.source is worker and f.transfer == transfer]:
                            self.land(frame, arrives=False)
                case DropLink(peer):
                    for frame in [f for f in self.frames if f.source is worker and f.transfer.target == peer]:
                        self.land(frame, arrives=False)
                case ToRouter(AttemptFailed(_, key)):
                    self.failed[key] += 1
                    self.abort(key)
                case ToRouter(HandoffRefused(_, key)):
                    # As the router would: place it anew, where it was refused keep it.
                    self.act(worker, self.p.port.replace(Replace(key, None), self.now))
                case ToRouter(HandoffDone(blocks=blocks)):
                    self.moved.append(blocks)
                case ConnectPeer():
                    pass
                case _:
                    raise AssertionError(action)

    def hear(self, item: tuple[str, str, Any]) -> None:
        sender, receiver, message = item
        for worker in (self.p, self.d):
            if worker.incarnation == receiver:
                self.act(worker, worker.port.on_message(sender, message, self.now))

    def land(self, frame: Frame, arrives: bool = True, corrupt: bool = False) -> None:
        """The transport is done with a frame: written at D or not, it is `Sent`."""
        self.frames.remove(frame)
        if arrives and frame.transfer.target == self.d.incarnation and self.is_wanted(frame):
            block = self.d.writable.get(frame.transfer, {}).pop(frame.index, None)
            if block is not None:
                value = frame.source.memory[frame.block] ^ corrupt
                self.d.memory[block] = value
                self.act(self.d, self.d.port.on_received(frame.transfer, {frame.index: value}, self.now))
        self.d.wanted.pop((frame.transfer, frame.ref), None)
        frame.source.lent.give_back(frame.block)
        frame.source.reading[frame.transfer, frame.index] -= 1
        if frame.source is self.p:
            self.act(self.p, self.p.port.on_sent(frame.transfer, (frame.index,), self.now))

    def is_wanted(self, frame: Frame) -> bool:
        return not self.pulls or self.d.wanted.get((frame.transfer, frame.ref)) == frame.index

    def can_land(self) -> list[Frame]:
        """Frames that may arrive now: of a transport that pulls those that D has heard of."""
        return [frame for frame in self.frames if frame.source is not self.p or self.is_wanted(frame)]

    def abort(self, key: RequestKey) -> None:
        self.act(self.d, self.d.port.on_abort(key, self.now))
        if key in self.d.engine.decoding:
            self.d.engine.finish(key)
            self.act(self.d, self.d.port.on_blocks_free(self.now))
        for effect in self.p.engine.abort(key, self.now):
            self.act(self.p, self.p.port.on_ended(effect, self.now))  # type: ignore[arg-type]

    def compute(self, key: RequestKey, num_tokens: int) -> None:
        if key in self.p.engine.ended:
            return
        request = self.p.engine.granted[key]
        if request.num_computed == request.num_context:
            return
        for effect in self.p.engine.compute(key, num_tokens):
            if hasattr(effect, "first_token"):
                self.act(self.p, self.p.port.on_prompt_done(effect, self.now))  # type: ignore[arg-type]
            else:
                for index, block in effect.blocks:  # type: ignore[union-attr]
                    self.p.memory[block] = content(request.tokens[: request.num_context], index)
                self.act(self.p, self.p.port.on_chunk(effect, self.now))  # type: ignore[arg-type]

    # --- events -----------------------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 24), max_tokens=st.integers(2, 20), family=st.integers(0, 2))
    def submit(self, num_tokens: int, max_tokens: int, family: int = 0) -> None:
        """Prompts of one family begin alike."""
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens)
        prompt = tuple(range(100 * family, 100 * family + num_tokens))
        submit = Submit(key_of(self.num_requests), prompt, sampling, decode="decode-0")
        self.tokens[submit.key] = prompt
        self.offered.add(submit.key)
        self.p.engine.submit(submit)
        self.act(self.p, self.p.port.offer(submit, self.now))

    @precondition(lambda self: self.wire)
    @rule(pick=PICK, copies=st.sampled_from(COPIES))
    def deliver(self, pick: int, copies: int) -> None:
        """Any message: lost (0), once, or twice, the second now or later."""
        item = self.wire.pop(pick % len(self.wire))
        if copies == 2:
            self.wire.append(item)
        if copies:
            self.hear(item)

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 8))
    def deliver_in_order(self, count: int) -> None:
        items, self.wire = self.wire[:count], self.wire[count:]
        for item in items:
            self.hear(item)

    @precondition(lambda self: self.can_land())
    @rule(pick=PICK, fate=st.sampled_from(FATES))
    def frame(self, pick: int, fate: str) -> None:
        frames = self.can_land()
        frame = frames[pick % len(frames)]
        self.land(frame, arrives=fate != "lost", corrupt=fate == "corrupt")

    @precondition(lambda self: self.p.engine.granted)
    @rule(pick=PICK, num_tokens=st.integers(1, 30))
    def step(self, pick: int, num_tokens: int) -> None:
        granted = sorted(self.p.engine.granted)
        self.compute(granted[pick % len(granted)], num_tokens)

    @precondition(lambda self: self.d.engine.decoding)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        decoding = sorted(self.d.engine.decoding)
        self.d.engine.finish(decoding[pick % len(decoding)])
        self.act(self.d, self.d.port.on_blocks_free(self.now))

    @precondition(lambda self: self.num_requests)
    @rule(pick=PICK)
    def router_aborts(self, pick: int) -> None:
        self.abort(key_of(1 + pick % self.num_requests))

    @rule(seconds=st.floats(0.1, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for worker in (self.p, self.d):
            deadline = worker.port.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.act(worker, worker.port.on_deadline(self.now))
                following = worker.port.next_deadline()
                assert following is None or following > self.now, "a deadline in the past spins"

    @precondition(lambda self: self.num_requests)
    @rule(who=st.sampled_from("pd"))
    def link_lost(self, who: str) -> None:
        if who == "p":
            self.act(self.p, self.p.port.on_link_lost(self.d.incarnation, "reset", self.now))
        else:
            self.act(self.d, self.d.port.on_link_lost(self.p.incarnation, "reset", self.now))

    @precondition(lambda self: self.num_requests)
    @rule(first=st.sampled_from("pd"), late=st.booleans())
    def cut(self, first: str, late: bool = False) -> None:
        """The link goes, and both sides hear of it. What was on it is lost, or (of a link that pushes) comes late."""
        if late and not self.pulls:
            frames = [frame for frame in self.frames if frame.source is self.p]
            self.late += [(f.transfer, f.index, self.p.memory[f.block]) for f in frames]
        for who in sorted("pd", key=lambda who: who != first):
            self.link_lost(who)

    @precondition(lambda self: self.late)
    @rule(pick=PICK)
    def late_frame(self, pick: int) -> None:
        transfer, index, value = self.late.pop(pick % len(self.late))
        block = self.d.writable.get(transfer, {}).pop(index, None)
        if block is not None:
            self.d.memory[block] = value
            self.act(self.d, self.d.port.on_received(transfer, {index: value}, self.now))

    @precondition(lambda self: self.num_requests)
    @rule(who=st.sampled_from("pd"), polite=st.booleans())
    def crash(self, who: str, polite: bool) -> None:
        """A worker is killed and starts anew; what its former life said is still on the wire."""
        self.num_lives += 1
        if who == "p":
            for frame in [f for f in self.frames if f.source is self.p]:
                self.land_dead(frame)
            former, self.p = self.p.incarnation, Prefill(f"P{self.num_lives}", self.pulls)
            self.act(self.p, self.p.port.on_peers((worker_info(self.d.incarnation),), self.now))
            if polite:
                self.act(self.d, self.d.port.on_link_lost(former, "killed", self.now))
        else:
            self.d = Decode(f"D{self.num_lives}", self.pulls)
            self.act(self.p, self.p.port.on_peers((worker_info(self.d.incarnation),), self.now))

    def land_dead(self, frame: Frame) -> None:
        """A killed sender's frames: gone, or (they were in the kernel) still arriving, whole."""
        self.frames.remove(frame)
        if frame.index % 2 and self.is_wanted(frame):
            block = self.d.writable.get(frame.transfer, {}).pop(frame.index, None)
            if block is not None:
                value = frame.source.memory[frame.block]
                self.d.memory[block] = value
                self.act(self.d, self.d.port.on_received(frame.transfer, {frame.index: value}, self.now))

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def blocks_are_conserved(self) -> None:  # I3
        self.p.engine.check()
        self.d.engine.check()

    @invariant()
    def no_source_is_given_away(self) -> None:  # I4
        for frame in self.frames:
            if frame.source is self.p:
                holder = self.p.engine.granted[frame.transfer.key]
                assert holder.blocks[frame.index] == frame.block
                assert self.p.memory[frame.block] == content(self.tokens[frame.transfer.key], frame.index)

    @invariant()
    def no_target_is_given_away(self) -> None:  # I5
        for transfer, blocks in self.d.writable.items():
            if blocks:
                request = self.d.engine.reserved[transfer.key]
                assert set(blocks.values()) <= set(request.blocks[request.num_prefix_blocks :])
                assert all(self.d.engine.refs[block] == 1 for block in blocks.values()), "others read it already"

    @invariant()
    def nobody_decodes_from_a_wrong_cache(self) -> None:
        for key, (request, how) in self.d.engine.decoding.items():
            if how == "adopted":
                for index in range(LAYOUT.num_blocks_for(request.num_context)):
                    assert self.d.memory[request.blocks[index]] == content(self.tokens[key], index)

    @invariant()
    def every_transfer_is_open_or_has_ended_once(self) -> None:
        for port in (self.p.port, self.d.port):
            ended = sum(port.counters[end.value] for end in ENDS)
            assert port.counters["offered"] == ended + sum(not s.ended for s in port._sessions.values())

    @invariant()
    def those_that_wait_are_counted(self) -> None:
        self.d.port._waiting.check()

    def teardown(self) -> None:
        """The wire is whole again, the engines work, time passes: everything must end by itself."""
        if not hasattr(self, "p"):
            return
        for _ in range(2000):
            while self.wire or self.can_land():
                if self.wire:
                    self.hear(self.wire.pop(0))
                if frames := self.can_land():
                    self.land(frames[0])
            for key in list(self.p.engine.granted):
                self.compute(key, 100)
            for key in list(self.d.engine.decoding):
                self.d.engine.finish(key)
                self.act(self.d, self.d.port.on_blocks_free(self.now))
            if self.wire or self.can_land():
                continue
            deadlines = [d for w in (self.p, self.d) if (d := w.port.next_deadline()) is not None]
            if not deadlines:
                break
            self.now = max(self.now, min(deadlines))
            for worker in (self.p, self.d):
                self.act(worker, worker.port.on_deadline(self.now))
        for worker in (self.p, self.d):
            assert worker.port.next_deadline() is None
            assert worker.port.num_open() == 0, (worker.port._sessions, self.now)
            assert not worker.port._sessions
            assert not worker.port._by_key
            assert sorted(worker.engine.free) == list(range(worker.engine.num_blocks)), worker.incarnation
        assert not self.d.port._waiting
        assert not self.p.engine.waiting, "a request without an end"


HandOver.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestHandOver = HandOver.TestCase


class PullingHandOver(HandOver):
    pulls = True


PullingHandOver.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestPullingHandOver = PullingHandOver.TestCase


def walk(seed: int, num_steps: int = 200, kind: type[HandOver] = HandOver) -> Counter[str]:
    """A long random life; Hypothesis shrinks, this one goes deeper. Returns both sides' counts of the last lives."""
    rng = random.Random(seed)
    pick = lambda: rng.randrange(1 << 16)
    machine = kind()
    machine.start()
    checks = [
        machine.blocks_are_conserved,
        machine.no_source_is_given_away,
        machine.no_target_is_given_away,
        machine.nobody_decodes_from_a_wrong_cache,
        machine.every_transfer_is_open_or_has_ended_once,
        machine.those_that_wait_are_counted,
    ]
    calm = seed % 3 == 0  # few faults: long queues instead
    for _ in range(num_steps):
        events: list[tuple[float, bool, Any]] = [
            (2, True, lambda: machine.submit(rng.randint(1, 24), rng.randint(2, 20), rng.randint(0, 2))),
            (8, bool(machine.wire), lambda: machine.deliver(pick(), 1 if calm else rng.choice(COPIES))),
            (4, bool(machine.wire), lambda: machine.deliver_in_order(rng.randint(1, 8))),
            (8, bool(machine.can_land()), lambda: machine.frame(pick(), "arrives" if calm else rng.choice(FATES))),
            (6, bool(machine.p.engine.granted), lambda: machine.step(pick(), rng.randint(1, 30))),
            (3, bool(machine.d.engine.decoding), lambda: machine.finish(pick())),
            (0.5, bool(machine.num_requests), lambda: machine.router_aborts(pick())),
            (1, True, lambda: machine.time_passes(rng.uniform(0.1, 4))),
            (0.1, True, lambda: machine.link_lost(rng.choice("pd"))),
            (0.1, True, lambda: machine.cut(rng.choice("pd"), rng.random() < 0.5)),
            (2, bool(machine.late), lambda: machine.late_frame(pick())),
            (0.1, True, lambda: machine.crash(rng.choice("pd"), rng.random() < 0.5)),
        ]
        possible = [(weight, event) for weight, enabled, event in events if enabled]
        rng.choices([e for _, e in possible], [w for w, _ in possible])[0]()
        for check in checks:
            check()
    machine.teardown()
    counters = machine.p.port.counters + machine.d.port.counters
    counters["moved nothing"] = machine.moved.count(0)
    return counters


@pytest.mark.parametrize("start", range(0, 200, 50))
@pytest.mark.parametrize("kind", [HandOver, PullingHandOver])
def test_long_random_lives(kind: type[HandOver], start: int) -> None:
    counters: Counter[str] = Counter()
    for seed in range(start, start + 50):
        try:
            counters += walk(seed, kind=kind)
        except Exception as e:
            e.add_note(f"seed {seed}")
            raise
    # No proof if it only ever saw failures: every end and every way to be ignored was taken.
    for name in (*(end.value for end in ENDS), "ignored", "unknown", "corrupt", "moved nothing"):
        assert counters[name] > 0, counters


def test_without_faults_everything_is_adopted() -> None:
    machine = HandOver()
    machine.start()
    machine.submit(num_tokens=10, max_tokens=4)
    try:
        machine.teardown()
    except ProtocolError as e:  # pragma: no cover
        raise AssertionError("correct peers, and yet") from e
    assert machine.p.port.counters["done"] == machine.d.port.counters["done"] == 1
    assert not machine.failed


def life_with_cuts(seed: int, kind: type[HandOver]) -> int:
    """Two requests between peers that are well; what is under way arrives before time passes. Returns how many cuts."""
    rng = random.Random(seed)
    pick = lambda: rng.randrange(1 << 16)
    machine = kind()
    machine.start(lent_elsewhere=bool(seed % 2))
    for _ in range(2):
        machine.submit(rng.randint(1, 16), 4, rng.randint(0, 2))
    num_cuts = 0
    for _ in range(60):
        granted = sorted(machine.p.engine.granted)
        events: list[tuple[bool, Any]] = [
            (bool(machine.wire), lambda: machine.deliver_in_order(1)),
            (bool(machine.can_land()), lambda: machine.frame(pick(), "arrives")),
            (bool(machine.late), lambda: machine.late_frame(pick())),
            (bool(granted), lambda keys=granted: machine.compute(rng.choice(keys), rng.randint(1, 8))),
            (num_cuts < MAX_RELINKS, lambda: machine.cut(rng.choice("pd"), rng.random() < 0.5)),
        ]
        possible = [number for number, (enabled, _) in enumerate(events) if enabled]
        if possible:
            chosen = rng.choice(possible)
            num_cuts += chosen == 4
            events[chosen][1]()
    while machine.wire or machine.can_land():
        machine.deliver_in_order(len(machine.wire))
        if frames := machine.can_land():
            machine.land(frames[0])
    assert not machine.frames, "lent, and decode does not fetch it"
    machine.teardown()
    assert not machine.failed
    assert machine.p.port.counters["done"] == machine.d.port.counters["done"] == 2
    return num_cuts


@pytest.mark.parametrize("kind", [HandOver, PullingHandOver])
def test_cuts_between_healthy_peers_fail_no_attempt(kind: type[HandOver]) -> None:
    num_cuts = 0
    for seed in range(100):
        try:
            num_cuts += life_with_cuts(seed, kind)
        except Exception as e:
            e.add_note(f"seed {seed}")
            raise
    assert num_cuts > 100
