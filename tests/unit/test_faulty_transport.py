"""A transport with faults: each fault does what it says, and its owner sees a transport that keeps the rules."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.errors import ConfigError
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.faulty_transport import FAULTS, FaultPlan, FaultyTransport, read_plan
from kv_transfer.registry import open_transport, resolve_transport, shares_memory
from tests.fakes_device import open_end
from tests.fakes_transfer import FakePool, drive, transfer_of, watched

NUM_BLOCKS, BLOCK = 8, 4096
SCHEMES = ["inproc", "zmq+tcp", "shm"]


class Pair:
    """P ships to D, both with the plan in `query`."""

    def __init__(self, scheme: str, query: str = ""):
        self.source, self.target = FakePool(NUM_BLOCKS, BLOCK), FakePool(NUM_BLOCKS, BLOCK)
        self.source.fill(1)
        url = f"faulty+{scheme}?{query}"
        self.p: Any = open_end(url, self.source)
        self.d: Any = open_end(url, self.target)
        self.p.connect("D1", self.d.address)

    def move(self, number: int, indices: range | tuple[int, ...] = range(NUM_BLOCKS)) -> None:
        """Block `i` of one pool to block `i` of the other."""
        blocks = [(i, i) for i in indices]
        if not self.d.pulls:
            self.d.receive("P1", transfer_of(number), (), blocks)
        refs = self.p.ship("D1", transfer_of(number), blocks)
        if self.d.pulls and refs:
            self.d.receive("P1", transfer_of(number), refs, blocks)

    def sent(self) -> Counter[tuple[int, int]]:
        return self._told(self.p, Sent)

    def received(self) -> Counter[tuple[int, int]]:
        return self._told(self.d, Received)

    @staticmethod
    def _told(end: Any, kind: Any) -> Counter[tuple[int, int]]:
        return Counter((int(e.transfer.request_id, 16), i) for e in end.seen if isinstance(e, kind) for i in e.indices)

    def lost(self, end: Any) -> list[str]:
        return [e.peer for e in end.seen if isinstance(e, LinkLost)]

    def drive(self, num_sent: int, num_received: int) -> None:
        drive([self.p, self.d], lambda: (self.sent().total(), self.received().total()) == (num_sent, num_received))

    def right(self) -> list[bool]:
        return [bool((self.source.block(i) == self.target.block(i)).all()) for i in range(NUM_BLOCKS)]

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=SCHEMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_without_faults_it_is_what_is_inside(pair: Pair) -> None:
    pair.move(1)
    pair.drive(8, 8)
    assert all(pair.right())
    assert +pair.p.faults == +pair.d.faults == Counter()
    assert pair.p.next_deadline(0.0) is None


def test_what_it_reaches_is_what_is_inside_after_a_pool_was_registered() -> None:
    """`nixl` knows only then whether blocks come from GPUs."""
    inner: Any = SimpleNamespace(pulls=True, address="", reach="nixl", reaches_gpu=True, fixed_blocks=True)
    inner.register = lambda pool, write, **_: setattr(inner, "reach", "nixl (GPU pools)")
    inner.close = lambda: None
    with contextlib.closing(FaultyTransport(inner)) as faulty:
        assert faulty.reach == "nixl"
        faulty.register(FakePool(1, 8))
        assert faulty.reach == "nixl (GPU pools)"


@pytest.mark.parametrize("end", ["p", "d"])
def test_a_dropped_block_is_sent_and_does_not_come(pair: Pair, end: str) -> None:
    getattr(pair, end).arm("drop", 2)
    pair.move(1)
    pair.drive(8, 6)
    assert set(pair.sent().values()) == {1}
    if end == "d" and not pair.d.pulls:
        pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(NUM_BLOCKS)])
        drive([pair.p, pair.d], lambda: pair.received().total() == 8)  # another copy is welcome


@pytest.mark.parametrize("end", ["p", "d"])
def test_a_doubled_block_is_sent_once(pair: Pair, end: str) -> None:
    getattr(pair, end).arm("duplicate", 3)
    pair.move(1)
    pair.drive(8, 11 if end == "d" else 8)
    if end == "p" and not pair.p.pulls:
        drive([pair.p, pair.d], lambda: pair.d.stats.num_dropped == 3)
    assert set(pair.sent().values()) == {1}
    assert not pair.p._extra
    assert all(pair.right())


@pytest.mark.parametrize("end", ["p", "d"])
@pytest.mark.parametrize("fault", ["delay", "reorder", "slow"])
def test_what_is_late_comes(fault: str, end: str) -> None:
    query = f"at={'ship' if end == 'p' else 'receive'}&delay_s=0.1&bytes_per_s="
    for scheme in SCHEMES:
        pair = Pair(scheme, query + ("200000" if fault == "slow" else "0"))  # eight blocks take 0.16 s
        with contextlib.closing(pair):
            began = time.monotonic()
            if fault != "slow":
                getattr(pair, end).arm(fault, 4)
            pair.move(1)
            pair.drive(8, 8)
            if fault == "delay" or (fault == "slow" and not (end == "p" and pair.p.pulls)):
                assert time.monotonic() - began >= 0.1
            assert all(pair.right())
            assert set(pair.sent().values()) == set(pair.received().values()) == {1}


@pytest.mark.parametrize("fault", ["corrupt", "truncate"])
def test_damage_is_done_before_the_block_is_told(pair: Pair, fault: Any) -> None:
    pair.d.arm(fault, 2)
    pair.move(1)
    seen: list[bool] = []
    while not seen:
        drive([pair.p, pair.d], lambda: bool(pair.received()))
        seen = pair.right()
    pair.drive(8, 8)
    assert pair.right().count(False) == 2
    assert not all(seen)


def test_damage_is_written_as_what_arrives_is() -> None:
    """Who hashes what is written must see it, whatever else the pool is besides memory of the host."""
    pool: Any = FakePool(NUM_BLOCKS, BLOCK)
    pool.device, pool.written = SimpleNamespace(type="cpu"), None  # as a KVCache has
    pool.block_tensor = lambda block: pytest.fail("written behind the back of who hashes")
    seen: list[bytes] = []

    def write(block: int, source: Any) -> None:
        seen.append(source.tobytes())
        pool.block(block)[:] = source

    pair = Pair("inproc")
    with contextlib.closing(pair), contextlib.closing(FaultyTransport(open_transport("inproc"))) as target:
        pair.d.close()
        pair.d = watched(target)
        target.register(pool, write)
        pair.p.connect("D2", target.address)
        target.arm("corrupt")
        target.receive("P1", transfer_of(1), (), [(0, 0)])
        pair.p.ship("D2", transfer_of(1), [(0, 0)])
        pair.drive(1, 1)
        assert seen == [pair.source.block(0).tobytes(), pool.block(0).tobytes()]
        assert seen[0] != seen[1]


def test_a_cut_link_is_told_and_can_be_made_anew(pair: Pair) -> None:
    pair.move(1, (0,))
    pair.drive(1, 1)
    pair.p.arm("cut")
    pair.move(2)
    drive([pair.p, pair.d], lambda: (pair.lost(pair.p), pair.lost(pair.d)) == (["D1"], ["P1"]))
    pair.drive(9, 1)
    pair.p.connect("D1", pair.d.address)
    pair.move(3)
    drive([pair.p, pair.d], lambda: {(3, i) for i in range(NUM_BLOCKS)} <= set(pair.received()))
    pair.d.arm("cut")
    pair.move(4)
    drive([pair.p, pair.d], lambda: pair.lost(pair.d) == ["P1", "P1"])


@pytest.mark.parametrize("fault", ["delay", "reorder"])
def test_after_cancel_nothing_is_written_or_told(pair: Pair, fault: Any) -> None:
    before = pair.target.memory.copy()
    for end in (pair.p, pair.d):
        end.plan = FaultPlan(delay_s=0.05)
        end.arm(fault, 4)
    pair.move(1)
    pair.p.seen += pair.p.completions()
    pair.d.cancel(transfer_of(1))
    pair.p.cancel(transfer_of(1))
    drive([pair.p, pair.d], lambda: pair.sent().total() == 8)
    pair.move(2, (7,))
    drive([pair.p, pair.d], lambda: (2, 7) in pair.received())
    assert set(pair.received()) == {(2, 7)}
    np.testing.assert_array_equal(pair.target.memory[:7], before[:7])
    assert not pair.p._waiting and not pair.d._waiting and not pair.d._targets


def test_what_is_announced_again_is_not_told_by_its_first_copy(pair: Pair) -> None:
    """Pulled again by another ref, a block is written again: until then it is not here."""
    pair.d.plan = FaultPlan(delay_s=3600)
    pair.d.arm("delay", NUM_BLOCKS)
    pair.move(1)
    drive([pair.p, pair.d], lambda: pair.sent().total() == 8 and len(pair.d._waiting) == 8)
    pair.move(1, (0, 1))
    drive([pair.p, pair.d], lambda: pair.received() == {(1, 0): 1, (1, 1): 1})


def test_a_held_end_takes_nothing_in_until_it_is_released(pair: Pair) -> None:
    pair.d.hold()
    pair.move(1)
    with pytest.raises(AssertionError):
        drive([pair.p, pair.d], lambda: bool(pair.d.seen), timeout_s=0.05)
    assert not pair.target.memory.any()
    pair.d.release()
    pair.drive(8, 8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_faults_at_once_keep_the_rules(scheme: str) -> None:
    """Each block gets its `Sent` once; what is told as received was announced; nothing is kept of what has ended."""
    query = "seed=5&delay_s=0.002&bytes_per_s=1e8&" + "&".join(f"{fault}=0.1" for fault in FAULTS if fault != "cut")
    pair = Pair(scheme, query)
    with contextlib.closing(pair):
        for number in range(40):
            pair.move(number)
            if number % 5 == 0:
                pair.p.arm("cut")
            pair.p.seen += pair.p.completions()
            pair.d.seen += pair.d.completions()
            if pair.lost(pair.p):
                pair.p.connect("D1", pair.d.address)
        drive([pair.p, pair.d], lambda: pair.sent().total() == 320 and not pair.d._waiting)
        for number in range(40):
            pair.d.cancel(transfer_of(number))
        assert set(pair.sent().values()) == {1}
        assert set(pair.received()) <= set(pair.sent())
        for end in (pair.p, pair.d):
            assert not any((end._waiting, end._extra, end._targets, end._news))
        assert all(pair.p.faults[f] + pair.d.faults[f] for f in (*FAULTS, "slow"))


def test_a_seed_decides() -> None:
    """The same plan, the same blocks: the same faults."""
    faults = []
    for seed in (1, 1, 2):
        transport = FaultyTransport(open_transport("inproc"), FaultPlan(seed=seed, drop=0.5))
        with contextlib.closing(transport):
            transport.register(FakePool(NUM_BLOCKS, BLOCK))
            for number in range(20):
                transport.ship("nobody", transfer_of(number), [(0, 0)])
            faults.append([sent.transfer for sent in transport.completions() if isinstance(sent, Sent)])
    assert faults[0] == faults[1] != faults[2]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dorp=1", "dorp.*allowed: seed, at, drop"),
        ("drop=1.5", "drop=1.5 is neither"),
        ("drop=-1", "drop"),
        ("drop", "no plan of faults"),
        ("at=nowhere", "nowhere"),
        ("seed=x", "seed"),
    ],
)
def test_a_plan_that_is_none(query: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_transport(f"faulty+inproc://?{query}")


def test_its_urls() -> None:
    assert read_plan("drop=0.01&cut=2&seed=3&at=ship") == FaultPlan(drop=0.01, cut=2, seed=3, at="ship")
    assert read_plan("") == FaultPlan()
    assert resolve_transport("faulty+zmq+tcp?drop=1", one_process=False, host="10.0.0.2") == (
        "faulty+zmq+tcp://10.0.0.2?drop=1"
    )
    assert resolve_transport("faulty+auto?drop=1", one_process=True) == "faulty+inproc://?drop=1"
    assert shares_memory("faulty+shm://?drop=1")
    with pytest.raises(ConfigError, match="unknown transport"):
        open_transport("faulty+pigeon://?drop=1")
