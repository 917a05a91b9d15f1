"""A real RouterServer and the real clients, over real sockets, with fake workers in threads of the test."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq

from baton.codec import Codec
from baton.config import ClusterConfig
from baton.engine.structured import check_structured
from baton.errors import (
    ClusterError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    RequestTooLargeError,
)
from baton.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Delta,
    Done,
    Failed,
    FinishReason,
    Generate,
    HandoffDone,
    Heartbeat,
    Join,
    Joined,
    JoinRefused,
    MarksOut,
    Peers,
    RequestKey,
    Submit,
    ToClient,
    TokenOut,
    Tokens,
    ToRouterFromClient,
    ToRouterFromWorker,
    ToWorker,
    WorkerInfo,
)
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.timeline import Mark
from router.client import AsyncRouterClient, RouterClient
from router.server import RouterServer
from tests.fakes_router import LetterText, config_of, join, worker

WAIT_S = 20.0
"""No test waits this long unless it fails."""


class FakeWorker:
    """Joins a router and answers requests from a thread: echoes the prompt's letters, one token a message.

    It stops before the token at index `hold` until `go_on` is set. Of a split request it plays the
    worker it is: a prefill worker sends token 0, the decode worker named in the Submit the rest.
    """

    def __init__(self, back: str, info: WorkerInfo, team: dict[str, FakeWorker], hold: int | None = None):
        self.info = info
        self.team = team
        self.hold = hold
        self.go_on = threading.Event()
        self.messages: list[Any] = []
        self.seen = threading.Condition()
        self._back = back
        self._todo: list[tuple[Submit, int]] = []
        self._in: Codec[Any] = Codec(ToWorker)
        self._out: Codec[Any] = Codec(ToRouterFromWorker)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        team[info.worker_id] = self
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Until the router has sent so many messages of this kind."""

        def found() -> list[Any]:
            return [m for m in self.messages if type(m) is kind]

        with self.seen:
            assert self.seen.wait_for(lambda: len(found()) >= count, WAIT_S), (kind, self.messages)
            return found()

    def _run(self) -> None:
        context = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self.info.incarnation.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._back)
        self.send(Join(PROTOCOL_VERSION, self.info, time.monotonic()))
        beat_at = time.monotonic()
        while not self._stop.is_set():
            if self._socket.poll(5 if self._todo else 20):
                self._read()
            if time.monotonic() >= beat_at:
                self.send(Heartbeat(self.info.incarnation))
                beat_at = time.monotonic() + 0.05
            self._todo = [item for item in map(self._advance, self._todo) if item is not None]
        self._socket.close()

    def _read(self) -> None:
        message = self._in.decode(self._socket.recv())
        with self.seen:
            self.messages.append(message)
            self.seen.notify_all()
        if isinstance(message, Submit):
            self._todo.append((message, len(message.prior)))
        elif isinstance(message, Abort):
            self._todo = [(s, i) for s, i in self._todo if s.key != message.key]

    def _advance(self, item: tuple[Submit, int]) -> tuple[Submit, int] | None:
        submit, index = item
        if index == self.hold and not self.go_on.is_set():
            return item
        key, last = submit.key, submit.sampling.max_tokens - 1
        finish: FinishReason | None = "length" if index == last else None
        token = TokenOut(key.request_id, key.attempt, 0, index, submit.prompt[index % len(submit.prompt)], finish)
        marks = {int(Mark.FIRST_TOKEN if index == 0 else Mark.FINISHED): time.monotonic()} if index in (0, last) else {}
        marked = (MarksOut(*key, marks),) if marks else ()
        self.send(Tokens(self.info.worker_id, self.info.incarnation, (token,), marked))
        if finish is not None:
            return None
        if submit.decode is not None and index == len(submit.prior) and self.info.role == "prefill":
            self.send(HandoffDone(self.info.worker_id, key, 2, 1000))
            self.team[submit.decode]._todo.append((submit, index + 1))
            return None
        return submit, index + 1

    def send(self, message: Any) -> None:
        self._socket.send(self._out.encode(message))


class Rig:
    """A router with fake workers; everything is closed at the end of the test."""

    def __init__(self, config: ClusterConfig):
        self.server = RouterServer(config, text=LetterText())
        self.front, self.back = self.server.start()
        self.team: dict[str, FakeWorker] = {}
        self.clients: list[RouterClient] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def add(self, worker_id: str, hold: int | None = None, **other: Any) -> FakeWorker:
        fake = FakeWorker(
            self.back, worker(worker_id, **{"max_model_len": 400, "num_blocks": 100, **other}), self.team, hold
        )
        self.server.wait_ready(len(self.team), WAIT_S)
        return fake

    def client(self, **arguments: Any) -> RouterClient:
        client = RouterClient(self.front, **arguments)
        self.clients.append(client)
        return client

    def dealer(self, address: str, **options: int) -> zmq.Socket[bytes]:
        """A raw peer of the router, to say what no client would."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.connect(address)
        return dealer

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()
        for fake in self.team.values():
            fake.stop()
        self.context.destroy(linger=0)


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does; the deadline only bounds a failing test."""
    until = time.monotonic() + WAIT_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < until, "it never happened"
        tick.wait(0.005)


Start = Callable[..., Rig]


@pytest.fixture
def start() -> Iterator[Start]:
    rigs: list[Rig] = []

    def make(*worker_ids: str, **dotted: Any) -> Rig:
        quick = {"liveness__heartbeat_s": 0.05, "liveness__timeout_s": 5.0}
        rig = Rig(config_of(**{**quick, **dotted}))
        rigs.append(rig)
        for worker_id in worker_ids:
            rig.add(worker_id)
        return rig

    yield make
    for rig in rigs:
        rig.close()


def receive(dealer: zmq.Socket[bytes], union: Any = ToClient) -> Any:
    assert dealer.poll(int(WAIT_S * 1000)), "no answer"
    return Codec(union).decode(dealer.recv())


# --- plain service ----------------------------------------------------------------------------------


def test_a_split_request_streams_and_ends_with_its_completion(start: Start) -> None:
    rig = start("p0", "d0")
    with rig.client().stream("hello", max_tokens=8) as stream:
        deltas = list(stream)
    done = stream.completion
    assert done is not None
    assert done.text == "".join(d.text for d in deltas) == "hellohel"
    assert "".join(map(chr, done.token_ids)) == "hellohel"
    assert (done.finish_reason, done.prefill_worker, done.decode_worker) == ("length", "p0", "d0")
    assert (done.kv_bytes, done.attempts, done.usage.completion_tokens) == (1000, 1, 8)


def test_where_the_time_went(start: Start) -> None:
    rig = start("b0")
    done = rig.client().generate("abc", max_tokens=4)
    assert done.ttft_s is not None
    assert 0 < done.ttft_s <= done.latency_s
    assert len(done.token_times) == 4
    assert list(done.token_times) == sorted(done.token_times)
    assert done.residual_s is not None
    assert done.residual_s > 0  # one machine, one clock: the client saw it start earlier and end later
    assert {Mark.RECEIVED, Mark.PLACED, Mark.FIRST_TOKEN, Mark.FINISHED} == set(done.timeline.marks)
    plain = done.to_dict()
    assert plain["text"] == "abca"
    assert sum(plain["timeline"]["stages"].values()) == pytest.approx(done.timeline.total())
    assert json.loads(json.dumps(plain))["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 0,
    }


def test_all_kinds_of_prompts(start: Start) -> None:
    client = start("b0").client()
    assert client.generate([104, 105], max_tokens=3).text == "hih"
    assert client.generate([{"role": "user", "content": "yo"}], max_tokens=7).text == "user:yo"


def test_the_async_client(start: Start) -> None:
    rig = start("p0", "d0")

    async def use() -> list[str]:
        async with AsyncRouterClient(rig.front) as client:
            texts = []
            async for delta in (stream := client.stream("async", max_tokens=6)):
                texts.append(delta.text)
            assert stream.completion is not None
            assert stream.completion.text == "".join(texts) == "asynca"
            many = await asyncio.gather(*(client.generate(f"{i:03}", max_tokens=6) for i in range(20)))
            return [m.text for m in many]

    assert asyncio.run(use()) == [f"{i:03}" * 2 for i in range(20)]


def test_many_threads_share_one_client(start: Start) -> None:
    client = start("b0").client()
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        got[i] = client.generate(f"<{i}>", max_tokens=6).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert got == {i: (f"<{i}>" * 3)[:6] for i in range(12)}


def test_two_clients_with_equal_labels_do_not_meet(start: Start) -> None:
    rig = start("b0")
    one, two = rig.client(), rig.client()  # both count their labels from 0
    first, second = one.stream("first", max_tokens=5), two.stream("second", max_tokens=6)
    assert (first.result().text, second.result().text) == ("first", "second")


def test_seeds_are_minted_where_missing(start: Start) -> None:
    rig = start("b0")
    client = rig.client()
    client.generate("a", max_tokens=1)
    client.generate("a", max_tokens=1)
    client.generate("a", max_tokens=1, seed=3)
    seeds = [m.sampling.seed for m in rig.team["b0"].wait_for(Submit, 3)]
    assert seeds[2] == 3
    assert None not in seeds
    assert seeds[0] != seeds[1]


def test_status_and_explain(start: Start) -> None:
    rig = start("p0", "d0")
    done = rig.client().generate("abc", max_tokens=3)
    status = rig.client().status()
    assert [(w.info.worker_id, w.state) for w in status.workers] == [("p0", "ready"), ("d0", "ready")]
    assert (status.num_requests, status.max_model_len) == (0, 400)
    assert rig.server.status().router_incarnation == status.router_incarnation == rig.server.incarnation
    record = rig.client().explain(done.request_id[:12])
    assert record.request_id == done.request_id
    assert {s.worker_id for s in record.placements[0].scores} == {"p0", "d0"}
    with pytest.raises(InvalidRequestError, match="ffff"):
        rig.client().explain("ffff")


# --- ends that the client wants ---------------------------------------------------------------------


def test_cancel_ends_the_stream_as_abort_and_reaches_both_workers(start: Start) -> None:
    rig = start("p0")
    d0 = rig.add("d0", hold=2)
    stream = rig.client().stream("hello", max_tokens=9)
    deltas = iter(stream)
    assert next(deltas).text == "h"
    stream.cancel()
    assert stream.completion is None
    assert "".join(d.text for d in deltas) in ("", "e")
    assert stream.completion is not None
    assert stream.completion.finish_reason == "abort"
    assert d0.wait_for(Abort)
    assert rig.team["p0"].wait_for(Abort)


def test_breaking_out_of_a_stream_cancels_it(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=1)
    for delta in rig.client().stream("hello", max_tokens=9):
        assert delta.text == "h"
        break
    gc.collect()
    assert b0.wait_for(Abort)
    eventually(lambda: rig.server.status().num_requests == 0)


def test_a_stream_left_in_a_with_block_is_cancelled(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    with rig.client().stream("hello"):
        b0.wait_for(Submit)
    assert b0.wait_for(Abort)


def test_breaking_out_of_an_async_stream_and_cancelling_a_task(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=1)

    async def use() -> None:
        async with AsyncRouterClient(rig.front) as client:
            async for _ in client.stream("hello", max_tokens=9):
                break
            await asyncio.to_thread(b0.wait_for, Abort, 1)
            task = asyncio.create_task(client.generate("again", max_tokens=9))
            await asyncio.to_thread(b0.wait_for, Submit, 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(b0.wait_for, Abort, 2)

    asyncio.run(use())


def test_a_request_timeout_cancels_the_request(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    with pytest.raises(RequestFailedError, match=r"not complete within 0.1 s"):
        rig.client().generate("hello", timeout=0.1)
    assert b0.wait_for(Abort)

    async def use() -> None:
        async with AsyncRouterClient(rig.front) as client:
            await client.generate("hello", timeout=0.1)

    with pytest.raises(RequestFailedError, match=r"not complete within 0.1 s"):
        asyncio.run(use())


def test_ctrl_c_interrupts_a_call_and_ends_its_request(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        b0.wait_for(Submit)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        rig.client().generate("hello")
    assert b0.wait_for(Abort)
    b0.go_on.set()
    assert rig.client().generate("again", max_tokens=5).text == "again"


def test_closing_a_client_ends_its_requests_here_and_there(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    client = rig.client()
    stream = client.stream("hello")
    b0.wait_for(Submit)
    client.close()
    with pytest.raises(RequestFailedError, match="client was closed"):
        stream.result()
    assert b0.wait_for(Abort)
    with pytest.raises(ClusterError, match="closed"):
        client.generate("again")


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "arguments", "error"),
    [
        ("", {}, InvalidRequestError),
        ([], {}, InvalidRequestError),
        ([1, 500], {}, InvalidRequestError),
        ("€", {}, InvalidRequestError),
        ("a" * 399, {"max_tokens": 2}, RequestTooLargeError),
        ([-1], {}, InvalidRequestError),
        (["a"], {}, InvalidRequestError),
        (7, {}, InvalidRequestError),
        ([{"role": "user"}], {}, InvalidRequestError),
        ("a", {"max_tokens": 0}, InvalidRequestError),
        ("a", {"temperature": -1.0}, InvalidRequestError),
        ("a", {"seed": "x"}, InvalidRequestError),
    ],
)
def test_wrong_requests_raise_typed_errors_and_the_next_one_works(
    start: Start, prompt: Any, arguments: dict[str, Any], error: type[Exception]
) -> None:
    client = start("b0").client()
    with pytest.raises(error):
        client.generate(prompt, **{"max_tokens": 4, **arguments})
    assert client.generate("ok", max_tokens=2).text == "ok"


def test_without_workers_a_request_is_refused_at_once(start: Start) -> None:
    with pytest.raises(OverloadedError, match="no worker has joined"):
        start().client().generate("a")


def test_the_bound_on_requests(start: Start) -> None:
    rig = start(router__max_requests=1)
    b0 = rig.add("b0", hold=0)
    client = rig.client()
    with client.stream("a"):
        b0.wait_for(Submit)
        with pytest.raises(OverloadedError, match=r"router\.max_requests is 1"):
            client.generate("b")


def test_no_router_at_the_address() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, nobody answers
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        client = RouterClient(address, connect_timeout=0.1)
        with pytest.raises(ClusterError, match=rf"{address} within 0.1 s; .*baton up"):
            client.generate("a")
        with pytest.raises(ClusterError, match="baton up"):
            client.status()
        client.close()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ClusterError, match="is not an address of a router"), RouterClient("localhost"):
        pass


def test_a_router_port_in_use_is_a_clear_error(start: Start) -> None:
    port = int(start().front.rpartition(":")[2])
    with pytest.raises(ClusterError, match=rf"router.port: port {port} of 127.0.0.1 is in use"):
        RouterServer(config_of(router__port=port), text=LetterText()).start()


def test_a_host_that_is_not_ours_is_a_clear_error() -> None:
    with pytest.raises(ClusterError, match=r"set router.host to an address of this machine"):
        RouterServer(config_of(router__host="192.0.2.77"), text=LetterText()).start()


def test_wait_ready_tells_how_many_came(start: Start) -> None:
    with pytest.raises(ClusterError, match=r"1 of 2 workers joined within 0\.05 s"):
        start("b0").server.wait_ready(2, 0.05)


# --- routers that go ------------------------------------------------------------------------------------


def test_stop_fails_open_requests_and_is_idempotent(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=1)
    stream = rig.client().stream("hello")
    b0.wait_for(Submit)
    rig.server.stop()
    rig.server.stop()
    with pytest.raises(RequestFailedError, match="the router was stopped"):
        stream.result()
    assert not [m for m in b0.messages if isinstance(m, Abort)]
    with pytest.raises(ClusterError, match="not running"):
        rig.server.status()


class MuteRouter:
    """Answers a client's first question and then says nothing; can be closed like a process that dies."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    def answer_status(self) -> None:
        assert self.socket.poll(int(WAIT_S * 1000))
        peer, data = self.socket.recv_multipart()
        label = Codec[Any](ToRouterFromClient).decode(data).label
        from baton.protocol import Status

        self.socket.send_multipart([peer, Codec[Any](ToClient).encode(Status(label, "mute", "r", 0, ()))])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("dies", "problem"), [(True, "connection to the router .* was lost"), (False, "was silent for 0.3 s")]
)
def test_a_router_that_dies_or_hangs_fails_the_call(dies: bool, problem: str) -> None:
    router = MuteRouter()
    client = RouterClient(router.address, silence_timeout=60.0 if dies else 0.3)
    answering = threading.Thread(target=router.answer_status)
    answering.start()
    client.connect()
    answering.join(WAIT_S)
    stream = client.stream("hello")
    assert router.socket.poll(int(WAIT_S * 1000))
    if dies:
        router.close()
    with pytest.raises(RequestFailedError, match=problem):
        stream.result()
    client.close()
    router.close()


def test_waiting_is_not_silence(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    client = rig.client(silence_timeout=1.0)
    stream = client.stream("hello", max_tokens=5)
    b0.wait_for(Submit)
    assert b0.wait_for(Heartbeat, len(b0.messages) + 30)  # 1.5 s of the router's beats
    b0.go_on.set()
    assert stream.result().text == "hello"


# --- clients that go ------------------------------------------------------------------------------------


def test_a_client_that_vanishes_while_it_waits_has_its_request_aborted(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=0)
    dealer = rig.dealer(rig.front)
    dealer.send(_generate("x", "hello"))
    (submit,) = b0.wait_for(Submit)
    dealer.close(linger=0)
    assert b0.wait_for(Abort) == [Abort(submit.key)]
    eventually(lambda: rig.server.status().num_requests == 0)
    assert rig.server.counters["gone_clients"] == 1


def test_a_stuck_client_is_dropped_and_does_not_hold_up_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.FRONT_HWM", 20)
    rig = start("b0")
    stuck = rig.dealer(rig.front, RCVHWM=1, RCVBUF=4096)
    client = rig.client()
    numbers = itertools.count()
    while not rig.server.counters["stuck_clients"]:
        for _ in range(50):  # a label comes back with each token: it is what fills the buffers between the two
            stuck.send(_generate(f"{next(numbers):0>200}", "y" * 150, max_tokens=50))
        assert client.generate("other", max_tokens=5).text == "other"
    eventually(lambda: rig.server.status().num_requests == 0)
    assert client.generate("after", max_tokens=5).text == "after"


# --- bytes that are no messages ---------------------------------------------------------------------------


BAD = [
    b"",
    b"\xc1",
    b"\xff" * 40,
    msgpack.packb([1]),
    msgpack.packb([PROTOCOL_VERSION, [31]]),
    msgpack.packb([PROTOCOL_VERSION, [99, "x"]]),
    msgpack.packb([PROTOCOL_VERSION, {"a": 1}]),
    msgpack.packb({1: 2}),
    msgpack.packb([[[[]]]]),
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_malformed_bytes_of_clients_are_answered(start: Start, data: bytes) -> None:
    rig = start("b0")
    dealer = rig.dealer(rig.front)
    dealer.send(data)
    answer = receive(dealer)
    assert isinstance(answer, Failed)
    assert answer.code == "codec_error"
    dealer.send(_generate("x", "ok", max_tokens=1))
    assert isinstance(receive(dealer), Delta)
    assert isinstance(receive(dealer), Done)


def test_a_malformed_request_is_answered_under_its_label(start: Start) -> None:
    rig = start("b0")
    dealer = rig.dealer(rig.front)
    dealer.send(msgpack.packb([PROTOCOL_VERSION, [31, "mine", [1, 0]]]))  # max_tokens 0
    answer = receive(dealer)
    assert (answer.label, answer.code) == ("mine", "codec_error")
    dealer.send(msgpack.packb([PROTOCOL_VERSION + 1, [31, "mine", [1, 5]]]))
    assert receive(dealer).code == "version_mismatch"
    dealer.send_multipart([b"two", b"frames"])
    assert receive(dealer).code == "codec_error"


def test_malformed_bytes_of_workers_are_counted_and_nothing_else_happens(start: Start) -> None:
    rig = start("b0")
    dealer = rig.dealer(rig.back)
    for data in BAD:
        dealer.send(data)
    dealer.send_multipart([b"two", b"frames"])
    eventually(lambda: rig.server.counters["malformed_from_workers"] == len(BAD) + 1)
    assert rig.client().generate("ok", max_tokens=2).text == "ok"
    assert rig.server.counters["internal_errors"] == 0


def test_messages_before_a_join_are_counted(start: Start) -> None:
    rig = start("b0")
    dealer = rig.dealer(rig.back)
    dealer.send(Codec[Any](ToRouterFromWorker).encode(Heartbeat("b0#1")))
    eventually(lambda: rig.server.counters["not_joined"] == 1)


# --- workers ------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_work_here_is_told_why(start: Start) -> None:
    rig = start("p0")
    dealer = rig.dealer(rig.back)
    dealer.send(Codec[Any](ToRouterFromWorker).encode(join(worker("d0", fingerprint="model-b"))))
    answer = receive(dealer, ToWorker)
    assert isinstance(answer, JoinRefused)
    assert "model-a" in answer.reason
    assert "model-b" in answer.reason
    dealer.send(msgpack.packb([7, [11, 7]]))
    answer = receive(dealer, ToWorker)
    assert isinstance(answer, JoinRefused)
    assert "7" in answer.reason


def test_joining_gives_the_clock_and_the_peers(start: Start) -> None:
    rig = start("p0", "d0")
    (joined,) = rig.team["p0"].wait_for(Joined)
    assert joined.echo <= joined.received_at <= joined.sent_at
    assert joined.router_incarnation == rig.server.incarnation
    assert [w.worker_id for w in rig.team["p0"].wait_for(Peers, 2)[-1].workers] == ["d0"]


def test_a_worker_that_dies_is_noticed_and_the_stream_goes_on_elsewhere(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=2)
    stream = rig.client().stream("hello", max_tokens=7)
    deltas = iter(stream)
    text = next(deltas).text
    while len(text) < 2:
        text += next(deltas).text
    rig.add("b1")
    b0.stop()
    text += "".join(d.text for d in deltas)
    assert text == "hellohe"
    assert stream.completion is not None
    assert (stream.completion.attempts, stream.completion.decode_worker) == (2, "b1")
    (submit,) = rig.team["b1"].wait_for(Submit)
    assert (submit.key.attempt, submit.prior) == (1, tuple(b"he"))


def test_a_restarted_worker_takes_what_waited_for_it(start: Start) -> None:
    rig = start()
    b0 = rig.add("b0", hold=1)
    stream = rig.client().stream("hello", max_tokens=5)
    b0.wait_for(Submit)
    b0.stop()
    eventually(lambda: [w.state for w in rig.server.status().workers] == ["lost"])
    rig.add("b0", life=2)
    assert stream.result().text == "hello"


def _generate(label: str, text: str, max_tokens: int = 20) -> bytes:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Codec[Any](ToRouterFromClient).encode(Generate(label=label, sampling=sampling, text=text))


def test_keys_of_requests_are_unguessable_and_unique(start: Start) -> None:
    rig = start("b0")
    client = rig.client()
    ids = {client.generate("a", max_tokens=1).request_id for _ in range(5)}
    assert len(ids) == 5
    assert all(len(bytes.fromhex(i)) == 16 for i in ids)
    assert {m.key for m in rig.team["b0"].wait_for(Submit, 5)} == {RequestKey(i, 0) for i in ids}


def test_what_is_taken_back_before_the_client_has_connected_is_aborted(start: Start) -> None:
    rig = start()
    rig.add("b0", hold=1)
    stream = rig.client().stream("hello", max_tokens=3)
    stream.cancel()
    assert stream.result().finish_reason == "abort"


# --- forms of output ------------------------------------------------------------------------------------


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Forms are looked at once this is set."""
    gate = threading.Event()

    def check(form: StructuredOutput) -> None:
        assert gate.wait(WAIT_S)
        check_structured(form)

    monkeypatch.setattr("router.forms.check_structured", check)
    yield gate
    gate.set()


FORM = StructuredOutput.choice(["a"])


def test_others_are_served_while_a_form_is_looked_at(start: Start, look: threading.Event) -> None:
    rig = start("b0")
    client = rig.client()
    held = client.stream("hello", max_tokens=3, structured=FORM)
    assert client.generate("abc", max_tokens=3).text == "abc"
    assert rig.client().generate("abc", max_tokens=3).text == "abc"
    assert [submit.sampling.structured for submit in rig.team["b0"].wait_for(Submit)] == [None, None]
    look.set()
    assert held.result().text == "hel"
    assert rig.team["b0"].wait_for(Submit, 3)[-1].sampling.structured == FORM


def test_a_form_that_nobody_can_follow_is_refused_by_name(start: Start, look: threading.Event) -> None:
    rig = start("b0")
    held = rig.client().stream("hello", max_tokens=3, structured=StructuredOutput.regex("["))
    look.set()
    with pytest.raises(InvalidRequestError, match="regex"):
        held.result()


def test_a_client_that_takes_back_what_is_looked_at_hears_of_its_end(start: Start, look: threading.Event) -> None:
    rig = start()
    fake = rig.add("b0", hold=0)
    client = rig.client()
    held = client.stream("hello", max_tokens=3, structured=FORM)
    held.cancel()
    client.status()  # so the router has read it
    look.set()
    assert held.result().finish_reason == "abort"
    eventually(lambda: rig.server.status().num_requests == 0)
    assert len(fake.wait_for(Abort)) == 1


def test_what_is_looked_at_ends_with_its_client_and_with_the_router(start: Start, look: threading.Event) -> None:
    rig = start("b0")
    gone = RouterClient(rig.front)
    gone.stream("hello", max_tokens=3, structured=FORM)
    gone.status()
    gone.close()
    eventually(lambda: rig.server.counters["gone_clients"] == 1)
    client = rig.client()
    held = client.stream("hello", max_tokens=3, structured=FORM)
    client.status()  # so the router has read it
    rig.server.stop()
    with pytest.raises(RequestFailedError, match="stopped"):
        held.result()
    assert not any(type(message) is Submit for message in rig.team["b0"].messages)
