"""The native decoder computes each row bit by bit the same, wherever and with whatever beside it; and it is right.

So a request's tokens and log probabilities do not depend on load, chunks, placement or retries.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from baton.engine.attention import AttentionBatch
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model_spec import ModelSpec, load_spec
from baton.engine.native.decoder import NativeDecoder
from baton.engine.native.library import kernels
from baton.engine.weights import iter_weights
from tests.golden.tiny_models import (
    VOCAB,
    Driver,
    assert_greedy,
    load_runner,
    make_tiny_model,
    prompt_of,
)
from tests.native.instruction_sets import EMULATED, NATIVE, forget_kernels, use_instruction_set
from tests.stub_cluster import wait_until

pytestmark = pytest.mark.usefixtures("one_torch_thread")

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma 2": {
        "architecture": "Gemma2ForCausalLM",
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 7.0,
        "sliding_window": 24,
        "intermediate_size": 100,  # no whole panels
    },
    "Qwen3": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "head_dim": 16},
}
DTYPES = ["float32", "bfloat16"]
PROMPT = prompt_of(150)

needs_kernels = pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    folders = {kind: tmp_path_factory.mktemp("tiny") for kind in KINDS}
    return {kind: (folder, make_tiny_model(folder, **KINDS[kind])) for kind, folder in folders.items()}


def load(folder: Path, dtype: str) -> NativeDecoder:
    spec = load_spec(folder)
    assert isinstance(spec, ModelSpec)
    return NativeDecoder(spec, iter_weights(folder), dtype=dtype)


def logits_of(
    decoder: NativeDecoder,
    dtype: str,
    prompt: list[int],
    *,
    chunk: int,
    others: int = 0,
    block_size: int = 16,
    seed: int = 0,
) -> torch.Tensor:
    """Logits `[len(prompt), vocab]` of `prompt`, computed in steps of `chunk` rows beside `others` other sequences.

    They come in any order and stand before and behind it. The pool is full of NaN.
    """
    draw = random.Random(seed)
    sequences = [prompt] + [prompt_of(draw.randrange(1, 90)) for _ in range(others)]
    needs = [-(-len(tokens) // block_size) for tokens in sequences]
    ids = draw.sample(range(sum(needs) + 7), sum(needs))
    blocks = [[ids.pop() for _ in range(n)] for n in needs]
    cache = KVCache(decoder.spec.kv_layout(block_size, dtype), sum(needs) + 7)
    cache.tensor.fill_(torch.nan)
    done = [0] * len(sequences)
    rows = []
    while left := len(prompt) - done[0]:
        work = {0: min(left, chunk)}
        for i in range(1, len(sequences)):
            if done[i] < len(sequences[i]) and (others == 1 or draw.random() < 0.8):
                work[i] = min(draw.choice((1, 1, 7, 40)), len(sequences[i]) - done[i])
        order = draw.sample(sorted(work), len(work))
        starts, lengths = [done[i] for i in order], [work[i] for i in order]
        first = sum(lengths[: order.index(0)])
        batch = Batch(
            AttentionBatch(starts, lengths, [blocks[i] for i in order]),
            tokens=np.array([t for i in order for t in sequences[i][done[i] : done[i] + work[i]]], dtype=np.int64),
            logits_rows=np.arange(first, first + work[0]),
        )
        rows.append(decoder.forward(batch, cache))
        for i, n in work.items():
            done[i] += n
    return torch.cat(rows)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
class TestBitIdentity:
    @pytest.fixture
    def decoder(
        self, kind: str, dtype: str, models: dict[str, tuple[Path, PreTrainedModel]]
    ) -> Iterator[NativeDecoder]:
        decoder = load(models[kind][0], dtype)
        yield decoder
        decoder.set_num_threads(1)

    def test_chunks(self, decoder: NativeDecoder, dtype: str) -> None:
        whole = logits_of(decoder, dtype, PROMPT, chunk=512)
        assert whole.isfinite().all()
        for chunk in (1, 16, 17, 64):
            assert torch.equal(logits_of(decoder, dtype, PROMPT, chunk=chunk), whole), f"chunks of {chunk}"

    def test_batches(self, decoder: NativeDecoder, dtype: str) -> None:
        alone = logits_of(decoder, dtype, PROMPT, chunk=512)
        for others in (1, 2, 7, 31):
            for chunk in (1, 16, 17, 512):
                among = logits_of(decoder, dtype, PROMPT, chunk=chunk, others=others, seed=others + chunk)
                assert torch.equal(among, alone), f"among {others} others, in chunks of {chunk}"

    def test_blocks(self, decoder: NativeDecoder, dtype: str) -> None:
        usual = logits_of(decoder, dtype, PROMPT, chunk=512)
        for seed, block_size in enumerate((1, 7, 16, 16, 32, 64)):
            logits = logits_of(decoder, dtype, PROMPT, chunk=33, others=3, block_size=block_size, seed=seed)
            assert torch.equal(logits, usual), f"blocks of {block_size}"

    def test_threads(self, decoder: NativeDecoder, dtype: str) -> None:
        one = logits_of(decoder, dtype, PROMPT, chunk=512)
        for threads in (2, 3, 1):
            decoder.set_num_threads(threads)
            assert torch.equal(logits_of(decoder, dtype, PROMPT, chunk=512), one), f"{threads} threads"
            assert torch.equal(logits_of(decoder, dtype, PROMPT, chunk=37, others=5), one), f"{threads} threads"
        decoder.set_num_threads(3)  # more than there are rows
        assert torch.equal(logits_of(decoder, dtype, PROMPT[:9], chunk=1), one[:9])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NATIVE, *EMULATED])
def test_every_instruction_set(
    name: str,
    kind: str,
    models: dict[str, tuple[Path, PreTrainedModel]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hugging Face's logits and tokens in float32; in bfloat16 logits as near to them as its own, or nearly."""
    use_instruction_set(name, request, monkeypatch)
    try:
        folder, model = models[kind]
        driver = Driver(load_runner(folder, kernels="native"))
        prompt = prompt_of(70)
        sequence = driver.request(prompt)
        driver.prefill(sequence, chunk=33)
        driver.decode([sequence], 5)
        assert_greedy(model, sequence.tokens, len(prompt))

        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
            rounded = copy.deepcopy(model).bfloat16()(torch.tensor([prompt])).logits[0].float()
        for dtype in DTYPES:
            decoder = load(folder, dtype)
            whole = logits_of(decoder, dtype, prompt, chunk=512)
            if dtype == "float32":
                torch.testing.assert_close(whole, expected, atol=3e-4, rtol=1e-4)
            else:
                assert (whole - expected).norm() < 1.1 * (rounded - expected).norm()
            among = logits_of(decoder, dtype, prompt, chunk=13, others=4, block_size=7)
            assert torch.equal(among, whole)
    finally:
        forget_kernels(monkeypatch)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_engine_threads_may_share_a_decoder(threads: int, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """Workers of one process do: each has its own pool, and its own compute threads and workspace."""
    decoder = load(models["Llama"][0], "float32")
    prompts = [prompt_of(n) for n in (40, 97, 120, 150)]
    alone = [logits_of(decoder, "float32", prompt, chunk=512) for prompt in prompts]

    def engine(i: int) -> list[torch.Tensor]:
        decoder.set_num_threads(threads)
        chunks = (512, 7, 512, 64, 19) * (1 if threads > 1 else 4)
        return [logits_of(decoder, "float32", prompts[i], chunk=chunk, others=3, seed=i) for chunk in chunks]

    with ThreadPoolExecutor(len(prompts)) as pool:
        for found, expected in zip(pool.map(engine, range(len(prompts))), alone, strict=True):
            assert all(torch.equal(logits, expected) for logits in found)


@needs_kernels
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [5, VOCAB]}, f"token 5 or {VOCAB} is not one of {VOCAB}"),
        ({"tokens": [-1, 5]}, "token -1"),
        ({"logits_rows": [2]}, "row of logits 2"),
        ({"logits_rows": [0, 1, 1]}, "3 of logits"),
        ({"blocks": [[4]]}, "block 4"),
        ({"starts": [15]}, "15 . 2 tokens do not fit into 1 blocks"),
        ({"lengths": [1]}, "2 rows for sequences of 1"),
    ],
)
def test_what_is_beyond_weights_and_pool_ends_the_step_not_the_worker(
    change: dict[str, Any], words: str, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    decoder = load(models["Llama"][0], "float32")
    cache = KVCache(decoder.spec.kv_layout(16, "float32"), 4)
    args: dict[str, Any] = {"starts": [3], "lengths": [2], "blocks": [[3]], "tokens": [5, 6], "logits_rows": [1]}

    def forward(starts: Any, lengths: Any, blocks: Any, tokens: Any, logits_rows: Any) -> torch.Tensor:
        sequences = AttentionBatch(starts, lengths, blocks)
        return decoder.forward(Batch(sequences, np.array(tokens, np.int64), np.array(logits_rows, np.int64)), cache)

    assert forward(**args).shape == (1, VOCAB)
    with pytest.raises(IndexError, match=words):
        forward(**(args | change))


@needs_kernels
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux shows them")
def test_compute_threads_end_with_the_thread_they_work_for(models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    decoder = load(models["Llama"][0], "float32")

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    def engine() -> int:
        decoder.set_num_threads(5)
        most = count()
        decoder.set_num_threads(3)
        assert count() == most - 2
        return most

    before = count()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(engine).result() >= before + 5
    wait_until(lambda: count() <= before, "the compute threads to end")
