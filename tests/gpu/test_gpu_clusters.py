"""Workers on a GPU: blocks pass through pinned host memory, and the tokens are Hugging Face's wherever each leg ran."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.config import parse_config
from baton.engine.kv_cache import KVCache
from baton.engine.staging import StagedBlocks
from baton.layout import KVLayout
from baton_cluster.local import LocalCluster
from tests.golden.test_tiny_clusters import corpus
from tests.gpu.parts import TIE, behind

GPU: dict[str, Any] = {"device": "cuda", "kv_memory_mib": 16}


def answers(model: Path, pools: dict[str, Any], transport: str, graphs: bool) -> list[tuple[int, ...]]:
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": pools,
        "engine": {"max_batch_tokens": 64, "max_batch_requests": 16, "cuda_graphs": graphs},
        "transfer": {"transport": transport},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda p: client.generate(p, max_tokens=24, ignore_eos=True), corpus()))
        return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def hugging_face(tiny_model: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    return model


def check(model: PreTrainedModel, tokens: list[tuple[int, ...]]) -> None:
    """Placements batch differently, so sums of float32 differ in their order: tokens are equal but for ties."""
    for prompt, answer in zip(corpus(), tokens, strict=True):
        assert behind(model, [*prompt, *answer], len(prompt)) <= TIE


@pytest.mark.parametrize("transport", ["inproc", "zmq+tcp"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_split_on_one_gpu(tiny_model: Path, hugging_face: PreTrainedModel, transport: str, graphs: bool) -> None:
    check(hugging_face, answers(tiny_model, {"prefill": GPU, "decode": GPU}, transport, graphs))


def test_colocated_on_a_gpu(tiny_model: Path, hugging_face: PreTrainedModel) -> None:
    check(hugging_face, answers(tiny_model, {"both": GPU}, "inproc", True))


def test_from_a_gpu_to_the_cpu_and_back(tiny_model: Path, hugging_face: PreTrainedModel) -> None:
    cpu = {"device": "cpu", "kv_memory_mib": 16}
    check(hugging_face, answers(tiny_model, {"prefill": GPU, "decode": cpu}, "zmq+tcp", True))
    check(hugging_face, answers(tiny_model, {"prefill": cpu, "decode": GPU}, "zmq+tcp", True))


def test_a_copy_waits_for_the_step_that_wrote() -> None:
    """A block is fetched while the kernels that write it are still queued, behind others that take long."""
    cache = KVCache(KVLayout(4, 4, 16, 64, "float32"), 64, "cuda")
    staged = StagedBlocks(cache)
    slow = torch.randn(4096, 4096, device="cuda")
    for value in (1.0, 2.0, 3.0):
        for _ in range(20):
            slow = (slow @ slow).clamp(-1, 1)
        cache.tensor[5:9].fill_(value)
        cache.mark_written()
        staged.release(staged.fetch([5, 6, 7, 8]))
        for block in range(5, 9):
            assert (torch.from_numpy(staged.block(block)).view(torch.float32) == value).all()
        staged.close_views()


def test_what_is_stored_is_in_the_pool() -> None:
    cache = KVCache(KVLayout(2, 2, 16, 64, "float32"), 8, "cuda")
    staged = StagedBlocks(cache)
    staged.block(3)[:] = 7
    staged.store([3])
    staged.close_views()
    assert bool((cache.block_tensor(3) == 7).all())
    assert not bool(cache.tensor[[0, 1, 2, 4, 5, 6, 7]].any())
