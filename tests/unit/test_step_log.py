"""What steps were: their shapes, the log of a worker, and what a cluster's handle tells of them."""

from __future__ import annotations

import itertools

import pytest

from baton.step_log import StepLog, StepRecord, StepShape
from tests.fakes import plan_of
from tests.stub_cluster import StubCluster


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([(9, 1)], StepShape(decodes=1, decode_context=10)),
        ([(9, 1), (99, 1)], StepShape(decodes=2, decode_context=110)),
        ([(0, 4)], StepShape(chunks=1, chunk_tokens=4, chunk_context=0, chunk_attended=1 + 2 + 3 + 4)),
        ([(6, 2)], StepShape(chunks=1, chunk_tokens=2, chunk_context=6, chunk_attended=7 + 8)),
        ([(0, 1)], StepShape(decodes=1, decode_context=1)),
        (
            [(4, 1), (0, 2), (8, 3)],
            StepShape(
                chunks=2,
                chunk_tokens=5,
                chunk_context=8,
                chunk_attended=1 + 2 + 9 + 10 + 11,
                decodes=1,
                decode_context=5,
            ),
        ),
    ],
)
def test_the_shape_of_a_step(sizes: list[tuple[int, int]], shape: StepShape) -> None:
    assert StepShape.of(plan_of(*sizes)) == shape


def record(number: int) -> StepRecord:
    return StepRecord("both-0", float(number), 0.5, StepShape(decodes=1, decode_context=number), 1, 1, 0)


def test_a_log_gives_each_step_once_and_keeps_the_last_ones() -> None:
    log = StepLog(max_steps=3)
    for number in range(5):
        log.add(record(number))
    assert [step.start_s for step in log.take()] == [2.0, 3.0, 4.0]
    assert log.num_lost == 2
    assert log.take() == []
    log.add(record(7))
    assert [step.start_s for step in log.take()] == [7.0]
    assert log.num_lost == 2


def test_workers_record_the_steps_of_a_split_request() -> None:
    prompt, answer = list(range(100, 140)), 6
    engine = {"record_steps": True, "max_batch_tokens": 32}
    pools = {"prefill": {"kv_blocks": 16}, "decode": {"kv_blocks": 16}}
    with StubCluster(pools, engine=engine) as cluster, cluster.client() as client:
        done = client.generate(prompt, max_tokens=answer)
        assert len(done.token_ids) == answer
        first, second = (cluster.workers[name].take_steps() for name in ("prefill-0", "decode-0"))
        assert [step.shape for step in first] == [StepShape.of(plan_of((0, 32))), StepShape.of(plan_of((32, 8)))]
        assert [step.shape for step in second] == [
            StepShape(decodes=1, decode_context=len(prompt) + i) for i in range(1, answer)
        ]
        assert [step.kv_blocks for step in first] == [3, 3], "all blocks of the prompt are taken as it is admitted"
        assert all(step.kv_blocks >= 3 and step.num_running == 1 and step.num_waiting == 0 for step in second)
        steps = [*first, *second]
        starts = [step.start_s for step in steps]
        assert starts == sorted(starts), "decode begins after prefill, on one clock"
        for one, two in itertools.pairwise(steps):
            assert one.seconds > 0 and one.start_s + one.seconds <= two.start_s
        assert {step.worker for step in first} == {"prefill-0"}
        assert cluster.workers["decode-0"].take_steps() == []


def test_steps_are_recorded_only_if_asked_for() -> None:
    with StubCluster({"both": {"kv_blocks": 16}}) as cluster, cluster.client() as client:
        client.generate([1, 2, 3], max_tokens=3)
        assert cluster.workers["both-0"].take_steps() == []
