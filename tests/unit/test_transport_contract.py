"""Every transport keeps the rules of `kv_transfer.base`: one suite, run over each scheme."""

from __future__ import annotations

import contextlib
import errno
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from baton.codec import Codec
from baton.errors import ConfigError
from baton.protocol import TransferId
from kv_transfer import nixl_agent
from kv_transfer.accepting import PAUSE_S
from kv_transfer.base import KVTransport, LinkLost, Received, Sent
from kv_transfer.registry import open_transport, resolve_transport
from kv_transfer.zmq_transport import DataHeader
from tests.fakes_device import open_end
from tests.fakes_transfer import FakePool, drive, transfer_of

PUSHING = ["inproc", "zmq+tcp", "zmq+ipc", "gloo"]
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed"))
PULLING = ["shm", "cuda-ipc", NIXL]
SCHEMES = [*PUSHING, *PULLING]
BLOCK = 96 << 10


class Pair:
    """P ships to D over one scheme."""

    def __init__(self, scheme: str, num_blocks: int = 8, block_bytes: int = BLOCK):
        self.scheme = scheme
        self.source, self.target = FakePool(num_blocks, block_bytes), FakePool(num_blocks, block_bytes)
        self.source.fill(1)
        self.p, self.d = self.open(self.source), self.open(self.target)
        self.p.connect("D1", self.d.address)

    def open(self, pool: FakePool) -> KVTransport:
        return open_end(self.scheme, pool)

    def sent(self) -> set[tuple[int, int]]:
        """(request number, index) of every Sent so far."""
        return {(int(e.transfer.request_id, 16), i) for e in self.p.seen if isinstance(e, Sent) for i in e.indices}

    def received(self) -> list[tuple[int, int]]:
        return [(int(e.transfer.request_id, 16), i) for e in self.d.seen if isinstance(e, Received) for i in e.indices]

    def lost(self, transport: KVTransport) -> list[str]:
        return [e.peer for e in transport.seen if isinstance(e, LinkLost)]

    def move(
        self,
        transfer: TransferId,
        sources: Sequence[tuple[int, int]],
        targets: Sequence[tuple[int, int]],
        to: tuple[str, KVTransport] | None = None,
    ) -> None:
        """Ship and receive, in the order that the session takes: what is pulled is named after it was shipped."""
        name, receiver = to or ("D1", self.d)
        if not receiver.pulls:
            receiver.receive("P1", transfer, (), targets)
        refs = self.p.ship(name, transfer, sources)
        if receiver.pulls:
            receiver.receive("P1", transfer, refs, targets)

    def warm(self) -> None:
        """Bring the link up."""
        self.move(transfer_of(99), [(0, 0)], [(0, 0)])
        drive([self.p, self.d], lambda: (99, 0) in self.received() and (99, 0) in self.sent())

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=SCHEMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_blocks_arrive_as_they_were(pair: Pair) -> None:
    mapping = [(0, 3), (1, 1), (2, 7), (5, 0)]
    pair.move(transfer_of(1), mapping, [(0, 6), (1, 5), (2, 4), (5, 2)])
    drive([pair.p, pair.d], lambda: len(pair.received()) == 4 and len(pair.sent()) == 4)
    for (_, source), target in zip(mapping, [6, 5, 4, 2], strict=True):
        np.testing.assert_array_equal(pair.source.block(source), pair.target.block(target))
    assert not pair.target.memory[[0, 1, 3, 7]].any()
    assert pair.p.next_deadline(0.0) is None, "nothing is out, so nothing may poll"


@pytest.mark.parametrize("block_bytes", [1, 100, 65_536, 5 << 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_of_any_size_are_tracked(scheme: str, block_bytes: int) -> None:
    pair = Pair(scheme, num_blocks=3, block_bytes=block_bytes)
    with contextlib.closing(pair):
        pair.move(transfer_of(1), [(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1), (2, 2)])
        drive([pair.p, pair.d], lambda: len(pair.received()) == 3 and len(pair.sent()) == 3)
        np.testing.assert_array_equal(pair.source.memory, pair.target.memory)


def test_after_cancel_nothing_is_written(pair: Pair) -> None:
    pair.warm()
    before = pair.target.memory.copy()
    pair.move(transfer_of(1), [(0, 3)], [(0, 3)])
    pair.d.cancel(transfer_of(1))
    drive([pair.p, pair.d], lambda: (1, 0) in pair.sent() and pair.d.stats.num_dropped == (not pair.d.pulls))
    np.testing.assert_array_equal(pair.target.memory, before)
    assert (1, 0) not in pair.received()


@pytest.mark.parametrize("scheme", PUSHING)
def test_what_was_not_announced_is_dropped_and_counted(scheme: str) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair):
        pair.d.receive("P1", transfer_of(1), (), [(0, 0)])
        pair.p.ship("D1", transfer_of(2), [(0, 4)])
        pair.p.ship("D1", transfer_of(1), [(1, 4), (0, 5), (0, 6)])
        drive([pair.p, pair.d], lambda: pair.d.stats.num_dropped == 3 and len(pair.sent()) == 3)
        assert pair.received() == [(1, 0)], "and an index is written once, however often it comes"
        np.testing.assert_array_equal(pair.target.block(0), pair.source.block(5))


def test_nothing_to_ship_is_no_news(pair: Pair) -> None:
    pair.warm()
    pair.p.seen.clear()
    pair.d.seen.clear()
    pair.move(transfer_of(1), [], [])
    pair.p.ship("D9", transfer_of(1), [])
    pair.warm()
    assert pair.sent() == {(99, 0)}
    assert pair.received() == [(99, 0)]


def test_the_senders_cancel_lets_every_block_go(pair: Pair) -> None:
    pair.warm()
    pair.move(transfer_of(1), [(0, 1), (1, 2)], [(0, 1), (1, 2)])
    pair.p.cancel(transfer_of(1))
    drive([pair.p, pair.d], lambda: {(1, 0), (1, 1)} <= pair.sent())
    assert pair.p.next_deadline(0.0) is None


def test_ends_of_a_kind_reach_each_other_and_nobody_else(pair: Pair) -> None:
    assert pair.p.reach == pair.d.reach
    for scheme in [*PUSHING, "shm", "cuda-ipc", pair.scheme]:
        with contextlib.closing(open_end(scheme, FakePool(2, BLOCK))) as other:
            assert (other.reach == pair.p.reach) == (scheme == pair.scheme)


def test_ship_to_an_unknown_peer_is_sent_at_once(pair: Pair) -> None:
    pair.p.ship("D9", transfer_of(1), [(0, 0)])
    drive([pair.p], lambda: (1, 0) in pair.sent())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_sent_while_the_receiver_is_stalled(scheme: str) -> None:
    """I4: far more than all buffers hold, a receiver that does not read: the source stays untouchable."""
    pair = Pair(scheme, num_blocks=24, block_bytes=4 << 20)
    with contextlib.closing(pair):
        pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(24)])
        with pytest.raises(AssertionError):
            drive([pair.p], lambda: len(pair.sent()) == 24, timeout_s=0.7)
        stuck = {(1, i) for i in range(24)} - pair.sent()
        assert (1, 23) in stuck
        assert len(stuck) >= 8
        pair.p.disconnect("D1")
        drive([pair.p], lambda: len(pair.sent()) == 24)
        assert pair.p.next_deadline(0.0) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stalled_receiver_that_reads_again_gets_everything(scheme: str) -> None:
    pair = Pair(scheme, num_blocks=12, block_bytes=4 << 20)
    with contextlib.closing(pair):
        refs = pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(12)])
        with pytest.raises(AssertionError):
            drive([pair.p], lambda: len(pair.sent()) == 12, timeout_s=0.2)
        pair.d.receive("P1", transfer_of(1), refs, [(i, i) for i in range(12)])
        drive([pair.p, pair.d], lambda: len(pair.received()) == 12 and len(pair.sent()) == 12)
        np.testing.assert_array_equal(pair.source.memory, pair.target.memory)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in PUSHING])
def test_what_is_lent_anew_has_another_ref_while_others_lend_it(scheme: str) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair), contextlib.closing(pair.open(FakePool(8, BLOCK))) as other:
        pair.warm()
        pair.p.connect("D2", other.address)
        drive([pair.p, other], lambda: len(pair.p.ship("D2", transfer_of(9), [(0, 1)])) == 1)
        (first,) = pair.p.ship("D1", transfer_of(1), [(0, 1)])
        pair.p.disconnect("D1")
        pair.p.connect("D1", pair.d.address)
        pair.warm()
        (second,) = pair.p.ship("D1", transfer_of(1), [(0, 1)])
        assert first != second, "decode tells a block to fetch again from a message that it hears again by the ref"
        pair.d.receive("P1", transfer_of(1), (second,), [(0, 5)])
        drive([pair.p, pair.d], lambda: (1, 0) in pair.received())
        np.testing.assert_array_equal(pair.target.block(5), pair.source.block(1))


def test_reconnect_after_disconnect(pair: Pair) -> None:
    pair.warm()
    pair.p.disconnect("D1")
    drive([pair.d], lambda: pair.lost(pair.d) == ["P1"])
    assert pair.lost(pair.p) == [], "one's own act is no loss"
    pair.p.connect("D1", pair.d.address)
    pair.move(transfer_of(1), [(0, 1)], [(0, 1)])
    drive([pair.p, pair.d], lambda: (1, 0) in pair.received() and (1, 0) in pair.sent())


def test_loss_of_the_receiver_is_told_and_sent_follows(pair: Pair) -> None:
    pair.warm()
    pair.d.close()
    drive([pair.p], lambda: pair.lost(pair.p) == ["D1"])
    assert not any(e.incoming for e in pair.p.seen if isinstance(e, LinkLost))
    pair.p.ship("D1", transfer_of(1), [(0, 0)])
    pair.p.disconnect("D1")
    drive([pair.p], lambda: (1, 0) in pair.sent())
    successor = pair.open(pair.target)
    with contextlib.closing(successor):
        pair.p.connect("D2", successor.address)
        pair.move(transfer_of(2, target="D2"), [(0, 0)], [(0, 0)], to=("D2", successor))
        drive([pair.p, successor], lambda: (2, 0) in pair.sent() and len(successor.seen) == 1)


def test_loss_of_the_sender_is_told(pair: Pair) -> None:
    pair.warm()
    pair.p.close()
    drive([pair.d], lambda: pair.lost(pair.d) == ["P1"])
    assert all(e.incoming for e in pair.d.seen if isinstance(e, LinkLost))


@contextlib.contextmanager
def address_of_nobody(scheme: str) -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield {
            "inproc": "inproc://nobody",
            "shm": "shm://nobody",
            "cuda-ipc": "cuda-ipc://nobody",
            "nixl": f"nixl://127.0.0.1:{unused.getsockname()[1]}",
            "zmq+tcp": f"zmq+tcp://127.0.0.1:{unused.getsockname()[1]}",
            "zmq+ipc": "zmq+ipc:///nonexistent/blocks",
            "gloo": f"gloo://127.0.0.1:{unused.getsockname()[1]}",
        }[scheme]


def test_a_link_that_was_never_up_is_not_lost_while_nothing_is_shipped_over_it(pair: Pair) -> None:
    with address_of_nobody(pair.scheme) as address:
        pair.p.connect("D2", address)
        pair.warm()
        pair.p.ship("D2", transfer_of(1, target="D2"), [])
        pair.p.disconnect("D2")
        pair.warm()
        assert pair.lost(pair.p) == []


@pytest.mark.parametrize("scheme", ["zmq+tcp", "zmq+ipc"])
def test_zmq_keeps_blocks_for_a_link_that_is_not_up_yet(scheme: str) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair), address_of_nobody(scheme) as address:
        pair.p.connect("D2", address)
        pair.p.ship("D2", transfer_of(1, target="D2"), [(0, 0)])
        pair.warm()
        assert (1, 0) not in pair.sent()
        pair.p.disconnect("D2")
        drive([pair.p], lambda: (1, 0) in pair.sent())
        assert pair.lost(pair.p) == []


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in ("zmq+tcp", "zmq+ipc")])
def test_blocks_for_a_link_that_could_not_be_made_are_not_sent_without_a_word(scheme: str) -> None:
    """Else their owner takes them for sent, and for the other end's to wait for."""
    pair = Pair(scheme)
    with contextlib.closing(pair), address_of_nobody(scheme) as address:
        for attempt in (1, 2):
            pair.p.seen.clear()
            pair.p.connect("D2", address)
            for index in (0, 1):
                pair.p.ship("D2", transfer_of(1, target="D2"), [(index, index)])
            drive([pair.p], lambda: {(1, 0), (1, 1)} <= pair.sent())
            assert pair.lost(pair.p) == ["D2"], "each link is lost once"
            assert isinstance(pair.p.seen[0], LinkLost), f"before the blocks are Sent, at attempt {attempt}"
            pair.p.disconnect("D2")
        pair.p.seen.clear()
        pair.p.connect("D2", pair.d.address)  # it listens now
        pair.move(transfer_of(2), [(0, 1)], [(0, 1)], to=("D2", pair.d))
        drive([pair.p, pair.d], lambda: (2, 0) in pair.received() and (2, 0) in pair.sent())
        assert pair.lost(pair.p) == []


@pytest.mark.parametrize("scheme", ["gloo", NIXL])
@pytest.mark.parametrize("when", ["queued", "shipped later"])
def test_blocks_for_a_link_that_fails_before_it_is_up_are_not_sent_without_a_word(scheme: str, when: str) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair), socket.create_server(("127.0.0.1", 0)) as mute:
        pair.warm()
        pair.p.seen.clear()
        pair.p.connect("D2", f"{scheme}://127.0.0.1:{mute.getsockname()[1]}")
        transfer = transfer_of(1, target="D2")
        connection, _ = mute.accept()
        if when == "queued":
            pair.p.ship("D2", transfer, [(0, 0)])
            connection.close()
        else:
            connection.close()
            pair.warm()
            pair.p.seen.clear()
            pair.p.ship("D2", transfer, [(0, 0)])
        drive([pair.p], lambda: (1, 0) in pair.sent())
        told = [e for e in pair.p.seen if isinstance(e, LinkLost) or e.transfer == transfer]
        assert [type(e) for e in told] == [LinkLost, Sent]
        assert pair.lost(pair.p) == ["D2"]


def test_a_link_that_was_torn_down_is_not_lost_later(pair: Pair) -> None:
    """What its owner has not heard yet would cost the link that took its place."""
    pair.warm()
    pair.d.close()
    pair.p.disconnect("D1")
    successor = pair.open(pair.target)
    with contextlib.closing(successor):
        pair.p.connect("D1", successor.address)
        pair.move(transfer_of(2), [(0, 0)], [(0, 0)], to=("D1", successor))
        drive([pair.p, successor], lambda: (2, 0) in pair.sent() and len(successor.seen) == 1)
        assert pair.lost(pair.p) == []


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in ("zmq+tcp", "zmq+ipc")])
def test_a_link_whose_loss_was_not_heard_of_is_not_lost_after_it_was_torn_down(scheme: str) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair), address_of_nobody(scheme) as address:
        pair.p.connect("D2", address)
        pair.p.ship("D2", transfer_of(1, target="D2"), [(0, 0)])
        pair.p.disconnect("D2")
        drive([pair.p], lambda: (1, 0) in pair.sent())
        pair.warm()
        assert pair.lost(pair.p) == []


def known(target: Any) -> list[str]:
    """Sources whose pool can be read."""
    return [link.peer for link in target._sources if link.pool is not None]


@pytest.mark.parametrize("scheme", PULLING)
def test_links_that_are_idle_do_not_push_each_other_out(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source says who it is when it connects, so it is no stranger, and is ready before the first request."""
    monkeypatch.setattr("kv_transfer.pull_transport.MAX_STRANGERS", 1)
    pair = Pair(scheme)
    with contextlib.closing(pair), contextlib.ExitStack() as stack:
        sources: list[Any] = []
        drive([pair.p, pair.d], lambda: known(pair.d) == ["P1"])
        for number in (2, 3, 4):
            sources.append(open_end(scheme, pair.source, f"P{number}"))
            stack.enter_context(contextlib.closing(sources[-1]))
            sources[-1].connect("D1", pair.d.address)
            drive([pair.d, *sources], lambda: len(known(pair.d)) == 1 + len(sources))
        assert known(pair.d) == ["P1", "P2", "P3", "P4"]
        assert not pair.lost(pair.d)
        for number, source in enumerate(sources, 2):
            transfer = transfer_of(number, source=f"P{number}")
            refs = source.ship("D1", transfer, [(0, number)])
            pair.d.receive(f"P{number}", transfer, refs, [(0, number)])
            drive([pair.d, source], lambda: len(pair.received()) == number - 1)  # noqa: B023
        np.testing.assert_array_equal(pair.target.memory[2:5], pair.source.memory[2:5])


class Exhausted:
    """A listening socket of a process that has no file descriptor left."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.num_asked = 0

    def accept(self) -> Any:
        self.num_asked += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("scheme", ["gloo", *PULLING])
def test_without_file_descriptors_nothing_spins_and_callers_wait(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(scheme)
    with contextlib.closing(pair):
        listener: Any = pair.d._listener  # type: ignore[attr-defined]
        real = listener.sock
        listener.sock = full = Exhausted(real)
        for count in range(1, 101):
            pair.d.completions()
            assert full.num_asked == count, "once each time"
            assert full not in pair.d.pollables(), "it stays readable"
            assert pair.d.next_deadline(7.0) == pair.d.next_deadline(7.1) == 7.0 + PAUSE_S
        assert len([r for r in caplog.records if "Too many open files" in r.getMessage()]) == 10
        listener.sock = real
        pair.d.completions()
        assert real in pair.d.pollables()
        assert pair.d.next_deadline(8.0) is None
        pair.warm()


def test_close_is_final_and_may_repeat(pair: Pair) -> None:
    pair.warm()
    pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(8)])
    pair.close()
    pair.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b""],
        [b"x" * 70_000],
        [Codec(DataHeader).encode(DataHeader(transfer_of(1), (0,)))],
        [Codec(DataHeader).encode(DataHeader(transfer_of(1), (0,))), b"short"],
        [Codec(DataHeader).encode(DataHeader(transfer_of(1), (0, 1))), bytes(BLOCK)],
        [Codec(DataHeader).encode(DataHeader(transfer_of(1), (0,))), bytes(BLOCK), bytes(BLOCK)],
    ],
)
def test_zmq_malformed_messages_are_counted_and_dropped(frames: list[bytes]) -> None:
    pair = Pair("zmq+tcp")
    with contextlib.closing(pair), zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        pair.d.receive("P1", transfer_of(1), (), [(0, 0), (1, 1)])
        push.connect(pair.d.address.removeprefix("zmq+"))
        push.send_multipart(frames)
        drive([pair.d], lambda: pair.d.stats.num_malformed == 1)
        assert pair.received() == []
        pair.warm()


def test_zmq_advertises_the_real_port() -> None:
    with contextlib.closing(open_transport("zmq+tcp://127.0.0.1")) as transport:
        assert int(transport.address.rpartition(":")[2]) > 0


def test_registry_names_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"unknown transport.*zmq\+tcp"):
        open_transport("pigeon://")
    assert resolve_transport("auto", one_process=True) == "inproc://"
    assert resolve_transport("auto", one_process=False, host="10.0.0.2") == "zmq+tcp://10.0.0.2"
    assert resolve_transport("auto", one_process=False, can_share=True, host="10.0.0.2") == "shm://"
    assert resolve_transport("zmq+ipc", one_process=False, can_share=True) == "zmq+ipc://"
    assert resolve_transport("auto", one_process=False, can_share=True, encodes=True) == "zmq+tcp://127.0.0.1"
    assert resolve_transport("auto", one_process=True, encodes=True) == "zmq+tcp://127.0.0.1"


def test_zmq_removes_the_folders_of_killed_workers_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forsaken, other = tmp_path / "baton-kv-forsaken", tmp_path / "baton-kv-about-to-listen"
    forsaken.mkdir()
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(forsaken / "blocks"))  # its file stays when it is closed
    living = open_transport("zmq+ipc")
    with contextlib.closing(living), contextlib.closing(open_transport("zmq+ipc")) as second:
        assert not forsaken.exists()
        assert other.exists()
        assert len(list(tmp_path.iterdir())) == 3, "the living one and the second have one each"
        assert second.address != living.address
    assert list(tmp_path.iterdir()) == [other]


def test_zmq_says_why_it_cannot_listen() -> None:
    taken = open_transport("zmq+tcp")
    with contextlib.closing(taken), pytest.raises(ConfigError, match="cannot listen"):
        open_transport(taken.address)
