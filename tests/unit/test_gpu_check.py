"""What of `benchmarks.gpu_check` can run without a GPU: its model, its batches, its table, and how it ends here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from baton.engine.attention.torch_backend import TorchAttention
from benchmarks.gpu_check import table_of
from benchmarks.gpu_parts import LLAMA_8B, decode_batch, pool_for, prefill_batches, random_model, step_ms

SMALL = LLAMA_8B | {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_says_that_there_is_no_gpu() -> None:
    ended = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "sees no GPU here" in ended.stderr


def test_a_random_model_steps() -> None:
    model = random_model(SMALL, TorchAttention(torch.device("cpu")), device="cpu")
    cache = pool_for(model.spec, "cpu", 4 * 128)
    decode, prompt = decode_batch(4, 128, cache.num_blocks), prefill_batches(300, cache.num_blocks)
    assert decode is not None
    assert prompt is not None
    assert model.forward(decode, cache).isfinite().all()
    for batches in ([decode], prompt):
        times = step_ms(model, batches, cache, seconds=0.0)
        assert 0 < times["p10_ms"] <= times["median_ms"] <= times["p90_ms"]
    assert decode_batch(5, 128, cache.num_blocks) is None
    assert prefill_batches(4 * 128 + 1, cache.num_blocks) is None


def test_a_long_prompt_is_chunked_and_samples_at_its_end() -> None:
    chunks = prefill_batches(5000, 400)
    assert chunks is not None
    assert [(c.sequences.starts[0], len(c.tokens), list(c.logits_rows)) for c in chunks] == [
        (0, 2048, []),
        (2048, 2048, []),
        (4096, 904, [903]),
    ]


def test_table() -> None:
    rows = [
        {"model": "m", "what": "decode 1 x 128", "with": label, "floor_ms": 2.0, "median_ms": ms}
        for label, ms in (("torch, eager", 8.0), ("flashinfer, graphs", 3.0))
    ]
    table = table_of([*rows, rows[0] | {"what": "prefill 1024"}])
    assert table.row_count == 2
    assert [list(column.cells) for column in table.columns][3:] == [["8.00 (4.0)", "8.00 (4.0)"], ["3.00 (1.5)", "-"]]
