"""Decode steps by fixed buffers give the tokens of eager steps, however a batch is padded.

Here a replay computes the step again instead of launching a graph; `tests/gpu` has the same with CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.attention import AttentionBatch
from baton.engine.batch import Batch
from baton.engine.cuda_graphs import Compute, GraphedDecoder, Replay, graph_sizes, warm_up
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel
from baton.engine.runner import ModelRunner
from tests.golden.test_tiny_models import GEMMA2, GEMMA3
from tests.golden.tiny_models import (
    Driver,
    assert_greedy,
    load_runner,
    make_tiny_model,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def compute_again(compute: Compute) -> tuple[torch.Tensor, Replay]:
    out = compute()

    def replay() -> None:
        out.copy_(compute())

    return out, replay


def graphed(folder: Path, *, sizes: list[int], max_blocks: int = 16, block_size: int = 16) -> ModelRunner:
    model = load_runner(folder, block_size=block_size).model
    assert isinstance(model, DecoderModel)
    cache = KVCache(model.spec.kv_layout(block_size, "float32"), 300, scratch=True)
    decoder = GraphedDecoder(model, cache, sizes=sizes, max_blocks=max_blocks, capture=compute_again)
    return ModelRunner(decoder, cache)


@pytest.mark.parametrize("kind", [{}, GEMMA2, GEMMA3], ids=["plain", "Gemma 2", "Gemma 3"])
def test_greedy_tokens_equal_hugging_face(kind: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, **kind)
    runner = graphed(tmp_path, sizes=[1, 2, 4, 8])
    driver = Driver(runner)
    requests = [driver.request(prompt_of(n)) for n in (1, 15, 16, 60, 110)]
    for request in requests:
        driver.prefill(request, chunk=40)
    for count in (1, 2, 3, 5):  # all sizes, padded and not, past block borders
        driver.decode(requests[:count], 9)
    for request in requests:
        assert_greedy(model, request.tokens, request.num_prompt)


def decode_batch(starts: list[int], tables: list[list[int]], tokens: list[int]) -> Batch:
    rows = torch.arange(len(starts)).numpy()
    return Batch(AttentionBatch(starts, [1] * len(starts), tables), torch.tensor(tokens).numpy(), rows)


def test_a_row_does_not_depend_on_the_others(tiny_model: Path) -> None:
    """The same logits, bit for bit, beside padding and beside other requests; the pool's blocks stay their owners'."""
    runner = graphed(tiny_model, sizes=[4])
    decoder, cache = runner.model, runner.kv_cache
    torch.manual_seed(0)
    cache.tensor[:20].normal_()
    before = cache.tensor.clone()
    starts, tables, tokens = [37, 5, 90, 16], [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11]], [7, 8, 9, 10]
    alone = decoder.forward(decode_batch(starts[:1], tables[:1], tokens[:1]), cache).clone()
    among = decoder.forward(decode_batch(starts, tables, tokens), cache)
    assert torch.equal(alone[0], among[0])
    cache.tensor[-1] = before[-1]
    changed = (cache.tensor != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [2, 3, 9, 11], (
        "of each sequence the block that its row is in; padding wrote into the scratch block"
    )


def test_which_steps_are_replayed(tiny_model: Path) -> None:
    runner = graphed(tiny_model, sizes=[1, 4], max_blocks=16)
    decoder = runner.model
    assert isinstance(decoder, GraphedDecoder)
    assert decoder.num_graphs == 4, "two sizes, of 8 and 16 blocks"
    table = [list(range(20))]
    assert decoder.shape_of(decode_batch([0], table, [1])) == (1, 8)
    assert decoder.shape_of(decode_batch([127, 3], table * 2, [1, 2])) == (4, 8)
    assert decoder.shape_of(decode_batch([128, 3], table * 2, [1, 2])) == (4, 16)
    assert decoder.shape_of(decode_batch([16 * 16], table, [1])) is None, "longer than any graph"
    assert decoder.shape_of(decode_batch([1] * 5, table * 5, [1] * 5)) is None, "more than any graph"
    some = decode_batch([1, 2], table * 2, [1, 2])
    assert decoder.shape_of(Batch(some.sequences, some.tokens, some.logits_rows[:1])) is None, "one does not sample"
    chunk = Batch(AttentionBatch([0], [2], table), some.tokens, some.logits_rows[1:])
    assert decoder.shape_of(chunk) is None


def test_another_pool_is_computed_eagerly(tiny_model: Path) -> None:
    runner = graphed(tiny_model, sizes=[1])
    other = KVCache(runner.kv_cache.layout, 4)
    batch = decode_batch([0], [[1]], [5])
    torch.testing.assert_close(runner.model.forward(batch, other), runner.model.forward(batch, runner.kv_cache))
    assert other.tensor[1].any()


def test_warm_up_writes_the_scratch_block_only(tiny_model: Path) -> None:
    runner = graphed(tiny_model, sizes=[1])
    decoder, cache = runner.model, runner.kv_cache
    assert isinstance(decoder, GraphedDecoder)
    warm_up(decoder.model, cache, 512)
    assert not cache.tensor[:-1].any()
    assert cache.tensor[-1].isfinite().all()


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(13) == [1, 2, 4, 8, 13]
