"""Workers, router and client together over real threads and sockets, without a model."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.errors import InvalidRequestError, OverloadedError, RequestFailedError, RequestTooLargeError
from baton.protocol import TransferId
from baton_cli.drain import run_drain
from kv_transfer.base import Completion as TransportEvent
from kv_transfer.base import KVTransport, Received
from router.client import RouterClient
from router.server import RouterServer
from tests.fakes import VOCAB
from tests.fakes_router import LetterText
from tests.stub_cluster import LAYOUT, StubCluster, expected_tokens, wait_until

B = LAYOUT.block_size
CHUNK = 48
ENGINE = {"max_batch_tokens": CHUNK, "max_batch_requests": 8}
SPLIT = {"prefill": {"workers": 1}, "decode": {"workers": 1}}
CASES = {
    "colocated": ({"both": {"workers": 2}}, "inproc"),
    "split inproc": (SPLIT, "inproc"),
    "split shm": (SPLIT, "shm://"),
    "split zmq+tcp": (SPLIT, "zmq+tcp://127.0.0.1"),
    "split 2+2 zmq+tcp": ({"prefill": {"workers": 2}, "decode": {"workers": 2}}, "zmq+tcp://127.0.0.1"),
}
LENGTHS = sorted({1, B - 1, B, B + 1, 2 * B, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 150})


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(length * 31 + salt * 17 + i) % 1000 for i in range(length)]


@pytest.fixture(params=CASES.values(), ids=CASES)
def cluster(request: pytest.FixtureRequest) -> Iterator[StubCluster]:
    pools, transport = request.param
    with StubCluster(pools, transport=transport, engine=ENGINE) as cluster:
        yield cluster
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []


def test_lengths_around_every_boundary_give_the_undisturbed_tokens(cluster: StubCluster) -> None:
    """Row 14 and 15 of the hand-over scenarios: sizes around blocks and chunks, all at once."""
    with cluster.client() as client, ThreadPoolExecutor(len(LENGTHS)) as pool:
        done = list(pool.map(lambda n: client.generate(prompt_of(n), max_tokens=40, seed=0), LENGTHS))
    for length, completion in zip(LENGTHS, done, strict=True):
        assert list(completion.token_ids) == expected_tokens(prompt_of(length), 40), length
        assert (completion.finish_reason, completion.attempts) == ("length", 1)
        assert completion.usage.completion_tokens == 40
        split = completion.prefill_worker != completion.decode_worker
        assert split == completion.prefill_worker.startswith("prefill")
        assert completion.kv_bytes == (-(-length // B) * LAYOUT.block_bytes if split else 0)


def test_one_token_needs_no_decode_worker(cluster: StubCluster) -> None:
    with cluster.client() as client:
        done = client.generate(prompt_of(20), max_tokens=1, seed=0)
    assert list(done.token_ids) == expected_tokens(prompt_of(20), 1)
    assert done.kv_bytes == 0


def test_a_first_token_that_stops_sends_no_commit(cluster: StubCluster) -> None:
    prompt = prompt_of(60)
    first = expected_tokens(prompt, 1)[0]
    with cluster.client() as client:
        done = client.generate(prompt, max_tokens=30, seed=0, stop_token_ids=[first])
    assert (list(done.token_ids), done.finish_reason, done.kv_bytes) == ([first], "stop", 0)


def test_finished_and_aborted_requests_leave_no_block_held(cluster: StubCluster) -> None:
    draw = random.Random(1)

    def one(number: int) -> None:
        prompt = prompt_of(draw.randint(1, 200), number)
        tokens = expected_tokens(prompt, 60)
        with client.stream(prompt, max_tokens=60, seed=0) as stream:
            seen: list[int] = []
            leave_after = draw.choice([None, 0, 1, 2, 10])
            for delta in stream:
                seen += delta.token_ids
                if leave_after is not None and len(seen) >= leave_after:
                    break
            assert seen == tokens[: len(seen)]
            assert leave_after is not None or seen == tokens

    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(60)))
    cluster.wait_ledger_zero()
    for worker in cluster.workers.values():
        worker.core.engine.check_integrity()
        assert worker.core.engine.live() == []


def test_what_can_never_fit_is_refused_and_others_do_not_notice() -> None:
    pools = {"prefill": {"kv_blocks": 40}, "decode": {"kv_blocks": 8}}
    with StubCluster(pools, engine=ENGINE) as cluster, cluster.client() as client:
        with pytest.raises(RequestTooLargeError):
            client.generate(prompt_of(120), max_tokens=20)
        assert list(client.generate(prompt_of(20), max_tokens=5, seed=0).token_ids) == expected_tokens(prompt_of(20), 5)
        cluster.wait_ledger_zero()


@pytest.mark.parametrize("transport", ["inproc", "shm://", "zmq+tcp://127.0.0.1"])
def test_a_decode_pool_of_two_requests_serves_twelve(transport: str) -> None:
    """Offers wait for credit, before their first chunk, and decode preempts where it must."""
    pools = {"prefill": {"kv_blocks": 64}, "decode": {"kv_blocks": 12}}
    growth = {"expected_growth": 16}
    with StubCluster(pools, transport=transport, engine=ENGINE, transfer=growth) as cluster, cluster.client() as client:
        prompts = [prompt_of(60, i) for i in range(12)]
        with ThreadPoolExecutor(12) as pool:
            done = list(pool.map(lambda p: client.generate(p, max_tokens=80, seed=0), prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            assert list(completion.token_ids) == expected_tokens(prompt, 80)
            assert completion.attempts == 1
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []


class CorruptingTransport:
    """Flips a bit of the first block of every transfer after it was written."""

    def __init__(self, inner: KVTransport):
        self._inner = inner
        self._blocks: dict[tuple[TransferId, int], int] = {}
        self.num_flipped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def register(self, pool: Any, write: Any = None, **options: Any) -> None:
        """Without `write`, which hashes as it copies: what is hashed is what the flip has left."""
        self._pool = pool
        self._inner.register(pool, **options)

    def receive(self, peer: str, transfer: TransferId, refs: Any, blocks: Sequence[tuple[int, int]]) -> None:
        self._blocks.update({(transfer, index): block for index, block in blocks})
        self._inner.receive(peer, transfer, refs, blocks)

    def completions(self) -> list[TransportEvent]:
        events = self._inner.completions()
        for event in events:
            if isinstance(event, Received) and 0 in event.indices:
                self._pool.block(self._blocks[event.transfer, 0])[3] ^= 1
                self.num_flipped += 1
        return events


def test_a_corrupted_block_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode notices by checksum and computes the prompt itself: same tokens, one attempt."""
    corrupting: list[CorruptingTransport] = []

    def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
        if not worker_id.startswith("decode"):
            return transport
        corrupting.append(CorruptingTransport(transport))
        return corrupting[-1]  # type: ignore[return-value]

    with StubCluster(SPLIT, engine=ENGINE, wrap=wrap) as cluster, cluster.client() as client:
        for length in (5, 16, 100):
            done = client.generate(prompt_of(length), max_tokens=20, seed=0)
            assert list(done.token_ids) == expected_tokens(prompt_of(length), 20)
            assert done.attempts == 1
        assert corrupting[0].num_flipped == 3
        assert cluster.step_failures() == []
        cluster.wait_ledger_zero()


def test_a_failing_step_is_retried_elsewhere_without_a_repeated_token() -> None:
    with StubCluster({"both": {"workers": 2}}, engine=ENGINE) as cluster, cluster.client() as client:
        broken = cluster.runners["both-0"]
        good_run = broken.run

        def run_then_fail(plan: Any) -> list[int | None]:
            if broken.num_steps >= 5:
                raise MemoryError("no memory left")
            return good_run(plan)

        broken.run = run_then_fail  # type: ignore[method-assign]
        prompt = prompt_of(20)
        done = [client.generate(prompt, max_tokens=12, seed=0) for _ in range(2)]
        assert sorted(d.attempts for d in done) == [1, 2]
        for completion in done:
            assert list(completion.token_ids) == expected_tokens(prompt, 12)
        cluster.wait_ledger_zero()


def test_an_idle_worker_only_beats() -> None:
    """Nothing polls: while nothing happens the I/O thread turns for heartbeats and the engine thread not at all."""
    with StubCluster(SPLIT, engine=ENGINE) as cluster:
        worker = cluster.workers["decode-0"]
        turns, beats, plans = Counter[str](), Counter[str](), Counter[str]()

        def count(counter: Counter[str], function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any) -> Any:
                counter["calls"] += 1
                return function(*arguments)

            return counted

        worker._wait_for_news = count(turns, worker._wait_for_news)  # type: ignore[method-assign]
        worker._beat = count(beats, worker._beat)  # type: ignore[method-assign]
        worker.core.next_step = count(plans, worker.core.next_step)  # type: ignore[method-assign]
        wait_until(lambda: beats["calls"] >= 5, "five heartbeats")
        # A turn for our heartbeat, one for the router's, and one for the answer to what it makes us do.
        assert turns["calls"] <= 3 * beats["calls"] + 3
        assert plans["calls"] <= turns["calls"], "the engine thread looks for work only when something came"
        health = worker.health()
        assert health["healthy"]
        assert health["step_s"] == 0.0


def test_a_hanging_step_makes_the_worker_unhealthy_while_its_heart_beats() -> None:
    release = threading.Event()

    def step_s(worker_id: str, plan: Any) -> float:
        release.wait(20)
        return 0.0

    with StubCluster({"both": {"workers": 1}}, step_s=step_s) as cluster, cluster.client() as client:
        worker = cluster.workers["both-0"]
        worker._step_timeout_s = 0.05
        with client.stream(prompt_of(5), max_tokens=2, seed=0) as stream:
            wait_until(lambda: not worker.health()["healthy"], "the hang is noticed")
            assert "running for" in worker.health()["problem"]
            release.set()
            for _ in stream:
                pass
        assert worker.health()["healthy"]


def test_stopping_leaves_no_thread_and_no_socket() -> None:
    before = set(threading.enumerate())
    with StubCluster(SPLIT, transport="zmq+tcp://127.0.0.1") as cluster, cluster.client() as client:
        client.generate(prompt_of(30), max_tokens=3)
    assert {t for t in threading.enumerate() if t.is_alive()} - before == set()
    assert cluster.context.closed


def test_a_stopping_router_ends_open_requests_and_frees_the_workers() -> None:
    with StubCluster(SPLIT, engine=ENGINE, step_s=lambda name, plan: 0.005) as cluster:
        for worker in cluster.workers.values():
            worker._router_timeout_s = 0.5
        client = RouterClient(cluster.address)
        stream = client.stream(prompt_of(30), max_tokens=400, seed=0)
        deltas = iter(stream)
        next(deltas)
        cluster.router.stop()
        with pytest.raises(RequestFailedError, match="router"):
            for _ in deltas:
                pass
        client.close()
        cluster.wait_ledger_zero()


@pytest.mark.parametrize("pools", [SPLIT, {"both": {}}], ids=["split", "colocated"])
def test_a_request_that_takes_too_long_fails_and_frees_everything(pools: dict[str, Any]) -> None:
    cluster = StubCluster(pools, engine=ENGINE, router={"request_timeout_s": 0.3}, step_s=lambda name, plan: 0.02)
    with cluster, cluster.client() as client:
        with pytest.raises(RequestFailedError, match=r"took too long.*request_timeout_s"):
            client.generate(prompt_of(20), max_tokens=300, seed=0)
        assert client.generate(prompt_of(20), max_tokens=2, seed=0).finish_reason == "length"
        cluster.wait_ledger_zero()


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    """Row 13: a prompt that prefill has finished is still handed over; new requests go elsewhere."""
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 1}}
    with StubCluster(pools, engine=ENGINE, step_s=lambda name, plan: 0.01) as cluster, cluster.client() as client:
        with pytest.raises(InvalidRequestError, match="known: decode-0, prefill-0, prefill-1"):
            client.drain("prefill-9")
        streams = [client.stream(prompt_of(60, i), max_tokens=40, seed=0) for i in range(6)]
        status = client.drain("prefill-0")
        states = {w.info.worker_id: w.state for w in status.workers}
        assert states == {"prefill-0": "draining", "prefill-1": "ready", "decode-0": "ready"}
        late = [client.generate(prompt_of(30, i), max_tokens=3, seed=0) for i in range(4)]
        assert {done.prefill_worker for done in late} == {"prefill-1"}
        for i, stream in enumerate(streams):
            done = stream.result()
            assert list(done.token_ids) == expected_tokens(prompt_of(60, i), 40)
            assert done.attempts == 1
        run_drain(cluster.address, "prefill-0", undo=False, timeout_s=10)
        client.drain("prefill-1")
        with pytest.raises(OverloadedError, match="draining: prefill-0, prefill-1"):
            client.generate(prompt_of(5), max_tokens=3)
        run_drain(cluster.address, "prefill-0", undo=True, timeout_s=10)
        assert client.generate(prompt_of(5), max_tokens=3).prefill_worker == "prefill-0"


def test_a_worker_that_leaves_while_its_router_is_away_tells_the_next_one() -> None:
    with StubCluster({"both": {}}) as cluster:
        worker = cluster.workers["both-0"]
        cluster.router.stop()
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(worker.leave, 30.0)
            back_port = int(cluster.back.rpartition(":")[2])
            text: Any = LetterText()
            text.vocab_size = VOCAB
            successor = RouterServer(cluster.config, text=text, back_port=back_port)
            successor.start()
            try:
                assert left.result(), "nothing was left to do, and the new router knows"
            finally:
                successor.stop()
