"""The pure part of a worker: the engine core and the ports together."""

from __future__ import annotations

from typing import Any

from baton.engine.core import EngineCore
from baton.engine.policy import Mixed
from baton.ports import Action, FromPrefill, ToPeer, ToRouter
from baton.prefix_hash import prefix_hashes, unpack_hashes
from baton.protocol import PROTOCOL_VERSION, AskPrefixes, Heartbeat, Submit, Tokens
from baton.sampling_params import SamplingParams
from baton.worker_core import WorkerCore
from decode_worker.receive_port import ReceivePort
from kv_transfer.messages import Accept, Hello, Offer
from tests.fakes_transfer import LAYOUT, key_of, transfer_of, worker_info


def decode_core(num_blocks: int) -> WorkerCore:
    engine = EngineCore(
        num_blocks=num_blocks,
        block_size=LAYOUT.block_size,
        max_batch_tokens=64,
        max_batch_requests=8,
        max_model_len=256,
        policy=Mixed(),
    )
    receive = ReceivePort(
        worker_id="decode-0",
        incarnation="D1",
        fingerprint="f",
        layout=LAYOUT,
        engine=engine,
        lease_s=30.0,
        expected_growth=4,
    )
    core = WorkerCore(worker_info(), engine, None, receive)
    core.on_peer_event(FromPrefill("P1", Hello(PROTOCOL_VERSION, "prefill-0", "P1", "f", LAYOUT)), 0.0)
    return core


def offer(core: WorkerCore, number: int, num_tokens: int = 10) -> list[Action]:
    message = Offer(transfer_of(number), tuple(range(num_tokens)), (), SamplingParams(max_tokens=8))
    return core.on_peer_event(FromPrefill("P1", message), 0.0)


def submit(core: WorkerCore, number: int, **sampling: Any) -> None:
    core.on_router_message(Submit(key_of(number), (1, 2, 3), SamplingParams(**sampling)), 0.0)


def accepted(actions: list[Action]) -> list[Accept]:
    return [a.message for a in actions if isinstance(a, ToPeer) and isinstance(a.message, Accept)]


def test_an_offer_waits_behind_a_request_only_until_that_one_has_its_blocks() -> None:
    core = decode_core(num_blocks=32)
    submit(core, 1, max_tokens=50)
    assert accepted(offer(core, 2)) == [], "the request that came earlier has no blocks yet"
    plan = core.next_step(0.0)
    assert plan is not None
    assert len(accepted(core.finish_step(plan, [7], 0.0))) == 1, "although no block came free"


def test_a_deadline_at_zero_is_a_deadline() -> None:
    core = decode_core(num_blocks=32)
    message = Submit(key_of(1), (1, 2, 3), SamplingParams(max_tokens=8), timeout_s=5.0)
    core.on_router_message(message, -5.0)
    assert core.next_deadline() == 0.0
    assert len(core.on_deadline(0.0)) == 1
    assert core.num_held_blocks() == 0
    assert core.next_deadline() is None


# --- what the router is told of the prefix cache ----------------------------------------------------


def all_steps(core: WorkerCore) -> list[Tokens]:
    """Run until there is nothing to do; what was said to the router."""
    said: list[Tokens] = []
    while (plan := core.next_step(0.0)) is not None:
        tokens = [7 if item.samples else None for item in plan.items]
        actions = core.finish_step(plan, tokens, 0.0)
        said += [a.message for a in actions if isinstance(a, ToRouter) and isinstance(a.message, Tokens)]
    return said


def ask(core: WorkerCore, number: int, prompt: range, max_tokens: int) -> list[Tokens]:
    core.on_router_message(Submit(key_of(number), tuple(prompt), SamplingParams(max_tokens=max_tokens)), 0.0)
    return all_steps(core)


def test_nobody_is_told_of_prefixes_who_did_not_ask() -> None:
    core = decode_core(num_blocks=32)
    said = ask(core, 1, range(40), 4)
    assert said and all(message.prefixes is None for message in said)
    assert core.take_prefix_news() is None


def test_who_asks_is_told_of_all_and_then_of_changes() -> None:
    core, size = decode_core(num_blocks=12), LAYOUT.block_size
    ask(core, 1, range(2 * size + 1), 2)
    (answer,) = core.on_router_message(AskPrefixes(), 0.0)
    assert isinstance(answer, ToRouter) and isinstance(answer.message, Heartbeat)
    first = answer.message.prefixes
    assert first is not None and first.reset
    hashes = prefix_hashes(range(1000, 1000 + 10 * size), size, "")
    assert set(unpack_hashes(first.added)) == set(prefix_hashes(range(2 * size + 1), size, ""))
    assert core.take_prefix_news() is None, "nothing has changed"

    said = ask(core, 2, range(1000, 1000 + 10 * size), 5)
    news = [message.prefixes for message in said if message.prefixes is not None]
    assert news[0] is said[0].prefixes, "with the first token, so that the router knows what it left behind"
    assert [n.number for n in news] == list(range(first.number + 1, first.number + 1 + len(news)))
    assert not any(n.reset for n in news)
    added = [h for n in news for h in unpack_hashes(n.added)]
    assert added[: len(hashes)] == list(hashes)
    # It takes 11 of the 12 blocks in the pool: the former request's are given away.
    removed = {h for n in news for h in unpack_hashes(n.removed)}
    assert removed and removed <= set(unpack_hashes(first.added))


def test_a_router_that_is_gone_is_told_nothing_more() -> None:
    core = decode_core(num_blocks=32)
    core.on_router_message(AskPrefixes(), 0.0)
    core.on_router_lost(0.0)
    assert all(message.prefixes is None for message in ask(core, 1, range(40), 4))
    (answer,) = core.on_router_message(AskPrefixes(), 0.0)
    assert isinstance(answer, ToRouter) and isinstance(answer.message, Heartbeat)
    assert answer.message.prefixes is not None and answer.message.prefixes.added


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    core = decode_core(num_blocks=32)
    core.engine.tables.cache = None
    assert core.on_router_message(AskPrefixes(), 0.0) == []
    assert core.take_prefix_news() is None
