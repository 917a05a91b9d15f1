"""What `nixl` promises beyond the contract that all transports keep: reads under way, epochs, its links over TCP."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from baton.layout import KVLayout
from kv_transfer import nixl_agent
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.nixl_transport import _REACHABLE, NixlTransport, Reachable
from kv_transfer.pull_messages import EXPORT, FINISHED, Export
from kv_transfer.registry import open_transport
from kv_transfer.shared_pool import LENDINGS, MAX_SHARED_BLOCKS
from kv_transfer.tcp_link import GREETING, TcpListener, TcpToSource, TcpToTarget
from tests.fakes_transfer import FakePool, drive, transfer_of, watched
from tests.stub_cluster import StubCluster, expected_tokens

BLOCK = 8 << 10

needs_nixl = pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")


class Pair:
    """P ships to D, whose reads end only while `gate` is open."""

    def __init__(self, num_blocks: int = 8):
        self.source, self.target = FakePool(num_blocks, BLOCK), FakePool(num_blocks, BLOCK)
        self.source.fill(1)
        self.p: Any = watched(NixlTransport())
        self.d: Any = watched(NixlTransport())
        self.p.register(self.source, incarnation="P1")
        self.d.register(self.target)
        self.p.connect("D1", self.d.address)
        self.gate = True
        self.asked = 0
        is_done = self.d._agent.is_done

        def gated(handle: int) -> bool:
            self.asked += 1
            return self.gate and is_done(handle)

        self.d._agent.is_done = gated

    def move(self, number: int, *blocks: int) -> None:
        """Each block to the one of the same id."""
        pairs = list(enumerate(blocks))
        self.d.receive("P1", transfer_of(number), self.p.ship("D1", transfer_of(number), pairs), pairs)

    def start(self, number: int, *blocks: int) -> None:
        """As `move`; the blocks have been read when this returns, and D does not know yet."""
        self.gate = False
        self.move(number, *blocks)
        drive([self.p, self.d], lambda: self.reads() > 0)
        link = self.d._sources[0]
        drive([self.d], lambda: all(self.arrived(link.pool, read) for read in link.pool.reads))

    def arrived(self, remote: Any, read: Any) -> bool:
        return all(
            np.array_equal(remote._scratch[slot], self.source.block(fetch.block))
            for fetch, slot in zip(read.fetches, read.slots, strict=True)
        )

    def sent(self, number: int) -> list[int]:
        return [i for e in self.p.seen if isinstance(e, Sent) and e.transfer == transfer_of(number) for i in e.indices]

    def received(self, number: int) -> list[int]:
        events = [e for e in self.d.seen if isinstance(e, Received) and e.transfer == transfer_of(number)]
        return [i for e in events for i in e.indices]

    def wait(self, number: int, count: int) -> None:
        drive([self.p, self.d], lambda: len(self.sent(number)) == len(self.received(number)) == count)

    def reads(self) -> int:
        return sum(len(link.pool.reads) for link in self.d._sources if link.pool is not None)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@needs_nixl
def test_a_cancelled_read_gives_blocks_back_at_once_and_writes_nothing(pair: Pair) -> None:
    pair.start(1, 3, 4)
    pair.d.cancel(transfer_of(1))
    drive([pair.p], lambda: sorted(pair.sent(1)) == [0, 1])
    assert pair.reads() == 1, "it is still on its way"
    room = pair.d._sources[0].pool.room
    pair.gate = True
    drive([pair.d], lambda: pair.reads() == 0)
    assert pair.d._sources[0].pool.room == room + 2, "its scratch memory is used again, and only now"
    assert pair.received(1) == []
    assert not pair.target.memory.any()
    pair.move(2, 3)
    pair.wait(2, 1)
    assert sorted(pair.sent(1)) == [0, 1], "told once"


@needs_nixl
@pytest.mark.parametrize("end", ["cancel", "disconnect"])
def test_what_was_given_back_while_it_was_read_does_not_count(pair: Pair, end: str) -> None:
    """I4: the source waits for no reader, so the reader finds out by the epochs, which it reads behind the blocks."""
    pair.start(1, 3, 4)
    if end == "cancel":
        pair.p.cancel(transfer_of(1))
    else:
        pair.p._take_back_from("D1")  # as a disconnect does, whose news has not arrived yet
    drive([pair.p], lambda: sorted(pair.sent(1)) == [0, 1])
    pair.source.block(3)[:] = 9  # somebody else's
    pair.gate = True
    drive([pair.d], lambda: pair.reads() == 0)
    assert pair.received(1) == []
    assert not pair.target.memory.any()
    assert pair.d.stats.num_dropped == 2


@needs_nixl
def test_a_link_that_is_cut_during_a_read_leaves_nothing(pair: Pair) -> None:
    pair.start(1, 3)
    pair.p.disconnect("D1")
    drive([pair.d], lambda: any(isinstance(e, LinkLost) for e in pair.d.seen))
    assert pair.d.next_deadline(0.0) is None, "nobody waits for it"
    (closing,) = pair.d._closing
    pair.gate = True
    pair.d.completions()
    assert not pair.d._closing
    assert not closing._registered, "its memory is free again"
    assert not pair.target.memory.any()
    pair.p.connect("D1", pair.d.address)
    pair.move(2, 3)
    pair.wait(2, 1)
    assert not pair.d._wanted.get(transfer_of(1))


@needs_nixl
def test_reads_that_fail_end_the_link_and_every_block_is_sent(pair: Pair) -> None:
    pair.move(9, 0)
    pair.wait(9, 1)
    pair.start(1, 3)

    def failed(handle: int) -> bool:
        raise OSError("a read failed: NIXL_ERR_REMOTE_DISCONNECT")

    pair.d._agent.is_done = failed
    drive([pair.p, pair.d], lambda: pair.sent(1) == [0] and len(pair.d.seen) > 1)
    assert pair.d.seen[-1] == LinkLost(
        "P1", "its link was lost: a read failed: NIXL_ERR_REMOTE_DISCONNECT", incoming=True
    )
    assert any(isinstance(e, LinkLost) and e.peer == "D1" for e in pair.p.seen)
    assert not pair.d._closing


@needs_nixl
def test_made_up_refs_read_nothing(pair: Pair) -> None:
    refs = pair.p.ship("D1", transfer_of(1), [(0, 1), (1, 2), (2, 3)])
    pair.d.receive("P1", transfer_of(1), (refs[0] + MAX_SHARED_BLOCKS * LENDINGS, 8, refs[2]), [(0, 4), (1, 5), (2, 6)])
    drive([pair.p, pair.d], lambda: pair.sent(1) == [2] and pair.d.stats.num_dropped == 2)
    assert pair.received(1) == [2]
    assert not pair.target.memory[[4, 5]].any()


@needs_nixl
def test_reads_are_asked_about_at_growing_intervals_and_nothing_polls_without_them(pair: Pair) -> None:
    pair.move(1, 0)
    pair.wait(1, 1)
    assert pair.d.next_deadline(0.0) is None
    pair.start(2, 1)
    intervals = []
    for _ in range(12):
        pair.d.completions()
        deadline = pair.d.next_deadline(0.0)
        assert pair.d.next_deadline(1.0) == deadline, "it does not move on with the clock"
        intervals.append(deadline)
    assert intervals == sorted(intervals)
    assert intervals[-1] == pair.d.last_retry_s
    assert pair.p.next_deadline(0.0) is None, "the source is told"
    pair.gate = True
    pair.wait(2, 1)
    assert pair.d.next_deadline(0.0) is None


@needs_nixl
def test_idle_agents_do_not_spin(pair: Pair) -> None:
    """NIXL's serving thread does by default."""
    pair.move(1, 0)
    pair.wait(1, 1)
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.15


@needs_nixl
@pytest.mark.parametrize("kind", ["garbage", "other blocks", "no handle", "no metadata", "twice", "length"])
def test_malformed_exports_close_their_link_only(pair: Pair, kind: str) -> None:
    handle = pair.p._exported()[0]
    export = Export("P9", 8, BLOCK, handle)
    match kind:
        case "other blocks":
            export = Export("P9", 8, BLOCK // 2, handle)
        case "no handle":
            export = Export("P9", 8, BLOCK, b"")
        case "no metadata":
            export = Export("P9", 8, BLOCK, EXPORT.encode(Export("x", 1, 1)))
    message = b"\xc1" if kind == "garbage" else EXPORT.encode(export)
    framed = len(message).to_bytes(4, "big") + message
    host, _, port = pair.d.address.removeprefix("nixl://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\xff\xff\xff\xff" if kind == "length" else framed * (2 if kind == "twice" else 1))
        raw.settimeout(0.02)
        closed, give_up = False, time.monotonic() + 10
        while not closed:
            assert time.monotonic() < give_up
            pair.d.completions()
            try:
                closed = not raw.recv(100)
            except TimeoutError:
                pass
            except ConnectionResetError:
                closed = True
    assert pair.d.stats.num_malformed == (kind != "length")
    pair.move(1, 3)
    pair.wait(1, 1)


@needs_nixl
def test_metadata_of_a_forger_is_refused(pair: Pair) -> None:
    handle = _REACHABLE.encode(Reachable(b"not NIXL's", 1 << 40, 0, False, 1 << 41))
    with pytest.raises(OSError, match="NIXL cannot reach the peer"):
        pair.d._borrow(Export("P9", 8, BLOCK, handle), [])


@needs_nixl
@pytest.mark.parametrize("failing", [1, 2, "memory"])
def test_a_pool_that_there_is_no_memory_to_read_to_leaves_nothing(
    pair: Pair, failing: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, register, deregister, remove = pair.d._agent, pair.d._agent.register, pair.d._agent.deregister, []
    registered: list[Any] = []

    def refusing(region: Any, *, on_gpu: bool) -> Any:
        if len(registered) + 1 == failing:
            raise OSError("NIXL cannot register")
        registered.append(register(region, on_gpu=on_gpu))
        return registered[-1]

    def out_of_memory(num_slots: int) -> Any:
        raise RuntimeError("CUDA out of memory")

    def forgetting(memory: Any) -> None:
        deregister(memory)
        registered.remove(memory)

    monkeypatch.setattr(agent, "register", refusing)
    monkeypatch.setattr(agent, "deregister", forgetting)
    monkeypatch.setattr(agent, "remove_peer", remove.append)
    if failing == "memory":
        monkeypatch.setattr(pair.d._own, "scratch", out_of_memory)
    with pytest.raises(OSError, match=r"cannot register|CUDA out of memory"):
        pair.d._borrow(Export("P9", 8, BLOCK, pair.p._exported()[0]), [])
    assert registered == []
    assert len(remove) == 1 and not pair.d._uses


@needs_nixl
def test_memory_that_nixl_does_not_let_go_of_is_no_end(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    agent = pair.d._agent
    memory = agent.register((pair.target.memory.ctypes.data, BLOCK, 0), on_gpu=False)
    agent.deregister(memory)
    with caplog.at_level("WARNING"):
        agent.deregister(memory)
    assert "did not let go of memory" in caplog.text


@needs_nixl
def test_a_kv_cache_moves(pair: Pair) -> None:
    layout = KVLayout(2, 2, 16, 8, "float32")
    caches = [KVCache(layout, 6), KVCache(layout, 6)]
    caches[0].tensor.normal_()
    p, d = (watched(open_transport("nixl")) for _ in caches)
    with contextlib.closing(p), contextlib.closing(d):
        for transport, cache in zip((p, d), caches, strict=True):
            transport.register(cache, incarnation="P1")
        p.connect("D1", d.address)
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), [(0, 2), (1, 5)]), [(0, 1), (1, 0)])
        drive([p, d], lambda: sum(isinstance(e, Received) for e in d.seen) >= 1 and len(p.seen) >= 1)
    assert (caches[1].tensor[[1, 0]] == caches[0].tensor[[2, 5]]).all()


@needs_nixl
def test_a_cluster_hands_over_by_nixl() -> None:
    """Threads, sockets and sessions; every position is checked in the pools. One request is aborted by its client."""
    engine = {"max_batch_tokens": 48, "max_batch_requests": 8}
    with StubCluster({"prefill": {}, "decode": {}}, transport="nixl", engine=engine) as cluster:
        prompts = [[(7 * length + i) % 90 for i in range(length)] for length in (1, 16, 100, 150)]
        with cluster.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
            for done, prompt in zip(
                pool.map(lambda p: client.generate(p, max_tokens=20, seed=0), prompts), prompts, strict=True
            ):
                assert list(done.token_ids) == expected_tokens(prompt, 20)
                assert done.kv_bytes > 0
            stream = client.stream(prompts[3], max_tokens=200, seed=0)
            next(iter(stream))
            stream.cancel()
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []


@needs_nixl
def test_nixl_says_why_it_cannot_listen(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        open_transport(pair.d.address)


def test_a_machine_without_nixl_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"):
        open_transport("nixl")


# --- links over TCP ---------------------------------------------------------------------------------


def test_messages_arrive_whole_however_they_are_cut() -> None:
    listener = TcpListener("127.0.0.1", 0)
    link = TcpToTarget(f"127.0.0.1:{listener.port}")
    with listener.sock, link.sock:
        listener.sock.setblocking(True)
        raw, _ = listener.sock.accept()
        with raw:
            framed = b"".join(len(m).to_bytes(4, "big") + m for m in (GREETING, b"one", b"another"))
            seen = []
            link.sock.setblocking(True)
            for byte in framed:
                raw.sendall(bytes([byte]))
                link.sock.recv(1, socket.MSG_PEEK)
                link.sock.setblocking(False)
                if (message := link.receive()) is not None:
                    seen.append(message)
                link.sock.setblocking(True)
            assert seen == [b"one", b"another"]
            assert link.is_up
        link.sock.settimeout(10)
        assert link.sock.recv(1) == b""
        link.sock.setblocking(False)
        assert link.receive() == b""


def test_who_does_not_greet_is_no_target() -> None:
    listener = TcpListener("127.0.0.1", 0)
    link = TcpToTarget(f"127.0.0.1:{listener.port}")
    with listener.sock, link.sock:
        listener.sock.setblocking(True)
        raw, _ = listener.sock.accept()
        with raw:
            raw.sendall(b"\0\0\0\4http")
            link.sock.settimeout(10)
            link.sock.recv(1, socket.MSG_PEEK)
            link.sock.setblocking(False)
            assert link.receive() == b""
            assert not link.is_up


def test_a_peer_that_does_not_read_gets_everything_later() -> None:
    listener = TcpListener("127.0.0.1", 0)
    link = TcpToTarget(f"127.0.0.1:{listener.port}")
    with listener.sock, link.sock:
        listener.sock.setblocking(True)
        raw, _ = listener.sock.accept()
        source = TcpToSource(raw)
        with source.sock:
            count = 0
            while not source.is_stuck:
                source.tell_finished(transfer_of(count), tuple(range(4096)))
                count += 1
            told: list[int] = []
            while len(told) < count:
                while (message := link.receive()) is not None:
                    told.append(int(FINISHED.decode(message).transfer.request_id, 16))
                source.flush()
            assert told == list(range(count))
            assert not source.is_stuck
