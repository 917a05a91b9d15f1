"""The pure part of a worker: the engine core and the ports together."""

from __future__ import annotations

from typing import Any

from baton.engine.core import EngineCore
from baton.engine.policy import Mixed
from baton.ports import Action, FromPrefill, ToPeer
from baton.protocol import PROTOCOL_VERSION, Submit
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
