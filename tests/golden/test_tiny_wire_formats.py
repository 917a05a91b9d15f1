"""KV caches that are re-sliced or compressed on their way, with real arithmetic: tiny random models.

Re-slicing changes no number, so tokens and log probabilities are those of a colocated run. Compression does: how far is
bounded here, on tokens of a random model, whose logits lie closer together than those of a trained one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import parse_config
from baton.engine.native.library import kernels
from baton_cluster.local import LocalCluster
from benchmarks.wire_encoding import Decoder, compare
from router.completion import Completion
from tests.golden.test_tiny_clusters import corpus
from tests.golden.tiny_models import load_runner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Answer = tuple[tuple[int, ...], Any, Any]


def answers(model: Path, pools: dict[str, Any], prompts: list[list[int]], **changes: Any) -> list[Completion]:
    """In order. `changes`: sections of the configuration, by name."""
    tree: dict[str, Any] = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": {name: {"kv_memory_mib": 8, **pool} for name, pool in pools.items()},
        "engine": {"max_batch_tokens": 64},
        "transfer": {"transport": "zmq+tcp"},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    for name, section in changes.items():
        tree[name] = {**tree[name], **section}
    with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda p: client.generate(p, max_tokens=12, ignore_eos=True, logprobs=0), prompts))


def facts(done: list[Completion]) -> list[Any]:
    return [(completion.token_ids, completion.logprobs) for completion in done]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Every third one begins like the one before it."""
    return corpus()[:24]


@pytest.mark.parametrize(("there", "here"), [(16, 32), (32, 16), (8, 24)])
def test_pools_of_different_block_sizes_equal_colocated(
    tiny_model: Path, prompts: list[list[int]], there: int, here: int
) -> None:
    if kernels() is None:
        pytest.skip("the native kernels were not built: logits would depend on what shares a step")
    native = {"kernels": "native", "max_batch_tokens": 64}
    pools = {"prefill": {"block_size": there}, "decode": {"block_size": here}}
    split = answers(tiny_model, pools, prompts, engine=native)
    colocated = answers(tiny_model, {"both": {"block_size": here}}, prompts, engine=native)
    assert all(completion.kv_bytes for completion in split)
    assert facts(split) == facts(colocated)


@pytest.mark.parametrize(("encoding", "bound", "share"), [("int8", 0.2, 0.6), ("fp8", 1.0, 0.25)])
def test_compressed_blocks_give_nearly_the_same(
    tiny_model: Path, prompts: list[list[int]], encoding: str, bound: float, share: float
) -> None:
    colocated = answers(tiny_model, {"both": {}}, prompts)
    split = answers(tiny_model, {"prefill": {}, "decode": {}}, prompts, transfer={"wire_encoding": encoding})
    plain_bytes = sum(-(-len(prompt) // 16) for prompt in prompts) * 2 * 2 * 2 * 16 * 8 * 4
    assert 0 < sum(completion.kv_bytes for completion in split) < 0.3 * plain_bytes
    first = [
        (a.logprobs[1].logprob, b.logprobs[1].logprob)
        for a, b in zip(colocated, split, strict=True)  # type: ignore[index,union-attr]
        if a.token_ids[:2] == b.token_ids[:2]
    ]
    assert len(first) >= 0.8 * len(prompts), "the second token is the first one from the compressed cache"
    assert 0 < max(abs(a - b) for a, b in first) < bound
    agreed = sum(
        a == b for x, y in zip(colocated, split, strict=True) for a, b in zip(x.token_ids, y.token_ids, strict=True)
    )
    assert agreed >= share * 12 * len(prompts), "a token that differs changes all that follow"


def test_the_benchmark_measures_what_the_encoding_does(tiny_model: Path, prompts: list[list[int]]) -> None:
    decoder = Decoder(load_runner(tiny_model))
    found = compare(decoder, prompts[2], 8)
    assert set(found) == {"int8", "fp8"}
    for one in found.values():
        assert 0 <= one["agreement"] <= 1 and len(one["errors"]) == 7
        assert 0 < max(one["errors"]) < 2
    assert max(found["int8"]["errors"]) < max(found["fp8"]["errors"])
