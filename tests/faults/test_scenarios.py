"""Rows of docs/scenarios.md, failures that users of other split-serving systems met, each by its number.

Real threads, sockets, sessions and router; no model. B is the block size. The rows that are not here are elsewhere:
5 and 9 in the unit tests of the ports too, 11 in `test_ray_lifecycle`, 29 in `tests/integration/test_workers`.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from baton.codec import Codec
from baton.engine.request import StepPlan
from baton.errors import ClusterError, OverloadedError, RequestTooLargeError
from baton.ports import FromPrefill, PeerEvent
from baton.protocol import TransferId
from baton.sampling_params import SamplingParams
from baton.timeline import Stage
from kv_transfer.base import KVTransport
from kv_transfer.faulty_transport import FaultPlan, FaultyTransport
from kv_transfer.messages import Commit, Data, Offer, ToDecode
from kv_transfer.zmq_transport import DataHeader
from router.client import RouterClient
from tests.fakes_links import RewritingLinks
from tests.stub_cluster import LAYOUT, StubCluster, expected_tokens, wait_until
from tests.stub_process import ALL_TRANSPORTS, GROUPS, NIXL, TRANSPORT, ProcessCluster
from tests.stub_process import TRANSPORTS as BETWEEN_PROCESSES

B = LAYOUT.block_size
ENGINE = {"max_batch_tokens": 48, "max_batch_requests": 8}
SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}
TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", *BETWEEN_PROCESSES])
EVERY_TRANSPORT = pytest.mark.parametrize("transport", ALL_TRANSPORTS)
APART = pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
APART_AND_GROUPS = pytest.mark.parametrize("transport", [*BETWEEN_PROCESSES, GROUPS])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(length * 31 + salt * 17 + i) % 1000 for i in range(length)]


def kv_bytes_of(length: int) -> int:
    """Of a prompt of so many tokens."""
    return LAYOUT.num_blocks_for(length) * LAYOUT.block_bytes


class Gate:
    """Holds up the steps of one worker while it is closed, those that `which` picks."""

    def __init__(self, worker_id: str, which: Callable[[StepPlan], bool] = lambda plan: True):
        self._worker_id = worker_id
        self._which = which
        self._open = threading.Event()
        self.reached = threading.Event()

    def open(self) -> None:
        self._open.set()

    def step_s(self, worker_id: str, plan: StepPlan) -> float:
        if worker_id == self._worker_id and not self._open.is_set() and self._which(plan):
            self.reached.set()
            assert self._open.wait(30)
        return 0.0


def with_faults(
    role: str = "decode", plan: FaultPlan | None = None
) -> tuple[list[FaultyTransport], Callable[[str, KVTransport], KVTransport]]:
    """For `StubCluster(wrap=...)`: workers of this role over a `FaultyTransport`; and these, as they are made."""
    made: list[FaultyTransport] = []

    def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
        if not worker_id.startswith(role):
            return transport
        made.append(FaultyTransport(transport, plan))
        return made[-1]

    return made, wrap


def receive_counters(cluster: StubCluster, worker_id: str = "decode-0") -> Any:
    port: Any = cluster.workers[worker_id].core.receive
    return port.counters


def send_counters(cluster: StubCluster, worker_id: str = "prefill-0") -> Any:
    port: Any = cluster.workers[worker_id].core.send
    return port.counters


def ended_well(cluster: StubCluster) -> None:
    cluster.wait_ledger_zero()
    assert cluster.step_failures() == []
    for worker in cluster.workers.values():
        worker.core.engine.check_integrity()
        assert worker.core.engine.live() == []


# --- hand-over --------------------------------------------------------------------------------------


@EVERY_TRANSPORT
def test_abort_while_blocks_are_under_way(transport: str) -> None:
    """Row 1: decode frees at once, and what arrives later is dropped and counted."""
    held, wrap = with_faults()
    with StubCluster(SPLIT, transport=transport, engine=ENGINE, wrap=wrap) as cluster, cluster.client() as client:
        held[0].hold()
        with client.stream(prompt_of(60), max_tokens=20, seed=0) as stream:
            next(iter(stream))
            wait_until(lambda: cluster.workers["decode-0"].num_held_blocks() > 0, "decode has reserved")
            stream.cancel()
        wait_until(lambda: cluster.workers["decode-0"].num_held_blocks() == 0, "decode has freed", within_s=2)
        wait_until(lambda: held[0].num_cancelled == 1, "the transfer is cancelled")
        held[0].release()
        prompt = prompt_of(40)
        assert list(client.generate(prompt, max_tokens=5, seed=0).token_ids) == expected_tokens(prompt, 5)
        assert receive_counters(cluster)["done"] == 1
        ended_well(cluster)


@EVERY_TRANSPORT
def test_a_pool_of_one_request_that_is_aborted_on_the_wire_serves_the_next(transport: str) -> None:
    """Row 2: the next one gets the blocks that late data was meant for, and its own tokens."""
    held, wrap = with_faults()
    pools = {"prefill": {}, "decode": {"kv_blocks": 5}}
    with StubCluster(pools, transport=transport, engine=ENGINE, wrap=wrap) as cluster, cluster.client() as client:
        held[0].hold()
        first, second = prompt_of(60, 1), prompt_of(60, 2)
        with client.stream(first, max_tokens=20, seed=0) as stream:
            next(iter(stream))
        with client.stream(second, max_tokens=20, seed=0) as stream:
            next(iter(stream))  # prefill has begun, so decode has reserved for it
            held[0].release()
        done = client.generate(second, max_tokens=20, seed=0)
        assert list(done.token_ids) == expected_tokens(second, 20)
        assert done.attempts == 1
        assert receive_counters(cluster)["corrupt"] == 0
        ended_well(cluster)


@EVERY_TRANSPORT
def test_a_client_that_closes_after_prefill_and_before_decode(transport: str) -> None:
    """Row 3: prefill lets go of its blocks, decode does no work."""
    held, wrap = with_faults()
    with StubCluster(SPLIT, transport=transport, engine=ENGINE, wrap=wrap) as cluster:
        held[0].hold()
        client = RouterClient(cluster.address)
        next(iter(client.stream(prompt_of(60), max_tokens=20, seed=0)))
        client.close()
        wait_until(lambda: cluster.num_held_blocks() == 0 or transport == "inproc", "freed", within_s=2)
        held[0].release()  # an inproc sender's blocks are read until the receiver has looked at them
        ended_well(cluster)
        assert cluster.runners["decode-0"].num_steps == 0


@EVERY_TRANSPORT
def test_a_lost_shipment_is_computed_again_by_decode_within_the_lease(transport: str) -> None:
    """Row 4: blocks that never come cost a lease, not the request; counted as one failed transfer."""
    lossy, wrap = with_faults("prefill")
    lease = {"lease_s": 0.4}
    with (
        StubCluster(SPLIT, transport=transport, engine=ENGINE, wrap=wrap, transfer=lease) as cluster,
        cluster.client() as client,
    ):
        lossy[0].arm("drop", LAYOUT.num_blocks_for(40))
        prompt = prompt_of(40)
        done = client.generate(prompt, max_tokens=10, seed=0)
        assert list(done.token_ids) == expected_tokens(prompt, 10)
        assert done.attempts == 1
        assert done.latency_s < 2
        assert (receive_counters(cluster)["failed"], receive_counters(cluster)["expired"]) == (1, 0)
        ended_well(cluster)


def test_forged_ids_ranges_and_frames_never_reach_a_pool() -> None:
    """Row 5: unknown transfers, blocks out of range, data that nobody announced: dropped; the service goes on."""
    with (
        StubCluster(SPLIT, transport=TRANSPORT, engine=ENGINE) as cluster,
        cluster.client() as client,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as control,
        context.socket(zmq.PUSH) as data,
    ):
        decode = cluster.workers["decode-0"]
        for forger in (control, data):
            forger.setsockopt(zmq.LINGER, 0)
        control.setsockopt(zmq.ROUTING_ID, b"forger")
        control.connect(decode.info.control_address)
        data.connect(decode.info.data_address.removeprefix("zmq+"))
        mine = TransferId("f" * 32, 0, 0, "forger", decode.info.incarnation)
        stolen = mine._replace(source=cluster.workers["prefill-0"].info.incarnation)
        codec: Codec[Any] = Codec(ToDecode)
        for transfer in (mine, stolen, mine._replace(target="former-life")):
            control.send(codec.encode(Offer(transfer, (1, 2), (), SamplingParams())))
            control.send(codec.encode(Data(transfer, (7,), (0,))))
            control.send(codec.encode(Commit(transfer, 1, (1, 2, 3), True)))
        for indices, sizes in (
            ((0,), [LAYOUT.block_bytes]),
            ((1 << 19,), [LAYOUT.block_bytes]),
            ((0,), [3]),
            ((0,), []),
        ):
            header = Codec(DataHeader).encode(DataHeader(stolen, indices))
            data.send_multipart([header, *(bytes(size) for size in sizes)])
        stats = decode._links._transport.stats  # type: ignore[attr-defined]
        # Of what nobody awaits any size is one that could come late.
        wait_until(lambda: (stats.num_dropped, stats.num_malformed) == (3, 1), "the forged frames came")
        for length in (5, 40):
            prompt = prompt_of(length)
            done = client.generate(prompt, max_tokens=10, seed=0)
            assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 10), 1)
        assert receive_counters(cluster)["done"] == 2
        ended_well(cluster)


@EVERY_TRANSPORT
def test_blocks_told_twice_count_once(transport: str) -> None:
    """Row 5: a repeated completion is ignored; the transfer ends once."""
    repeating, wrap = with_faults(plan=FaultPlan(duplicate=100))
    with StubCluster(SPLIT, transport=transport, engine=ENGINE, wrap=wrap) as cluster, cluster.client() as client:
        prompt = prompt_of(100)
        done = client.generate(prompt, max_tokens=10, seed=0)
        assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 10), 1)
        assert repeating[0].faults["duplicate"] == LAYOUT.num_blocks_for(100)
        ended_well(cluster)


@pytest.mark.parametrize(
    ("transport", "forgery"),
    [
        *(("shm://", forgery) for forgery in ("another life", "out of range", "consumed", "reused", "another block")),
        *(pytest.param(*NIXL.values, forgery, marks=NIXL.marks) for forgery in ("another life", "another block")),
    ],
)
def test_forged_void_and_late_refs_are_not_read(transport: str, forgery: str) -> None:
    """Row 5: of transports that pull. Nothing is read by a ref that is not lent, and what is wrong is not used.

    Decode computes the prompt, or, as P waits for the end of what it lent, the request is placed anew. Either counts.
    """
    transfers: list[TransferId] = []
    seen: list[int] = []

    def rewrite(event: PeerEvent) -> PeerEvent:
        """Those of the second transfer."""
        if not isinstance(event, FromPrefill) or not isinstance(event.message, Data) or not event.message.refs:
            return event
        refs, transfer = event.message.refs, event.message.transfer
        if transfer not in transfers:
            transfers.append(transfer)
        if transfer == transfers[0]:
            seen.extend(refs)
        if transfers.index(transfer) != 1:
            return event
        forged = {
            "another life": [ref + (1 << 40) for ref in refs],
            "out of range": [ref + (1 << 20) for ref in refs],
            "consumed": seen[: len(refs)],
            "reused": seen[: len(refs)],
            "another block": [*refs[1:], refs[0]],
        }[forgery]
        return FromPrefill(event.peer, msgspec.structs.replace(event.message, refs=tuple(forged)))

    # Of a pool of four blocks, which one request fills, the second one has the blocks of the first, in their next life.
    pools = {"prefill": {"kv_blocks": 4 if forgery == "reused" else 64}, "decode": {}}
    wrap_links: Any = lambda worker_id, links: RewritingLinks(links, rewrite) if worker_id == "decode-0" else links
    engine = {**ENGINE, "prefix_cache": False, "max_batch_tokens": 64}  # one chunk
    lease = {"lease_s": 0.4, "expected_growth": 0}
    with (
        StubCluster(pools, transport=transport, engine=engine, transfer=lease, wrap_links=wrap_links) as cluster,
        cluster.client() as client,
    ):
        for salt in (0, 1):
            prompt = prompt_of(60, salt)
            done = client.generate(prompt, max_tokens=4, seed=0)
            assert list(done.token_ids) == expected_tokens(prompt, 4)
            counters = send_counters(cluster)
            assert counters["failed"] + counters["expired"] == salt
            assert done.attempts <= 1 + counters["expired"], "decode may have answered before P gave up"
        assert receive_counters(cluster)["corrupt"] == (forgery == "another block")
        ended_well(cluster)


def test_queueing_for_longer_than_the_liveness_timeout_loses_nobody() -> None:
    """Row 7: 32 requests, 4 at a time on decode; waiting is not silence, and shows as its own stage."""
    liveness = {"heartbeat_s": 0.1, "timeout_s": 0.5}
    engine = {"max_batch_tokens": 48, "max_batch_requests": 4}
    steps = lambda worker_id, plan: 0.01 if worker_id == "decode-0" else 0.0
    with (
        # All at decode: else most of them would wait in the router.
        StubCluster(SPLIT, engine=engine, liveness=liveness, step_s=steps, router={"max_handoffs": 32}) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(32) as pool,
    ):
        began = time.monotonic()
        done = list(pool.map(lambda i: client.generate(prompt_of(20, i), max_tokens=16, seed=0), range(32)))
        assert time.monotonic() - began > liveness["timeout_s"]
        for i, completion in enumerate(done):
            assert (list(completion.token_ids), completion.attempts) == (expected_tokens(prompt_of(20, i), 16), 1)
        queues = [c.timeline.stages()["decode_queue"] for c in done]  # type: ignore[index]
        assert max(queues) > liveness["timeout_s"]
        ended_well(cluster)


def test_a_handed_over_request_that_is_preempted_is_computed_again_on_decode() -> None:
    """Row 8: decode's pool is too small for both; no second hand-over, same tokens."""
    recomputed = 0

    def count(worker_id: str, plan: StepPlan) -> float:
        nonlocal recomputed
        recomputed += worker_id == "decode-0" and any(item.num_tokens > 1 for item in plan.items)
        return 0.002

    pools = {"prefill": {}, "decode": {"kv_blocks": 8}}
    growth = {"expected_growth": 0}
    with (
        StubCluster(pools, engine=ENGINE, transfer=growth, step_s=count) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(3) as pool,
    ):
        done = list(pool.map(lambda i: client.generate(prompt_of(30, i), max_tokens=80, seed=0), range(3)))
        for i, completion in enumerate(done):
            assert (list(completion.token_ids), completion.attempts) == (expected_tokens(prompt_of(30, i), 80), 1)
        assert recomputed > 0
        assert send_counters(cluster)["offered"] == 3
        ended_well(cluster)


@pytest.mark.parametrize("state", ["credit", "prefill", "wire", "decode queue", "decode step", "decoding"])
@TRANSPORTS
def test_abort_in_every_state(state: str, transport: str) -> None:
    """Row 9: wherever the request is, its end frees both sides; others go on."""
    held, wrap = with_faults()
    gate = Gate("prefill-0" if state == "prefill" else "decode-0")
    if state in ("wire", "decoding"):
        gate.open()
    pools = {"prefill": {}, "decode": {"kv_blocks": 5}}  # room for one
    with StubCluster(
        pools, transport=transport, engine={**ENGINE, "max_batch_requests": 1}, wrap=wrap, step_s=gate.step_s
    ) as cluster:
        decode, prefill = cluster.workers["decode-0"], cluster.workers["prefill-0"]
        with cluster.client() as client:
            if state == "wire":
                held[0].hold()
            victim = client.stream(prompt_of(35), max_tokens=30, seed=0)
            if state == "credit":
                assert gate.reached.wait(20)
                waiting = client.stream(prompt_of(35, 1), max_tokens=30, seed=0)
                wait_until(lambda: prefill.core.engine.load().num_waiting == 1, "the second waits for credit")
                waiting.cancel()
                assert waiting.result().finish_reason == "abort"
                assert waiting.completion is not None
                assert waiting.completion.usage.completion_tokens == 0
            elif state == "wire":
                next(iter(victim))
                wait_until(lambda: decode.num_held_blocks() > 0, "decode has reserved")
            elif state == "decoding":
                seen = 0
                for delta in victim:
                    seen += len(delta.token_ids)
                    if seen >= 3:
                        break
            else:
                assert gate.reached.wait(20)
            victim.cancel()
            wait_until(lambda: cluster.router.status().num_requests == 0, "the request has ended")
            if state == "decode queue":
                wait_until(lambda: prefill.num_held_blocks() == 0, "prefill has freed")
            gate.open()
            held[0].release()
            prompt = prompt_of(35, 2)
            done = client.generate(prompt, max_tokens=10, seed=0)
            assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 10), 1)
        ended_well(cluster)


@EVERY_TRANSPORT
def test_a_prompt_of_whole_blocks_moves_exactly_those(transport: str) -> None:
    """Row 10: the first token is not counted into the transfer, though it is known by then."""
    with StubCluster(SPLIT, transport=transport, engine=ENGINE) as cluster, cluster.client() as client:
        for num_blocks in (1, 2, 3):
            prompt = prompt_of(num_blocks * B)
            done = client.generate(prompt, max_tokens=B + 2, seed=0)
            assert list(done.token_ids) == expected_tokens(prompt, B + 2)
            assert done.kv_bytes == num_blocks * LAYOUT.block_bytes
        ended_well(cluster)


# --- shapes and limits ------------------------------------------------------------------------------


@TRANSPORTS
def test_prompts_around_a_block_and_the_same_one_again(transport: str) -> None:
    """Row 14: 1, B-1, B, B+1 tokens, twice each; all complete, prefill is freed. The second time nothing moves."""
    with StubCluster(SPLIT, transport=transport, engine=ENGINE) as cluster, cluster.client() as client:
        for again in (False, True):
            for length in (1, B - 1, B, B + 1):
                done = client.generate(prompt_of(length), max_tokens=4, seed=0)
                assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt_of(length), 4), 1)
                assert done.kv_bytes == (0 if again else kv_bytes_of(length))
                assert done.usage.cached_tokens == (length - 1 if again else 0)
        ended_well(cluster)


@TRANSPORTS
def test_samples_of_a_prompt_share_its_blocks(transport: str) -> None:
    """Row 24: n = 4, and a batch of prompts x n: as many choices, distinct; each prompt crosses the wire once."""
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
    with (
        StubCluster(pools, transport=transport, engine=ENGINE) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(8) as pool,
    ):
        lengths = [1, B - 1, B, B + 1, 3 * B, 100, 200]
        batch = [(length, prompt_of(length)) for length in lengths]
        done = list(pool.map(lambda item: client.generate(item[1], n=4, max_tokens=20, seed=0), batch))
        for (length, prompt), completion in zip(batch, done, strict=True):
            answers = [list(choice.token_ids) for choice in completion.choices]
            assert answers == [expected_tokens(prompt, 20, sample=i) for i in range(4)]
            assert len({tuple(answer) for answer in answers}) == 4
            assert completion.kv_bytes == kv_bytes_of(length)
            assert completion.usage.cached_tokens == 3 * (length - 1)
        assert sum(w.core.load().cache_hit_tokens for w in cluster.workers.values()) == sum(
            3 * (length - 1) + 3 * length for length in lengths
        )
        ended_well(cluster)


@TRANSPORTS
@pytest.mark.parametrize("sample", [0, 2])
def test_one_sample_that_is_aborted_leaves_the_others(transport: str, sample: int) -> None:
    """Row 24: of four, one is aborted, be it the one whose prompt is computed for all: three are left."""
    gate = Gate("prefill-0", lambda plan: any(item.start for item in plan.items))  # the second chunk
    with (
        StubCluster(SPLIT, transport=transport, engine=ENGINE, step_s=gate.step_s) as cluster,
        cluster.client() as client,
    ):
        prompt = prompt_of(100)
        with client.stream(prompt, n=4, max_tokens=20, seed=0) as stream:
            assert gate.reached.wait(20)
            stream.cancel(sample)
            wait_until(lambda: client.status().num_requests == 3, "one has ended")
            gate.open()
            done = stream.result()
        for choice in done.choices:
            if choice.index == sample:
                assert (choice.finish_reason, choice.token_ids) == ("abort", ())
            else:
                assert list(choice.token_ids) == expected_tokens(prompt, 20, sample=choice.index)
        assert done.kv_bytes == kv_bytes_of(100)
        ended_well(cluster)


def test_prompts_around_chunks_and_blocks_equal_colocated() -> None:
    """Row 15: lengths k*c, k*c +- 1, k*B, k*B +- 1 give the colocated tokens."""
    chunk = int(ENGINE["max_batch_tokens"])
    lengths = sorted({k * unit + d for unit in (chunk, B) for k in (1, 2) for d in (-1, 0, 1)})
    tokens = []
    for pools in (SPLIT, {"both": {}}):
        with StubCluster(pools, engine=ENGINE) as cluster, cluster.client() as client:
            tokens.append([client.generate(prompt_of(n), max_tokens=6, seed=1).token_ids for n in lengths])
            ended_well(cluster)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "field"), [(129, 1, "prompt"), (120, 50, "max_tokens")])
def test_longer_than_the_model_reads(prompt_tokens: int, max_tokens: int, field: str) -> None:
    """Row 18: one typed error that names the limit; no worker hears of it; the limit itself works."""
    with StubCluster(SPLIT, engine=ENGINE, model={"max_model_len": 128}) as cluster, cluster.client() as client:
        with pytest.raises(RequestTooLargeError, match="max_model_len 128") as caught:
            client.generate(prompt_of(prompt_tokens), max_tokens=max_tokens)
        assert caught.value.field == field
        assert send_counters(cluster)["offered"] == receive_counters(cluster)["offered"] == 0
        assert sum(runner.num_steps for runner in cluster.runners.values()) == 0
        prompt = prompt_of(120)
        assert list(client.generate(prompt, max_tokens=8, seed=0).token_ids) == expected_tokens(prompt, 8)


def test_larger_than_the_decode_pool() -> None:
    """Row 19: refused at once, naming the pool; one that just fits is served."""
    pools = {"prefill": {}, "decode": {"kv_blocks": 4}}
    with StubCluster(pools, engine=ENGINE) as cluster, cluster.client() as client:
        with pytest.raises(RequestTooLargeError, match="largest pool has 4"):
            client.generate(prompt_of(60), max_tokens=5)
        prompt = prompt_of(60)
        assert list(client.generate(prompt, max_tokens=4, seed=0).token_ids) == expected_tokens(prompt, 4)
        ended_well(cluster)


# --- sampling ---------------------------------------------------------------------------------------


def test_one_token_and_a_first_token_that_stops() -> None:
    """Row 21: exactly one token, the right reason, nothing on the wire, no decode work."""
    prompt = prompt_of(40)
    first = expected_tokens(prompt, 1)
    with StubCluster(SPLIT, engine=ENGINE) as cluster, cluster.client() as client:
        one = client.generate(prompt, max_tokens=1, seed=0)
        stopped = client.generate(prompt, max_tokens=9, seed=0, stop_token_ids=first)
        assert [list(one.token_ids), list(stopped.token_ids)] == [first, first]
        assert (one.finish_reason, stopped.finish_reason) == ("length", "stop")
        assert cluster.runners["decode-0"].num_steps == 0
        ended_well(cluster)


def test_an_end_of_text_that_comes_first() -> None:
    """Row 22: `stop` without commit or decode work; with ignore_eos on to max_tokens."""
    prompt = prompt_of(40)
    tokens = expected_tokens(prompt, 8)
    with StubCluster(SPLIT, engine=ENGINE) as cluster, cluster.client() as client:
        for worker in cluster.workers.values():
            worker.core.engine._eos = frozenset(tokens[:1])
        done = client.generate(prompt, max_tokens=8, seed=0)
        assert (list(done.token_ids), done.finish_reason) == (tokens[:1], "stop")
        cluster.wait_ledger_zero()
        assert receive_counters(cluster)["done"] == 0
        assert cluster.runners["decode-0"].num_steps == 0
        done = client.generate(prompt, max_tokens=8, seed=0, ignore_eos=True)
        assert (list(done.token_ids), done.finish_reason) == (tokens, "length")
        ended_well(cluster)


def test_a_seed_gives_the_same_tokens_split_and_colocated() -> None:
    """Row 23: from the first token on. (With real sampling: tests/golden/test_demo_clusters.)"""
    tokens = []
    for pools in (SPLIT, {"both": {}}):
        with StubCluster(pools, engine=ENGINE) as cluster, cluster.client() as client:
            done = [client.generate(prompt_of(20), max_tokens=12, temperature=1.0, seed=s).token_ids for s in (1, 2)]
            tokens.append(done)
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


# --- faults -----------------------------------------------------------------------------------------

LIVENESS = {"heartbeat_s": 0.2, "timeout_s": 1.0}
QUICK: dict[str, Any] = {"engine": ENGINE, "liveness": LIVENESS}
HANGS_S = 60.0
TURNS = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
"""Two workers get as many requests each, whatever has ended when the next one arrives."""


@APART_AND_GROUPS
def test_a_prefill_worker_killed_at_prefill(transport: str) -> None:
    """Row 27: decode's reservation is back within two seconds, and the request goes on elsewhere."""
    pools = {"prefill": {"workers": 2}, "decode": {}}
    prompts = [prompt_of(40, i) for i in range(4)]
    cluster = ProcessCluster(
        pools, apart=["prefill-1"], apart_step_s=HANGS_S, transport=transport, router=TURNS, **QUICK
    )
    with cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        done = [pool.submit(client.generate, prompt, max_tokens=10, seed=0) for prompt in prompts]
        wait_until(lambda: sum(d.done() for d in done) == 2, "those on the other worker are done")
        wait_until(lambda: cluster.workers["decode-0"].num_held_blocks() > 0, "decode has reserved")
        cluster.kill("prefill-1")
        killed = time.monotonic()
        for prompt, future in zip(prompts, done, strict=True):
            assert list(future.result(timeout=20).token_ids) == expected_tokens(prompt, 10)
        cluster.wait_ledger_zero()
        assert time.monotonic() - killed < 2 * LIVENESS["timeout_s"]
        assert cluster.state("prefill-1") == "lost"
        assert sorted(future.result().attempts for future in done) == [1, 1, 2, 2]
        ended_well(cluster)


@APART
def test_a_decode_worker_killed_before_its_first_token(transport: str) -> None:
    """Row 27: prefill lets go, and the requests go on at another decode worker, without a repeated token."""
    pools = {"prefill": {}, "decode": {"workers": 2}}
    prompts = [prompt_of(40, i) for i in range(4)]
    cluster = ProcessCluster(
        pools, apart=["decode-1"], apart_step_s=HANGS_S, transport=transport, router=TURNS, **QUICK
    )
    with cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        done = [pool.submit(client.generate, prompt, max_tokens=10, seed=0) for prompt in prompts]
        wait_until(lambda: sum(d.done() for d in done) == 2, "those on the other worker are done")
        cluster.kill("decode-1")
        killed = time.monotonic()
        for prompt, future in zip(prompts, done, strict=True):
            assert list(future.result(timeout=20).token_ids) == expected_tokens(prompt, 10)
        cluster.wait_ledger_zero()
        assert time.monotonic() - killed < 2 * LIVENESS["timeout_s"]
        stages = [future.result().timeline for future in done]
        assert all(seconds >= 0 for timeline in stages for seconds in timeline.stages().values())
        assert all(sum(t.stages().values()) == pytest.approx(t.total(), abs=1e-6) for t in stages)
        ended_well(cluster)


@APART
def test_a_worker_that_dies_and_comes_back(transport: str) -> None:
    """Row 11: a new life serves what waited for it; the survivor holds nothing of the former one."""
    pools = {"prefill": {}, "decode": {}}
    cluster = ProcessCluster(
        pools, apart=["decode-0"], apart_step_s=0.01, transport=transport, engine=ENGINE, liveness=LIVENESS
    )
    with cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        prompts = [prompt_of(40, i) for i in range(4)]
        streaming = [pool.submit(client.generate, prompt, max_tokens=200, seed=0) for prompt in prompts]
        wait_until(lambda: send_counters(cluster)["done"] == 4, "all are handed over")
        cluster.kill("decode-0")
        cluster.wait_state("decode-0", "lost")
        cluster.launch("decode-0", "decode")
        for prompt, future in zip(prompts, streaming, strict=True):
            done = future.result(timeout=40)
            assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 200), 2)
            stages = done.timeline.stages()
            assert min(stages.values()) >= 0
            assert sum(stages.values()) == pytest.approx(done.timeline.total(), abs=1e-6)
        ended_well(cluster)


@APART_AND_GROUPS
def test_a_worker_that_freezes_and_thaws(transport: str) -> None:
    """Row 27: it counts as lost meanwhile; what it says afterwards about attempts that were moved is not believed."""
    pools = {"prefill": {}, "decode": {"workers": 2}}
    cluster = ProcessCluster(pools, apart=["decode-1"], apart_step_s=0.01, transport=transport, router=TURNS, **QUICK)
    with cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        prompts = [prompt_of(40, i) for i in range(4)]
        streaming = [pool.submit(client.generate, prompt, max_tokens=200, seed=0) for prompt in prompts]
        wait_until(lambda: send_counters(cluster)["done"] == 4, "all are handed over")
        cluster.processes["decode-1"].send_signal(signal.SIGSTOP)
        cluster.wait_state("decode-1", "lost")
        cluster.processes["decode-1"].send_signal(signal.SIGCONT)
        for prompt, future in zip(prompts, streaming, strict=True):
            assert list(future.result(timeout=20).token_ids) == expected_tokens(prompt, 200)
        assert sorted(future.result().attempts for future in streaming) == [1, 1, 2, 2]
        cluster.wait_state("decode-1", "ready")
        again = [client.generate(prompt, max_tokens=5, seed=0) for prompt in prompts]
        assert {done.decode_worker for done in again} == {"decode-0", "decode-1"}
        wait_until(
            lambda: all(w.load.blocks_free == w.load.blocks_total for w in cluster.router.status().workers),
            "all blocks are free, on the thawed worker too",
        )
        ended_well(cluster)


@APART
def test_nothing_is_kept_of_requests_that_have_ended(transport: str) -> None:
    """Row 9: however many end and however they end, the tables that grow with requests are empty again."""
    with StubCluster(SPLIT, transport=transport, engine=ENGINE) as cluster, cluster.client() as client:

        def one(number: int) -> None:
            with client.stream(prompt_of(30, number), max_tokens=8, seed=0) as stream:
                for _ in stream:
                    if number % 4 == 0:
                        break

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(100)))
        ended_well(cluster)
        for worker in cluster.workers.values():
            links: Any = worker._links
            names = ("_lent", "_wanted", "_news") if transport == "shm://" else ("_flights", "_expected", "_news")
            moving = [getattr(links._transport, name) for name in names]
            wait_until(lambda links=links, moving=moving: not links._receiving and not any(map(len, moving)), "still")
        send, receive = cluster.workers["prefill-0"].core.send, cluster.workers["decode-0"].core.receive
        for port, tables in (
            (send, ("_sessions", "_by_key", "_held", "_submits")),
            (receive, ("_sessions", "_by_key", "_waiting")),
        ):
            for table in tables:
                assert len(getattr(port, table)) == 0, table
        translator: Any = cluster.router._desk.translator
        wait_until(lambda: not translator._detokenizers and not translator._waiting, "the router has told all")


def test_a_configured_port_that_is_taken() -> None:
    """Row 28: an error at the start that names the key and the port; nothing runs on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = set(threading.enumerate())
        with pytest.raises(ClusterError, match=rf"router\.port.*{port}"):
            StubCluster(SPLIT, router={"port": port})
        assert set(threading.enumerate()) == before


def test_the_first_token_does_not_wait_for_prefills_accounts() -> None:
    """Row 6: shipping takes long and the hand-over's end is told late; the client has its first token before."""
    slow_s = 0.4

    class SlowShipping:
        def __init__(self, inner: KVTransport):
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def ship(self, *arguments: Any) -> tuple[int, ...]:
            time.sleep(slow_s)
            return self._inner.ship(*arguments)

    def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
        return SlowShipping(transport) if worker_id.startswith("prefill") else transport  # type: ignore[return-value]

    with StubCluster(SPLIT, wrap=wrap) as cluster, cluster.client() as client:
        done = client.generate(prompt_of(20), max_tokens=3, seed=0)
        assert done.ttft_s is not None
        assert done.ttft_s < slow_s / 2
        assert done.latency_s > slow_s
        assert done.timeline.stages()[Stage.HANDOFF_WAIT] > slow_s / 2
        cluster.wait_ledger_zero()


def test_a_decode_worker_that_is_stricter_than_prefill() -> None:
    """Row 20: one typed error to the client; prefill holds nothing, at once and not by lease; decode does no work."""
    with StubCluster(SPLIT, transfer={"lease_s": 60.0}) as cluster, cluster.client() as client:
        decode = cluster.workers["decode-0"].core.engine
        decode.max_model_len = 30
        started = time.monotonic()
        with pytest.raises(OverloadedError, match="decode-0 refused it"):
            client.generate(prompt_of(40), max_tokens=5, seed=0)
        cluster.wait_ledger_zero()
        assert time.monotonic() - started < 1.0
        assert decode.num_steps == 0
        assert client.generate(prompt_of(20), max_tokens=5, seed=0).finish_reason == "length"


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_sigterm_lets_a_worker_finish_and_hand_over_before_it_exits(victim: str) -> None:
    """Row 13: what it has is finished, the KV it owes is delivered, then it exits; new requests go elsewhere."""
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
    with ProcessCluster(pools, apart=[victim], apart_step_s=0.02) as cluster, cluster.client() as client:
        streams = [client.stream(prompt_of(60, i), max_tokens=30, seed=0) for i in range(8)]
        under_way = iter(streams[0])
        next(under_way)
        process = cluster.processes[victim]
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: cluster.state(victim) in ("draining", "lost"), "the router knows")
        late = [client.generate(prompt_of(30, i), max_tokens=3, seed=0) for i in range(4)]
        assert victim not in {name for done in late for name in (done.prefill_worker, done.decode_worker)}
        for i, stream in enumerate(streams[1:], 1):
            done = stream.result()
            assert list(done.token_ids) == expected_tokens(prompt_of(60, i), 30)
            assert done.attempts == 1, "finished where it was, not started anew"
        assert process.wait(20) == 0
        cluster.wait_ledger_zero()


def test_a_decode_worker_whose_memory_is_out_of_reach_is_refused_at_the_hello() -> None:
    """Nothing is offered to it, nobody waits for a lease, and another one serves."""

    def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
        if worker_id == "decode-1":
            transport.reach = "shm (another machine)"
        return transport

    pools = {"prefill": {}, "decode": {"workers": 2}}
    with (
        StubCluster(pools, transport="shm://", engine=ENGINE, wrap=wrap, transfer={"lease_s": 60.0}) as cluster,
        cluster.client() as client,
    ):
        done = [client.generate(prompt_of(40, i), max_tokens=5, seed=0) for i in range(4)]
        for i, completion in enumerate(done):
            assert list(completion.token_ids) == expected_tokens(prompt_of(40, i), 5)
            assert completion.decode_worker != "decode-1"
            assert completion.latency_s < 5
        assert receive_counters(cluster, "decode-1")["hello_refused"] == 1
        assert receive_counters(cluster, "decode-1")["offered"] == 0
        ended_well(cluster)


def test_workers_that_cannot_reach_each_other_at_all_answer_with_the_reason() -> None:
    def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
        transport.reach = f"shm (machine of {worker_id})"
        return transport

    with StubCluster(SPLIT, transport="shm://", engine=ENGINE, wrap=wrap) as cluster, cluster.client() as client:
        began = time.monotonic()
        with pytest.raises(OverloadedError, match=r"machine of prefill-0.*machine of decode-0"):
            client.generate(prompt_of(40), max_tokens=5, seed=0)
        assert time.monotonic() - began < 5
        wait_until(lambda: not cluster.workers["prefill-0"].core.engine.live(), "prefill has forgotten it")
        ended_well(cluster)
