"""Split and colocated give the same tokens and, to the last bit, the same log probabilities, in bfloat16 too.

Logits of the native decoder do not depend on what shares a step, and the KV cache is handed over as it is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import parse_config
from baton.engine.native.library import kernels
from baton_cluster.local import LocalCluster
from tests.golden.test_tiny_clusters import SPLIT, corpus
from tests.golden.tiny_models import make_tiny_model, save_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma 2": {
        "architecture": "Gemma2ForCausalLM",
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 7.0,
        "sliding_window": 24,
    },
}
COLOCATED = {"both": {"kv_memory_mib": 8}}


def answers(model: Path, dtype: str, pools: dict[str, Any], clients: int, step: int) -> list[tuple[Any, ...]]:
    """Tokens and log probabilities of the prompts, `clients` at a time, in steps of at most `step` tokens."""
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": dtype},
        "pools": pools,
        "engine": {"max_batch_tokens": step, "kernels": "native"},
        "transfer": {"transport": "zmq+tcp"},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(clients) as pool:
        done = pool.map(
            lambda p: client.generate(p, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1), corpus()[:25]
        )
        return [(c.token_ids, c.logprobs, c.prompt_logprobs) for c in done]


@pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_split_equals_colocated(kind: str, dtype: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, **KINDS[kind])
    save_tokenizer(tmp_path)
    one_by_one = answers(tmp_path, dtype, COLOCATED, clients=1, step=512)
    assert all(logprobs and None not in logprobs for _, logprobs, _ in one_by_one)
    crowded = answers(tmp_path, dtype, COLOCATED, clients=16, step=64)
    split = answers(tmp_path, dtype, SPLIT, clients=16, step=64)
    for i, answer in enumerate(one_by_one):
        assert crowded[i] == answer, f"prompt {i} depends on the load"
        assert split[i] == answer, f"prompt {i} depends on the placement"
