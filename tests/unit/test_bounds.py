"""What peers can make us allocate and remember is bounded, however much they send."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq

from baton.codec import Codec
from baton.config import ClusterConfig
from baton.engine.request import EngineRequest
from baton.errors import CodecError, ProtocolError
from baton.layout import KVLayout
from baton.ledger import HoldReason, LedgerEntry, LedgerReport
from baton.protocol import (
    MAX_WORKERS,
    PROTOCOL_VERSION,
    AttemptFailed,
    Heartbeat,
    Join,
    JoinRefused,
    LoadReport,
    RequestKey,
    ToRouterFromClient,
    ToRouterFromWorker,
    ToWorker,
    WorkerInfo,
)
from baton.sampling_params import SamplingParams
from decode_worker.receive_port import MAX_OFFERED_TOKENS, MAX_PEERS, SOME_OFFERS, ReceivePort
from decode_worker.waiting import WaitingOffers
from kv_transfer.base import LinkLost, Received
from kv_transfer.messages import AbortTransfer, Accept, Data, Hello, HelloRefused, Offer, Refuse, ToDecode, Welcome
from kv_transfer.session import RecvSession
from kv_transfer.zmq_transport import _HEADER, DataHeader, ZmqTransport
from router.actions import SendWorker
from router.back import Back
from router.core import RouterCore
from router.front import _label_of
from tests.fakes_transfer import LAYOUT, FakeEngine, FakePool, transfer_of

INFO = WorkerInfo("w", "i", "p", "both", "f", LAYOUT, 10, 100, 8, "tcp://127.0.0.1:1", "zmq+tcp://127.0.0.1:2")


# --- on the wire -----------------------------------------------------------------------------------


@pytest.mark.parametrize("union", [ToRouterFromClient, ToRouterFromWorker, ToDecode, ToWorker])
def test_a_message_of_many_small_objects_is_refused_before_they_exist(union: Any) -> None:
    lists = b"\xdd\x00\x20\x00\x00" + b"\x90" * (1 << 21)  # two million empty lists in two megabytes
    for body in (lists, b"\x92\x16" + lists, b"\x92\xcc\x1f" + lists):
        tracemalloc.start()
        with pytest.raises(CodecError):
            Codec[Any](union).decode(b"\x92" + bytes([PROTOCOL_VERSION]) + body)
        assert _label_of([b"\x92" + bytes([PROTOCOL_VERSION]) + body]) == ""
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20, f"{peak} bytes for a message of {len(body)}"


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_a_length_that_is_not_there_is_not_believed(length: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(CodecError):
        Codec[Any](ToDecode).decode(b"\x92" + bytes([PROTOCOL_VERSION]) + length)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_nesting_ends() -> None:
    for data in (b"\x91" * 1_000_000, b"\x92\x03" + b"\x91" * 1_000_000):
        with pytest.raises(CodecError):
            Codec[Any](ToDecode).decode(data)
        assert _label_of([data]) == ""


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (ToDecode, Offer(transfer_of(1), (1,), (), SamplingParams(), timeout_s=NAN)),
        (ToDecode, Offer(transfer_of(1), (1,), (), SamplingParams(), timeout_s=INF)),
        (ToDecode, Offer(transfer_of(1), (1,), (), SamplingParams(), timeout_s=-1.0)),
        (ToDecode, AbortTransfer(transfer_of(1), "x" * 4097)),
        (ToDecode, AbortTransfer(transfer_of(1)._replace(request_id="x" * 65), "")),
        (ToDecode, AbortTransfer(transfer_of(1)._replace(source="x" * 201), "")),
        (ToDecode, Hello(PROTOCOL_VERSION, "w", "i", "f", msgspec.structs.replace(LAYOUT, block_size=0))),
        (ToDecode, Hello(PROTOCOL_VERSION, "w", "i", "f", msgspec.structs.replace(LAYOUT, num_layers=1 << 17))),
        (ToDecode, Hello(PROTOCOL_VERSION, "w", "i", "f", KVLayout(1, 1, 1, 1, "int3"))),
        (ToDecode, Hello(PROTOCOL_VERSION, "w", "i", "f", LAYOUT, reach="x" * 1025)),
        (ToRouterFromWorker, Join(PROTOCOL_VERSION, INFO, NAN)),
        (ToRouterFromWorker, Join(PROTOCOL_VERSION, msgspec.structs.replace(INFO, cores=(0,) * 4097), 0.0)),
        (ToRouterFromWorker, Join(PROTOCOL_VERSION, msgspec.structs.replace(INFO, node="x" * 1025), 0.0)),
        (ToRouterFromWorker, AttemptFailed("w", RequestKey("r", 0), "code", "x" * ((1 << 16) + 1))),
        (ToRouterFromWorker, AttemptFailed("w", RequestKey("r", -1), "code", "")),
        (ToRouterFromWorker, Heartbeat("i", LoadReport(stranded_block_seconds=NAN))),
        (ToRouterFromWorker, LedgerReport("w", 1, 0, 0, 0, (LedgerEntry("r", 0, 0, HoldReason.QUEUED, 0, INF),))),
        (ToRouterFromWorker, LedgerReport("w", 1, 0, 0, 0, (LedgerEntry("x" * 65, 0, 0, HoldReason.QUEUED, 0, 0.0),))),
    ],
    ids=range(18),
)
def test_values_that_nothing_could_be_done_with_do_not_get_in(union: Any, message: Any) -> None:
    codec: Codec[Any] = Codec(union)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(message))


# --- the decode worker -----------------------------------------------------------------------------


def receive_port(num_blocks: int = 8) -> ReceivePort:
    return ReceivePort(
        worker_id="decode-0",
        incarnation="D1",
        fingerprint="f",
        layout=LAYOUT,
        engine=FakeEngine(num_blocks),
        lease_s=30.0,
        expected_growth=4,
    )


def hello(worker_id: str, incarnation: str) -> Hello:
    return Hello(PROTOCOL_VERSION, worker_id, incarnation, "f", LAYOUT)


def offer(number: int, source: str = "P1", num_tokens: int = 4) -> Offer:
    return Offer(transfer_of(number, source=source), tuple(range(num_tokens)), (), SamplingParams(max_tokens=2))


def test_peers_of_former_lives_are_forgotten() -> None:
    port = receive_port()
    port.on_message("busy", hello("busy", "busy"), 0.0)
    (_, accepted) = port.on_message("busy", offer(1, "busy"), 0.0)
    assert isinstance(accepted.message, Accept)  # type: ignore[union-attr]
    port.on_message("alive", hello("alive", "alive"), 0.0)
    for life in range(3 * MAX_PEERS):
        name = f"life-{life}"
        (said,) = port.on_message(name, hello(f"worker-{life % 1500}", name), 0.0)
        assert isinstance(said.message, Welcome)  # type: ignore[union-attr]
        if life % 500 == 0:
            port.on_message("alive", offer(10_000 + life, "alive"), 0.0)
    assert len(port._greeted) == MAX_PEERS and len(port._lives) <= MAX_PEERS
    assert {"busy", "alive"} <= port._greeted.keys(), "who has something open, or was heard of lately, stays"


def test_nobody_is_greeted_while_all_that_are_remembered_have_something_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.receive_port.MAX_PEERS", 2)
    port = receive_port()
    for number, peer in enumerate(("P1", "P2")):
        port.on_message(peer, hello(peer, peer), 0.0)
        port.on_message(peer, offer(number, peer), 0.0)
    (refused,) = port.on_message("P3", hello("P3", "P3"), 0.0)
    assert isinstance(refused.message, HelloRefused)  # type: ignore[union-attr]
    assert list(port._greeted) == ["P1", "P2"]
    port.on_message("P1", AbortTransfer(transfer_of(0, source="P1"), "over"), 0.0)
    (welcome,) = port.on_message("P3", hello("P3", "P3"), 0.0)
    assert isinstance(welcome.message, Welcome)  # type: ignore[union-attr]
    assert list(port._greeted) == ["P2", "P3"]


def test_a_flood_of_offers_is_refused_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.receive_port.MAX_OFFERS", 100)
    port = receive_port()
    for peer in ("P1", "P2"):
        port.on_message(peer, hello(peer, peer), 0.0)
    port.on_message("P1", offer(0, num_tokens=28), 0.0)  # takes the pool
    outcomes = [port.on_message("P1", offer(i, num_tokens=12), 0.0) for i in range(1, 200)]
    assert port.num_waiting() == 100
    refused = [actions[0].message for actions in outcomes if actions]  # type: ignore[union-attr]
    assert len(refused) == 99 and all(isinstance(message, Refuse) for message in refused)
    assert "100 offers of P1" in refused[0].reason
    assert port.on_message("P2", offer(300, "P2", num_tokens=12), 0.0) == [], "another peer's still wait"


def test_long_offers_fill_the_waiting_room_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_OFFERED_TOKENS >= 4096 * 4096, "the default router.max_requests, all of them long"
    monkeypatch.setattr("decode_worker.receive_port.MAX_OFFERED_TOKENS", 12 * 80)
    port = receive_port()
    port.on_message("P1", hello("P1", "P1"), 0.0)
    port.on_message("P1", offer(0, num_tokens=28), 0.0)
    for i in range(1, 200):
        port.on_message("P1", offer(i, num_tokens=12), 0.0)
    assert SOME_OFFERS < port.num_waiting() == 80
    port._waiting.check()


def test_what_waits_is_counted_and_in_order_of_priority() -> None:
    """An offer must not look at all that wait: the worker's lock is held meanwhile."""
    waiting = WaitingOffers()
    added = {}
    for number, (source, priority) in enumerate([("P1", 5), ("P2", 0), ("P1", 0), ("P1", 5), ("P2", -1)]):
        message = msgspec.structs.replace(offer(number, source, num_tokens=10 + number), priority=priority)
        session = RecvSession(message, 3, lease_s=8.0, now=0.0, counters=Counter())
        request = EngineRequest(message.transfer.key, message.prompt, message.sampling, priority=priority)
        waiting.add(session, request)
        added[number] = session
    order = lambda: [int(session.transfer.request_id, 16) for session, _ in waiting]
    assert order() == [4, 1, 2, 0, 3]
    assert (len(waiting), waiting.load_of("P1"), waiting.load_of("P2")) == (5, (3, 35), (2, 25))
    for session, _ in waiting:
        waiting.discard(session)
        waiting.check()
    waiting.discard(added[0])
    assert (len(waiting), order(), waiting.load_of("P1"), vars(waiting)["_queues"]) == (0, [], (0, 0), {})


def test_unknown_transfers_are_remembered_up_to_a_limit() -> None:
    port = receive_port()
    port.on_message("P1", hello("P1", "P1"), 0.0)
    for i in range(10_000):
        port.on_message("P1", AbortTransfer(transfer_of(i), "never heard of"), 0.0)
        port.on_message("P1", Data(transfer_of(i + 1_000_000), (), ()), 0.0)
        with pytest.raises(ProtocolError):
            port.on_message("P2", AbortTransfer(transfer_of(i), ""), 0.0)
    assert len(port._answers) <= 4096 and not port._sessions
    assert len(port.counters) < 10, "counters have names, not peers"


# --- the router ------------------------------------------------------------------------------------


class NoSocket:
    """Where the router's messages go."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    def send(self, peer: bytes, data: bytes) -> None:
        self.sent.append((peer, data))


def router() -> tuple[Back, RouterCore, NoSocket]:
    core, socket = RouterCore(ClusterConfig(), router_incarnation="r"), NoSocket()
    return Back(socket, core, Counter()), core, socket  # type: ignore[arg-type]


def join(back: Back, peer: bytes, **changes: Any) -> list[Any]:
    """A Join from this connection, and what the router answers it."""
    codec: Codec[Any] = Codec(ToRouterFromWorker)
    info = msgspec.structs.replace(INFO, **changes)
    said = []
    for action in back.on_frames(peer, [codec.encode(Join(PROTOCOL_VERSION, info, 0.0))]):
        assert isinstance(action, SendWorker)
        said.append(action.message)
        back.on_action(action, 0.0)
    return said


def test_routes_of_former_lives_are_forgotten() -> None:
    back, core, _ = router()
    for life in range(3000):
        join(back, f"life-{life}".encode(), incarnation=f"life-{life}")
        join(back, f"unfit-{life}".encode(), incarnation=f"unfit-{life}", fingerprint="another")
    assert len(back._routes) == len(back._lives) == len(core.view.workers) == 1


def test_a_life_belongs_to_the_connection_that_it_joined_over() -> None:
    back, core, socket = router()
    join(back, b"i")
    for changes in ({}, {"fingerprint": "another"}):
        assert join(back, b"stranger", **changes) == []
        told = Codec[Any](ToWorker).decode(socket.sent[-1][1])
        assert socket.sent[-1][0] == b"stranger" and isinstance(told, JoinRefused)
    assert back._routes == {"i": b"i"} and core.view.find("i") is not None
    assert join(back, b"i"), "its own connection may join again"


def test_only_so_many_workers_are_known() -> None:
    back, core, _ = router()
    for i in range(MAX_WORKERS):
        join(back, f"{i}".encode(), worker_id=f"w-{i}", incarnation=f"{i}", role="prefill")
    (refused,) = join(back, b"x", worker_id="x", incarnation="x", role="prefill")
    assert isinstance(refused, JoinRefused) and str(MAX_WORKERS) in refused.reason
    core.on_worker_lost("7", "gone", 1.0)
    assert not isinstance(join(back, b"x", worker_id="x", incarnation="x", role="prefill")[0], JoinRefused)
    assert len(core.view.workers) == MAX_WORKERS and core.view.get("w-7") is None


# --- the data link ---------------------------------------------------------------------------------


def test_a_flood_of_empty_messages_does_not_keep_the_thread() -> None:
    transport = ZmqTransport("tcp://127.0.0.1:*")
    transport.register(FakePool(4, 64))  # type: ignore[arg-type]
    context: zmq.Context[Any] = zmq.Context()
    pushers = [context.socket(zmq.PUSH) for _ in range(2)]
    try:
        for push in pushers:
            push.setsockopt(zmq.SNDHWM, 0)
            push.connect(transport.address.removeprefix("zmq+"))
            for _ in range(5_000):
                push.send(b"")
        assert transport._pull.poll(10_000)
        transport.completions()
        assert 0 < transport.stats.num_malformed <= 256
    finally:
        context.destroy(linger=0)
        transport.close()


def test_who_sends_nothing_that_is_awaited_cannot_hang_up_for_another() -> None:
    transport = ZmqTransport("tcp://127.0.0.1:*")
    transport.register(FakePool(4, 64))  # type: ignore[arg-type]
    context: zmq.Context[Any] = zmq.Context()
    seen: list[Any] = []

    def speak_and_hang_up(number: int) -> None:
        push = context.socket(zmq.PUSH)
        push.connect(transport.address.removeprefix("zmq+"))
        push.send_multipart([_HEADER.encode(DataHeader(transfer_of(number), (0,))), bytes(64)])
        assert transport._pull.poll(10_000)
        seen.extend(transport.completions())  # which reads what the monitor has said so far, too
        push.close(linger=0)
        assert transport._monitor.poll(10_000), "the connection has ended"
        seen.extend(transport.completions())

    try:
        speak_and_hang_up(1)
        assert not seen and transport.stats.num_dropped == 1
        transport.receive("P1", transfer_of(2), (), [(0, 0)])
        speak_and_hang_up(2)
        assert [type(completion) for completion in seen] == [Received, LinkLost]
    finally:
        context.destroy(linger=0)
        transport.close()
