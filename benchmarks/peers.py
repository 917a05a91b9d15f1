"""Other engines on the same work, interleaved with ours in one run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from baton.engine.kv_cache import TORCH_DTYPES


class TransformersPeer:
    """Hugging Face's `generate`, greedy, on the given cores. Its first call is not measured by anyone: it warms up."""

    def __init__(self, path: Path, dtype: str, cores: list[int]):
        from transformers import AutoModelForCausalLM

        self._cores = cores
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=TORCH_DTYPES[dtype]).eval()
        self.seconds([[100, 101, 102]], 2)

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Time for `max_tokens` new tokens of each prompt; all prompts have the same length."""
        before = os.sched_getaffinity(0)
        threads = torch.get_num_threads()
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(len(self._cores))
        tokens = torch.tensor(prompts)
        try:
            start = time.perf_counter()
            with torch.inference_mode():
                out = self._model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            assert out.shape[1] == tokens.shape[1] + max_tokens
            return time.perf_counter() - start
        finally:
            os.sched_setaffinity(0, before)
            torch.set_num_threads(threads)
