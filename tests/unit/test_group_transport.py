"""What `gloo` and `nccl` promise beyond the contract that all transports keep; `nccl` on CPUs, over a stand-in."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from baton.errors import ConfigError
from baton.protocol import PROTOCOL_VERSION
from kv_transfer import group_backend, group_link
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.group_backend import SOURCE, Backend, GlooBackend, GlooGroup, NcclBackend
from kv_transfer.group_link import _HELLO, _LENGTH, _WELCOME, HEADER, NUM_SCRATCH, BatchHeader
from kv_transfer.group_transport import GroupTransport
from tests.fakes_transfer import FakePool, drive, transfer_of, watched

BLOCK = 8 << 10
LONG = 4 << 20
"""A block that is a message of its own."""


class Pair:
    """P ships to D."""

    def __init__(self, num_blocks: int = 8, block_bytes: int = BLOCK):
        self.source, self.target = FakePool(num_blocks, block_bytes), FakePool(num_blocks, block_bytes)
        self.source.fill(1)
        self.p: Any = self.open(self.source)
        self.d: Any = self.open(self.target)
        self.p.connect("D1", self.d.address)

    def open(self, pool: Any) -> Any:
        transport = watched(GroupTransport("gloo"))
        transport.register(pool)
        return transport

    def sent(self) -> list[int]:
        """Indices of transfer 1."""
        return [i for e in self.p.seen if isinstance(e, Sent) and e.transfer == transfer_of(1) for i in e.indices]

    def received(self) -> list[int]:
        return [i for e in self.d.seen if isinstance(e, Received) and e.transfer == transfer_of(1) for i in e.indices]

    def warm(self) -> None:
        """Bring the link up."""
        self.d.receive("P1", transfer_of(99), (), [(0, 0)])
        self.p.ship("D1", transfer_of(99), [(0, 0)])
        drive([self.p, self.d], lambda: len(self.d.seen) > 0 and len(self.p.seen) > 0)
        self.d.seen.clear()
        self.p.seen.clear()

    def close(self) -> None:
        self.p.close()
        self.d.close()


def threads_of_links() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group_backend, "BATCH_TIMEOUT_S", 2.0)
    monkeypatch.setattr(group_backend, "LINK_TIMEOUT_S", 2.0)  # of the stand-in's batches too
    yield
    for thread in threads_of_links():
        thread.join(5)
    assert threads_of_links() == []


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def long_pair() -> Iterator[Pair]:
    pair = Pair(num_blocks=8, block_bytes=LONG)
    pair.warm()
    yield pair
    pair.close()


def stalled(pair: Pair) -> list[int]:
    """Ship all to a peer that does not read, until only the scratch memory is full; returns what is not sent."""
    pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(8)])
    drive([pair.p], lambda: len(pair.sent()) == NUM_SCRATCH)
    return [i for i in range(8) if i not in pair.sent()]


def test_a_target_reads_ahead_only_what_its_scratch_memory_holds(long_pair: Pair) -> None:
    pair = long_pair
    assert stalled(pair) == [3, 4, 5, 6, 7]
    assert pair.received() == []
    pair.d.receive("P1", transfer_of(1), (), [(i, i) for i in range(8)])
    drive([pair.p, pair.d], lambda: len(pair.received()) == 8 and len(pair.sent()) == 8)
    np.testing.assert_array_equal(pair.source.memory, pair.target.memory)


def test_cancel_takes_back_what_has_not_begun(long_pair: Pair) -> None:
    pair = long_pair
    stalled(pair)
    pair.p.cancel(transfer_of(1))
    drive([pair.p], lambda: len(pair.sent()) == 7)
    assert 3 not in pair.sent(), "it is under way"
    drive([pair.p, pair.d], lambda: len(pair.sent()) == 8 and pair.d.stats.num_dropped == 4)
    assert not pair.target.memory[1:].any()
    pair.warm()


@pytest.mark.parametrize("end", ["disconnect", "lost"])
def test_a_send_that_is_stuck_ends_with_its_link(long_pair: Pair, end: str) -> None:
    pair = long_pair
    stalled(pair)
    if end == "disconnect":
        pair.p.disconnect("D1")
    else:
        pair.d.close()
    drive([pair.p], lambda: len(pair.sent()) == 8)
    assert [e.peer for e in pair.p.seen if isinstance(e, LinkLost)] == ([] if end == "disconnect" else ["D1"])
    pair.p.ship("D1", transfer_of(1), [(8, 0)])
    drive([pair.p], lambda: 8 in pair.sent())


def test_a_send_that_gloo_holds_up_ends_with_its_link(pair: Pair) -> None:
    """The peer has said `go` and does not take the payload, as one that is stopped just then."""
    forger = socket.create_server(("127.0.0.1", 0))
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with forger:
        pair.p.connect("D2", f"gloo://127.0.0.1:{forger.getsockname()[1]}")
        pair.p.ship("D2", transfer_of(1), [(0, 0)])
        sock, _ = forger.accept()
        with sock:
            sock.recv(_HELLO.size)
            sock.sendall(_WELCOME.pack(b"kv-gloo ", PROTOCOL_VERSION, store.port, b"x" * 16))
            mine = dist.PrefixStore((b"x" * 16).hex(), store)  # type: ignore[attr-defined]
            group = GlooBackend("127.0.0.1").open_group(mine, 1)
            assert sock.recv(_LENGTH.size)
            sock.sendall(b"\x01")
            with pytest.raises(AssertionError):
                drive([pair.p], lambda: pair.sent() == [0], timeout_s=0.1)
            pair.p.disconnect("D2")
            drive([pair.p], lambda: pair.sent() == [0])
            group.close()


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class Forger:
    """A source that keeps to the rules until its link is up."""

    def __init__(self, pair: Pair):
        host, _, port = pair.d.address.removeprefix("gloo://").partition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.sendall(_HELLO.pack(b"kv-gloo ", PROTOCOL_VERSION, BLOCK))
        before = len(pair.d._links)
        drive([pair.d], lambda: len(pair.d._links) > before)
        _, _, store_port, name = _WELCOME.unpack(self.sock.recv(_WELCOME.size, socket.MSG_WAITALL))
        store: Any = dist.TCPStore(host, store_port, is_master=False)  # type: ignore[attr-defined]
        mine = dist.PrefixStore(name.hex(), store)  # type: ignore[attr-defined]
        self.group = GlooBackend(host).open_group(mine, SOURCE)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        _framed(b""),
        _framed(b"\xc1" * 100),
        _framed(b"x" * (group_link.MAX_HEADER_BYTES + 1)),
        _framed(HEADER.encode(BatchHeader(transfer_of(1), ()))),
        _framed(HEADER.encode(BatchHeader(transfer_of(1), (1 << 20,)))),
        _framed(HEADER.encode(BatchHeader(transfer_of(1), tuple(range(65))))),
    ],
)
def test_a_malformed_header_costs_its_link_and_nothing_else(pair: Pair, data: bytes) -> None:
    pair.d.receive("P1", transfer_of(1), (), [(0, 0)])
    pair.warm()
    forger = Forger(pair)
    with forger.sock:
        forger.sock.sendall(data)
        drive([pair.d], lambda: pair.d.stats.num_malformed == 1 and len(pair.d._links) == 1)
        assert forger.sock.recv(1) == b""
    forger.group.close()
    assert pair.d.seen == []
    pair.warm()


def test_a_batch_longer_than_the_scratch_memory_is_malformed() -> None:
    pair = Pair(block_bytes=3 << 20)
    with contextlib.closing(pair):
        pair.warm()
        for outgoing in pair.p._outgoing.values():
            outgoing.sock.sendall(_framed(HEADER.encode(BatchHeader(transfer_of(1), (0, 1)))))
        drive([pair.d], lambda: any(isinstance(e, LinkLost) and e.peer == "P1" for e in pair.d.seen))
        assert pair.d.stats.num_malformed == 1


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: d\r\n\r\n",
        _HELLO.pack(b"kv-nccl ", PROTOCOL_VERSION, BLOCK),
        _HELLO.pack(b"kv-gloo ", PROTOCOL_VERSION + 1, BLOCK),
        _HELLO.pack(b"kv-gloo ", PROTOCOL_VERSION, BLOCK + 1),
    ],
)
def test_who_says_a_wrong_hello_is_sent_away(pair: Pair, hello: bytes) -> None:
    host, _, port = pair.d.address.removeprefix("gloo://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(hello)
        drive([pair.d], lambda: pair.d.stats.num_malformed == 1)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    pair.warm()
    assert pair.d.seen == []


def test_strangers_that_say_nothing_get_only_so_many_threads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.group_transport.MAX_STRANGERS", 2)
    pair.warm()
    host, _, port = pair.d.address.removeprefix("gloo://").partition(":")
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(4)]
        drive([pair.d], lambda: all(select.select([sock], [], [], 0)[0] for sock in socks[2:]))
        assert [sock.recv(1) for sock in socks[2:]] == [b"", b""]
        assert len(pair.d._links) == 1 + 2, "the peer's, which is up, does not count"
    drive([pair.d], lambda: len(pair.d._links) == 1)
    pair.warm()


def test_a_peer_that_does_not_welcome_is_dropped_without_a_word(pair: Pair) -> None:
    """A stopped process: the kernel accepts for it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        pair.p.connect("D2", f"gloo://127.0.0.1:{mute.getsockname()[1]}")
        pair.p.ship("D2", transfer_of(1), [(0, 0), (1, 1)])
        connection, _ = mute.accept()
        with connection:
            assert connection.recv(1)
            pair.p.disconnect("D2")
            drive([pair.p], lambda: sorted(pair.sent()) == [0, 1])
    assert not [e for e in pair.p.seen if isinstance(e, LinkLost)]


def test_addresses_that_are_none(pair: Pair) -> None:
    pair.p.connect("D2", "gloo://127.0.0.1:x")
    pair.p.ship("D2", transfer_of(1), [(0, 0)])
    drive([pair.p], lambda: pair.sent() == [0])
    with pytest.raises(ConfigError, match="not a port"):
        GroupTransport("gloo", "127.0.0.1:x")
    with pytest.raises(ConfigError, match="cannot listen"):
        GroupTransport("gloo", pair.p.address.removeprefix("gloo://"))
    with pytest.raises(ConfigError, match="cannot listen"):
        GroupTransport("gloo", "192.0.2.1")


def test_a_wildcard_advertises_this_machine() -> None:
    with contextlib.closing(GroupTransport("gloo", "0.0.0.0")) as transport:
        host, _, port = transport.address.removeprefix("gloo://").partition(":")
        assert host != "0.0.0.0"
        assert int(port) > 0


@pytest.mark.skipif(torch.cuda.is_available() and dist.is_nccl_available(), reason="this machine has what nccl needs")
def test_nccl_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"has no NCCL: install a build for CUDA|sees no GPU"):
        GroupTransport("nccl")


# --- the code of nccl, on CPUs ------------------------------------------------------------------------


class FakeStreams:
    """As much of `torch.cuda` as `nccl` uses. Work on the CPU is done when it is asked for, so it notes the order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        return self._Stream(self.log)

    def Event(self, blocking: bool) -> Any:
        return self._Event()

    def current_stream(self, device: torch.device) -> Any:
        return self._Stream(self.log)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def set_device(self, device: torch.device) -> None:
        pass

    class _Stream:
        def __init__(self, log: list[str]):
            self._log = log

        def wait_event(self, event: Any) -> None:
            self._log.append(f"waited for {event}")

        def synchronize(self) -> None:
            self._log.append("synchronized")

    class _Event:
        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass


class StandIn:
    """A gloo group where NCCL's is expected."""

    def __init__(self, gloo: GlooGroup, log: list[str]):
        self._gloo, self._log = gloo, log
        self.abort = gloo.abort

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._log.append("sent")
        return self._gloo._group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._gloo._group.recv(tensors, rank, tag)


class CpuNccl(NcclBackend):
    _device_type = "cpu"

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self._module = FakeStreams()

    def _require(self) -> None:
        pass

    def _process_group(self, store: Any, rank: int) -> Any:
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        return StandIn(GlooGroup(store, rank, device), self._module.log)


class CpuPool(FakePool):
    """A `DeviceMemory` on the CPU."""

    device = torch.device("cpu")
    written: Any = None

    def block_tensor(self, block_id: int) -> torch.Tensor:
        return torch.from_numpy(self.memory[block_id])


class NcclPair(Pair):
    def __init__(self) -> None:
        self.backends: list[CpuNccl] = []
        super().__init__()
        self.source, self.target = CpuPool(8, BLOCK), CpuPool(8, BLOCK)
        self.source.fill(1)
        self.p.register(self.source)
        self.d.register(self.target)

    def open(self, pool: Any) -> Any:
        self.backends.append(CpuNccl())
        backend: Backend = self.backends[-1]
        transport = watched(GroupTransport("nccl", backend=backend))
        transport.register(CpuPool(8, BLOCK))
        return transport


@pytest.fixture
def nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the backend sets do not outlive the test."""
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "0")


@pytest.fixture
def nccl_pair(nccl_variables: None) -> Iterator[NcclPair]:
    pair = NcclPair()
    yield pair
    pair.close()


def test_nccl_moves_blocks_behind_the_steps_that_wrote_them(nccl_pair: NcclPair) -> None:
    pair = nccl_pair
    pair.warm()
    log = pair.backends[0]._module.log
    log.clear()
    pair.source.written = "step 7"  # type: ignore[attr-defined]
    pair.d.receive("P1", transfer_of(1), (), [(0, 5), (1, 6)])
    pair.p.ship("D1", transfer_of(1), [(0, 2), (1, 3), (2, 4)])
    pair.source.written = "step 8"  # type: ignore[attr-defined]
    drive([pair.p, pair.d], lambda: len(pair.sent()) == 3 and len(pair.received()) == 2)
    assert log == ["waited for step 7", "sent", "sent", "sent"]
    np.testing.assert_array_equal(pair.target.memory[[5, 6]], pair.source.memory[[2, 3]])
    assert pair.d.stats.num_dropped == 1
    assert (pair.p.reach, pair.p.reaches_gpu) == ("nccl", True)


@pytest.mark.parametrize("act", ["cancel", "disconnect", "lost"])
def test_nccl_ends_what_is_under_way(nccl_pair: NcclPair, act: str) -> None:
    pair = nccl_pair
    pair.warm()
    before = pair.target.memory.copy()
    pair.d.receive("P1", transfer_of(1), (), [(0, 5)])
    pair.p.ship("D1", transfer_of(1), [(i, i) for i in range(8)] * 40)
    ends: dict[str, Callable[[], None]] = {
        "cancel": lambda: pair.d.cancel(transfer_of(1)),
        "disconnect": lambda: pair.p.disconnect("D1"),
        "lost": pair.d.close,
    }
    ends[act]()
    both = [pair.p, pair.d] if act == "cancel" else [pair.p]
    drive(both, lambda: len(pair.sent()) == 320)
    np.testing.assert_array_equal(pair.target.memory, before)


def test_nccl_wants_pools_on_gpus(nccl_variables: None) -> None:
    with (
        contextlib.closing(GroupTransport("nccl", backend=CpuNccl())) as transport,
        pytest.raises(ConfigError, match="needs KV pools on GPUs"),
    ):
        transport.register(FakePool(1, BLOCK))
