"""Fuzzed bytes on every socket of a running cluster: after the storm it serves, holds nothing and is no larger."""

from __future__ import annotations

import array
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.codec import MAX_MESSAGE_BYTES
from baton.protocol import PROTOCOL_VERSION, Join, StatusRequest, ToRouterFromClient, ToRouterFromWorker
from kv_transfer.messages import Hello, ToDecode
from kv_transfer.pull_messages import Export, Finished
from kv_transfer.shm_link import _abstract
from kv_transfer.zmq_transport import DataHeader
from tests.hostile import Bodies, damaged, encoded
from tests.stub_cluster import LAYOUT, StubCluster, expected_tokens, wait_until

SPLIT: dict[str, Any] = {"prefill": {"kv_blocks": 64}, "decode": {"kv_blocks": 64}}
PROMPT = list(range(40))
FLOOD = 5_000
"""Messages to each socket."""
MAX_GROWTH = 24 << 20
"""Bytes of memory that a flood may leave behind: what its messages are made of, many times over, is more."""
NUM_BODIES = 80


def few(function: Callable[..., None]) -> Callable[..., None]:
    """So many examples as make a corpus; what they lead to is looked at afterwards, so nothing is shrunk."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(
        max_examples=NUM_BODIES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks
    )(function)


@pytest.fixture(scope="module")
def cluster() -> Iterator[StubCluster]:
    with StubCluster(SPLIT, transport="zmq+tcp", transfer={"lease_s": 0.3}, wrap=counting) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[StubCluster]:
    if not hasattr(os, "memfd_create"):
        pytest.skip("shared memory needs Linux (memfd_create)")
    with StubCluster(SPLIT, transport="shm") as cluster:
        yield cluster


def counting(name: str, transport: Any) -> Any:
    """The transport counts the data messages that it reads, which nothing answers."""
    transport.num_read, header_of = 0, transport._header

    def header(frames: list[Any]) -> Any:
        transport.num_read += 1
        return header_of(frames)

    transport._header = header
    return transport


def require_sound(cluster: StubCluster) -> None:
    """It answers right, nothing is held, and nothing has died or met a bug."""
    with cluster.client() as client:
        done = client.generate(PROMPT, max_tokens=5, seed=0, timeout=20)
    assert list(done.token_ids) == expected_tokens(PROMPT, 5)
    cluster.wait_ledger_zero()
    assert not cluster.step_failures()
    assert cluster.router.counters["internal_errors"] == cluster.router.counters["thread_failed"] == 0
    names = {thread.name for thread in threading.enumerate()}
    for name, worker in cluster.workers.items():
        assert worker.health()["problem"] is None
        assert {f"{name}-io", f"{name}-engine"} <= names
    status = cluster.router.status()
    assert {w.info.worker_id for w in status.workers if w.state == "ready"} == {"prefill-0", "decode-0"}
    assert status.num_requests == 0


class Stranger:
    """A socket that is not Baton's. It reads what it is answered, and keeps the last answer."""

    def __init__(self, kind: int, address: str, name: bytes = b""):
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if name:
            self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.connect(address)
        self.num_sent = 0

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)
        self.num_sent += 1

    def wait_for(self, answer: bytes) -> None:
        """Until an answer holds these bytes; what came before it has been handled then."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._socket.poll(1000) and answer in self._socket.recv_multipart()[-1]:
                return
        raise AssertionError(f"no answer with {answer!r}")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def control_of(cluster: StubCluster) -> str:
    return cluster.workers["decode-0"].info.control_address


def data_of(cluster: StubCluster) -> str:
    return cluster.workers["decode-0"].info.data_address.removeprefix("zmq+")


def words_of(cluster: StubCluster, of: Any) -> list[str]:
    """What identifies the cluster's parts; a stranger may have heard it.

    Not what would let it do harm by the rules: with the fingerprint it may join, and any client may drain a worker.
    """
    if of is front:
        return ["stranger"]
    infos = [worker.info for worker in cluster.workers.values()]
    return [info.incarnation for info in infos] + [info.worker_id for info in infos] + ["stranger", "ab" * 16]


def likely_of(cluster: StubCluster, of: Any) -> dict[str, str]:
    target = cluster.workers["decode-0"].info.incarnation
    if of is back:
        return {"incarnation": target, "worker_id": "decode-0", "fingerprint": "another"}
    return {"source": "stranger", "target": target}


# Each opens a socket on which it is asked to say things, and knows how to hear that all of it was handled.


def front(cluster: StubCluster) -> tuple[Stranger, Any, Callable[[Stranger, int], None]]:
    def settle(stranger: Stranger, num: int) -> None:
        stranger.send(encoded(msgspec.to_builtins(StatusRequest(f"end-{num}"))))
        stranger.wait_for(f"end-{num}".encode())

    return Stranger(zmq.DEALER, cluster.address), ToRouterFromClient, settle


def back(cluster: StubCluster) -> tuple[Stranger, Any, Callable[[Stranger, int], None]]:
    info = cluster.workers["decode-0"].info

    def settle(stranger: Stranger, num: int) -> None:
        other = msgspec.structs.replace(info, worker_id="stranger", incarnation=f"s-{num}", fingerprint=f"end-{num}")
        stranger.send(encoded(msgspec.to_builtins(Join(PROTOCOL_VERSION, other, 0.0))))
        stranger.wait_for(f"end-{num}".encode())

    return Stranger(zmq.DEALER, cluster.back, b"stranger"), ToRouterFromWorker, settle


def control(cluster: StubCluster) -> tuple[Stranger, Any, Callable[[Stranger, int], None]]:
    def settle(stranger: Stranger, num: int) -> None:
        hello = Hello(PROTOCOL_VERSION, "stranger", "stranger", f"end-{num}", LAYOUT)
        stranger.send(encoded(msgspec.to_builtins(hello)))
        stranger.wait_for(f"end-{num}".encode())

    stranger = Stranger(zmq.DEALER, control_of(cluster), b"stranger")
    reach = cluster.transports["decode-0"].reach
    hello = Hello(PROTOCOL_VERSION, "stranger", "stranger", "stub", LAYOUT, reach)
    stranger.send(encoded(msgspec.to_builtins(hello)))  # so that its offers are considered
    stranger.wait_for(b"decode-0")
    return stranger, ToDecode, settle


def data(cluster: StubCluster) -> tuple[Stranger, Any, Callable[[Stranger, int], None]]:
    transport: Any = cluster.transports["decode-0"]
    before = transport.num_read

    def settle(stranger: Stranger, num: int) -> None:
        wait_until(lambda: transport.num_read - before >= stranger.num_sent, "all data messages are read")

    return Stranger(zmq.PUSH, data_of(cluster)), DataHeader, settle


SOCKETS = [front, back, control, data]


def test_bytes_that_are_no_zmtp(cluster: StubCluster) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    for address in (cluster.address, cluster.back, control_of(cluster), data_of(cluster)):
        host, port = address.removeprefix("tcp://").split(":")
        kept = []
        for garbage in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64),  # TLS
            os.urandom(4096),
            b"\xff" * 4096,
            b"",
            greeting,
            greeting + b"NULL" + bytes(48),
            greeting + b"NULL" + bytes(48) + ready + b"\x02\xff" + b"\xff" * 8 + b"x",  # a frame of 2^64 - 1 bytes
            greeting + b"CURVE" + bytes(47),
            b"\x01\x00\x00",  # ZMTP 1
        ):
            sock = socket.create_connection((host, int(port)), 10)
            sock.sendall(garbage)
            kept.append(sock)
        for sock in kept:
            sock.close()
    require_sound(cluster)


@pytest.mark.parametrize("of", SOCKETS, ids=lambda of: of.__name__)
def test_frames_without_meaning(cluster: StubCluster, of: Any) -> None:
    stranger, _, settle = of(cluster)
    with stranger:
        for frames in ([b""], [b""] * 3, [b"x"] * 1000, [os.urandom(100)] * 2, [b"\xc1"], [bytes(1 << 20)]):
            stranger.send(*frames)
        stranger.send(encoded(None), b"one more")
        stranger.send(b"\xdf\xff\xff\xff\xff", b"")
        stranger.send(b"\x91" * 100_000)  # nested beyond any depth
        stranger.send(b"\x92\x03\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20))  # a million lists in a megabyte
        settle(stranger, 1)
    for name in (b"\xff\xfe", b"\x01", b"x" * 255, "é".encode()):
        if of is not data:
            with Stranger(
                zmq.DEALER, {front: cluster.address, back: cluster.back}.get(of, control_of(cluster)), name
            ) as s:
                s.send(os.urandom(10))
                s.send(encoded([16, "nobody", None]))
                s.send(b"")
    require_sound(cluster)


def test_a_message_over_the_limit_is_cut_off(cluster: StubCluster) -> None:
    huge = bytes(MAX_MESSAGE_BYTES + 1)
    for address in (cluster.address, cluster.back, control_of(cluster)):
        with Stranger(zmq.DEALER, address) as stranger:
            monitor = stranger._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.send(huge)
            assert monitor.poll(20_000), "the connection should have been ended"
            stranger._socket.disable_monitor()
    require_sound(cluster)


@pytest.mark.parametrize("of", SOCKETS, ids=lambda of: of.__name__)
def test_messages_with_hostile_values(cluster: StubCluster, of: Any) -> None:
    """Any number of them leaves nothing behind: what a peer makes us remember about unknown ids is bounded."""
    stranger, union, settle = of(cluster)
    blocks = [bytes(LAYOUT.block_bytes)] if of is data else []
    corpus: list[bytes] = []
    bodies = Bodies(words_of(cluster, of), likely_of(cluster, of)).of(union)

    @few
    @given(body=bodies, drawn=st.data())
    def storm(body: Any, drawn: st.DataObject) -> None:
        message = encoded(body)
        corpus.append(message)
        stranger.send(message, *blocks)
        worse = drawn.draw(damaged(message))
        corpus.append(worse)
        stranger.send(worse, *blocks)

    with stranger:
        storm()
        settle(stranger, 1)
        small = [message for message in corpus if len(message) < 4096]
        flood(stranger, small, blocks, FLOOD // 4)  # what is remembered up to a limit is full now
        settle(stranger, 2)
        require_sound(cluster)
        before = resident()
        flood(stranger, small, blocks, FLOOD)
        settle(stranger, 3)
        require_sound(cluster)
        grown = resident() - before
    assert grown < MAX_GROWTH, f"{grown >> 20} MiB more after {FLOOD} messages"


def test_a_worker_that_has_joined_and_talks_nonsense(cluster: StubCluster) -> None:
    real = cluster.workers["decode-0"].info
    nowhere = {"control_address": "tcp://127.0.0.1:1", "data_address": "zmq+tcp://127.0.0.1:1"}
    info = msgspec.structs.replace(real, worker_id="stranger", incarnation="stranger", **nowhere)
    words = [*words_of(cluster, back), "stranger"]
    bodies = Bodies(words).of(ToRouterFromWorker)

    def join(stranger: Stranger, number: int) -> None:
        """It joins again, so all that it said before has been handled."""
        stranger.send(encoded(msgspec.to_builtins(Join(PROTOCOL_VERSION, info, float(number)))))
        stranger.wait_for(msgspec.msgpack.encode(float(number)))

    with Stranger(zmq.DEALER, cluster.back, b"stranger") as stranger, cluster.client() as client:
        join(stranger, 1001)
        client.drain("stranger")  # it shall talk, not work

        @few
        @given(body=bodies)
        def storm(body: Any) -> None:
            stranger.send(encoded(body))

        storm()
        join(stranger, 1002)
        require_sound(cluster)


def flood(stranger: Stranger, corpus: list[bytes], blocks: list[bytes], num: int) -> None:
    for i in range(num):
        stranger.send(corpus[i % len(corpus)], *blocks)
        if i % 500 == 0:
            drain(stranger)


def drain(stranger: Stranger) -> None:
    if stranger._socket.type == zmq.DEALER:
        while stranger._socket.poll(0):
            stranger._socket.recv_multipart()


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_strangers_at_the_door_of_shared_memory(shared: StubCluster) -> None:
    """The abstract socket of a worker: everybody of this user may connect, and say anything."""
    name = _abstract(shared.workers["decode-0"].info.data_address.removeprefix("shm://"))
    require_sound(shared)  # what links of its own need is open now
    fds = len(os.listdir("/proc/self/fd"))
    bodies = Bodies([shared.workers["prefill-0"].info.incarnation, "stranger"])

    @few
    @given(body=st.one_of(bodies.of(Export), bodies.of(Finished)), num_files=st.integers(0, 6), again=st.booleans())
    def storm(body: Any, num_files: int, again: bool) -> None:
        with connected(name) as sock, open("/dev/zero", "rb") as file:
            files = array.array("i", [file.fileno()] * num_files)
            try:
                sock.sendmsg(
                    [encoded(body)[: 32 << 10]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if files else []
                )
                if again:
                    sock.send(encoded(body)[: 32 << 10])
            except (BrokenPipeError, ConnectionResetError):
                pass  # hung up on already

    storm()
    silent = [connected(name) for _ in range(300)]
    for sock in silent[::2]:
        sock.close()
    with connected(name) as sock:
        sock.send(b"")
    require_sound(shared)
    for sock in silent:
        sock.close()
    transport: Any = shared.transports["decode-0"]
    wait_until(lambda: sum(link.pool is None for link in transport._sources) == 0, "strangers are forgotten")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds, "no file is left open")


def connected(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(name)
    return sock
