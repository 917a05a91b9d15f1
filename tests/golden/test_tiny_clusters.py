"""Row 26 of the scenarios: fifty prompts give the same greedy tokens split and colocated; a first difference is told.

A tiny random model: real arithmetic, batched as requests happen to meet. The demo model's twenty prompts, Unicode
among them, are in `test_demo_clusters.py`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import parse_config
from baton_cluster.local import LocalCluster
from tests.golden.tiny_models import VOCAB, assert_greedy, make_tiny_model, save_tokenizer

TOKENS = 24
WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "architecture": "Gemma3ForCausalLM",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "Cohere 2, by transformers": {
        "architecture": "Cohere2ForCausalLM",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
}
SPLIT = {"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}}


def corpus() -> list[list[int]]:
    """Lengths 1 to 300; every third prompt begins like the one before it."""
    draw = random.Random(26)
    prompts: list[list[int]] = []
    for i in range(50):
        prompt = [draw.randrange(1, VOCAB) for _ in range(draw.choice([1, 15, 16, 17, 40, 63, 64, 65, 120, 300]))]
        prompts.append(prompts[-1][: len(prompt) // 2 + 1] + prompt if i % 3 == 2 else prompt)
    return prompts


def answers(
    model: Path, pools: dict[str, Any], transport: str, policy: str, prompts: list[list[int]]
) -> list[tuple[int, ...]]:
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": pools,
        "engine": {"max_batch_tokens": 64, "policy": policy},
        "transfer": {"transport": transport},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(16) as pool:
        done = pool.map(lambda p: client.generate(p, max_tokens=TOKENS, ignore_eos=True), prompts)
        return [completion.token_ids for completion in done]


@pytest.mark.parametrize(
    ("pools", "transport", "policy"),
    [
        (SPLIT, "zmq+tcp", "mixed"),
        ({"prefill": {"kv_memory_mib": 8, "workers": 2}, "decode": {"kv_memory_mib": 8}}, "inproc", "prefill_first"),
    ],
    ids=["split over zmq", "2+1 over inproc"],
)
def test_fifty_prompts_split_equal_colocated(
    tiny_model: Path, pools: dict[str, Any], transport: str, policy: str
) -> None:
    colocated = answers(tiny_model, {"both": {"kv_memory_mib": 8}}, "inproc", "mixed", corpus())
    split = answers(tiny_model, pools, transport, policy, corpus())
    wrong = {
        i: f"differs at token {next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)}"
        for i, (a, b) in enumerate(zip(colocated, split, strict=True))
        if a != b
    }
    assert not wrong


@pytest.mark.parametrize("kind", WINDOWS)
def test_split_models_with_windows_equal_hugging_face(kind: str, tmp_path: Path) -> None:
    """Most prompts are longer than the windows; the KV outside them is handed over like all."""
    model = make_tiny_model(tmp_path, **WINDOWS[kind])
    save_tokenizer(tmp_path)
    prompts = corpus()[:20]
    for prompt, tokens in zip(prompts, answers(tmp_path, SPLIT, "zmq+tcp", "mixed", prompts), strict=True):
        assert len(tokens) == TOKENS
        assert_greedy(model, [*prompt, *tokens], len(prompt))
