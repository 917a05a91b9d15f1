"""Hugging Face greedy = colocated = split, token for token, on the demo model in float32 (I6), and seeds (I7).

The clusters are whole ones of one process; `tests/integration/test_ray_cluster.py` does it over processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import parse_config
from baton_cluster.local import LocalCluster
from router.completion import Completion
from tests.stub_cluster import wait_until

CASES = json.loads(Path(__file__).with_name("demo_tokens.json").read_text(encoding="utf-8"))["cases"]
MEMORY = {"kv_memory_mib": 192}
SPLIT = {"prefill": MEMORY, "decode": MEMORY}
PLACEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "colocated": ({"both": MEMORY}, "inproc"),
    "split over inproc": (SPLIT, "inproc"),
    "split over zmq": (SPLIT, "zmq+tcp"),
}


@pytest.fixture(scope="module")
def clusters(demo_model: Path) -> Iterator[dict[str, LocalCluster]]:
    running: dict[str, LocalCluster] = {}
    try:
        for name, (pools, transport) in PLACEMENTS.items():
            tree = {
                "launcher": "local",
                "model": {"source": str(demo_model), "dtype": "float32"},
                "pools": pools,
                "engine": {"max_batch_tokens": 64},
                "transfer": {"transport": transport},
                # Steps of other clusters compete for the cores; nobody shall count as lost for that.
                "liveness": {"heartbeat_s": 1.0, "timeout_s": 60.0},
            }
            running[name] = LocalCluster(parse_config(tree))
        yield running
        for name, cluster in running.items():
            wait_until(
                lambda c=cluster: not any(w.num_held_blocks() for w in c.workers.values()), f"{name}: no block held"
            )
    finally:
        for cluster in running.values():
            cluster.stop()


def ask_all(cluster: LocalCluster, **sampling: Any) -> list[Completion]:
    """All prompts at once, so that batches mix prompts of different requests with decodes."""

    def one(case: dict[str, Any]) -> Completion:
        return client.generate(case["prompt"], max_tokens=len(case["output"]), ignore_eos=True, **sampling)

    with cluster.client() as client, ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(one, CASES))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_greedy_tokens_are_those_of_hugging_face(clusters: dict[str, LocalCluster], placement: str) -> None:
    wrong = {}
    for case, done in zip(CASES, ask_all(clusters[placement]), strict=True):
        split = done.prefill_worker != done.decode_worker
        assert split == placement.startswith("split")
        assert bool(done.kv_bytes) == split
        if list(done.token_ids) != case["output"]:
            first = next(i for i, (a, b) in enumerate(zip(done.token_ids, case["output"], strict=True)) if a != b)
            wrong[case["name"]] = f"differs at token {first}, where the margin is {case['margins'][first]}"
    assert not wrong


def test_seeded_sampling_is_the_same_split_and_colocated(clusters: dict[str, LocalCluster]) -> None:
    prompt = CASES[-1]["prompt"]
    answers = {}
    for name, cluster in clusters.items():
        with cluster.client() as client:
            answers[name] = [
                client.generate(prompt, max_tokens=8, ignore_eos=True, temperature=1.0, seed=seed).token_ids
                for seed in (1, 2)
            ]
    assert answers["colocated"] == answers["split over inproc"] == answers["split over zmq"]
    assert answers["colocated"][0] != answers["colocated"][1]


def test_an_answer_that_a_person_recognizes(clusters: dict[str, LocalCluster]) -> None:
    with clusters["split over zmq"].client() as client:
        done = client.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=16)
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
