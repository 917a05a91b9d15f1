"""What compressing KV blocks on the wire costs in accuracy.

python -m benchmarks.wire_encoding --json results/wire_encoding.json

Each prompt is computed once. Then greedy decoding goes on from its KV cache, and from one whose blocks went through the
encoding as they would between two workers: encoded block by block, decoded into other blocks. What decode computes
itself is never encoded.

agreement         share of output tokens that are those of the plain run, place by place
first_difference  place of the first token that differs; None: no token does
forced            logits of both caches along the plain run's tokens, so that an early difference does not count for all
                  that follows: error of the chosen token's log probability, and how often its rank is still the first
bytes_ratio       bytes on the wire to bytes of the blocks
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from baton.config import parse_config
from baton.engine.build import build_runner
from baton.engine.kv_cache import KVCache
from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.engine.runner import ModelRunner
from baton.engine.weights import resolve_model
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from kv_transfer.wire_encoding import decode, encode
from kv_transfer.wire_format import Encoding, WireFormat
from router.text import TokenizerText

ENCODINGS: Final[tuple[Encoding, ...]] = ("int8", "fp8")
PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "Explain in one paragraph why the sky is blue.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature because",
    "The three states of matter are",
    "Roses are red, violets are blue,",
    "In 1969, two astronauts walked on the surface of the Moon. Their names were",
    "A recipe for a simple tomato soup:\n1. Chop two onions.\n2.",
    "SELECT name, price FROM products WHERE price >",
    "Où est la bibliothèque ? Elle est",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "Dear Ms. Green,\n\nThank you for your letter of the second of May. I am writing to tell you that",
    "The lighthouse keeper counted the ships that passed each night and wrote their names in a small blue book. On the "
    "first day of spring he noticed that one of them had no name at all, only a painted star on its bow. He asked the "
    "fishermen in the harbour whether they knew it, but every one of them told a different story. The oldest said that",
    "Photosynthesis is the process by which plants turn light into",
    "Q: What is the largest planet of the solar system?\nA:",
    "import numpy as np\n\ndef moving_average(values, width):\n    ",
    "The train left the station at half past nine. Nobody on the platform had seen the man with the grey hat, but in "
    "the last carriage a small dog sat on a suitcase and",
    "Three tips for learning a new language: first,",
)


class Decoder:
    """Greedy decoding of one request at a time, from a KV cache that may have come over the wire."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._cache: KVCache = runner.kv_cache

    def prefill(self, prompt: list[int], most: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Blocks with the prompt's KV and room for `most` tokens in all; that KV; the logits of its last token."""
        blocks = list(range(self._cache.layout.num_blocks_for(most)))
        self._cache.clear(blocks)
        row = self._logits(prompt, 0, blocks)
        return blocks, self._cache.tensor[: self._cache.layout.num_blocks_for(len(prompt))].clone(), row

    def carried(self, blocks: list[int], kv: torch.Tensor, encoding: Encoding) -> tuple[list[int], float]:
        """Other blocks, with what is left of `kv` after the wire, and the seconds that took."""
        layout = self._cache.layout
        others = [block + len(blocks) for block in blocks]
        self._cache.clear(others)
        wire = np.empty(WireFormat(layout, encoding).block_bytes, dtype=np.uint8)
        start = time.perf_counter()
        for block, other in zip(kv, others, strict=False):
            encode(block.view(-1).view(torch.uint8).numpy(), layout, encoding, wire)
            self._cache.tensor[other] = torch.from_numpy(decode(wire, layout, encoding)).view(kv.dtype)
        return others, time.perf_counter() - start

    def run(self, prompt: list[int], first: int, blocks: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        """`count` greedy tokens after `first`, and the logits of each."""
        tokens, rows = [*prompt, first], []
        for _ in range(count):
            rows.append(self._logits(tokens, len(tokens) - 1, blocks))
            tokens.append(int(rows[-1].argmax()))
        return tokens[len(prompt) + 1 :], rows

    def follow(self, prompt: list[int], first: int, blocks: list[int], answer: list[int]) -> list[torch.Tensor]:
        """The logits at each place of `answer`, whatever they would choose."""
        tokens = [*prompt, first, *answer]
        return [self._logits(tokens[: len(prompt) + 1 + i], len(prompt) + i, blocks) for i in range(len(answer))]

    def _logits(self, tokens: list[int], start: int, blocks: list[int]) -> torch.Tensor:
        request = EngineRequest(RequestKey("0" * 32, 0), tokens, SamplingParams(max_tokens=1 << 16))
        request.blocks, request.num_computed = blocks, start
        plan = StepPlan([StepItem(request, len(tokens) - start)])
        return self._runner.logits(plan)[0].clone()


def logprob(row: torch.Tensor, token: int) -> float:
    return float(torch.log_softmax(row.double(), -1)[token])


def compare(decoder: Decoder, prompt: list[int], num_tokens: int) -> dict[Encoding, dict[str, Any]]:
    """Of one prompt, by encoding."""
    blocks, kv, row = decoder.prefill(prompt, len(prompt) + num_tokens)
    first = int(row.argmax())
    found: dict[Encoding, dict[str, Any]] = {}
    plain, rows = decoder.run(prompt, first, blocks, num_tokens - 1)
    for encoding in ENCODINGS:
        others, seconds = decoder.carried(blocks, kv, encoding)
        tokens, _ = decoder.run(prompt, first, others, num_tokens - 1)
        others, _ = decoder.carried(blocks, kv, encoding)
        forced = decoder.follow(prompt, first, others, plain)
        same = [a == b for a, b in zip(plain, tokens, strict=True)]
        errors = [abs(logprob(a, t) - logprob(b, t)) for a, b, t in zip(rows, forced, plain, strict=True)]
        found[encoding] = {
            "agreement": sum(same) / len(same),
            "first_difference": None if all(same) else same.index(False) + 1,
            "errors": errors,
            "still_first": sum(int(row.argmax()) == t for row, t in zip(forced, plain, strict=True)) / len(plain),
            "seconds": seconds,
        }
    return found


def summary(found: list[dict[str, Any]], encoding: Encoding, cache: KVCache, num_blocks: int) -> dict[str, Any]:
    errors = [error for one in found for error in one["errors"]]
    places = [one["first_difference"] for one in found]
    differing = [place for place in places if place is not None]
    return {
        "agreement": statistics.fmean(one["agreement"] for one in found),
        "prompts_that_agree": places.count(None),
        "first_difference": min(differing, default=None),
        "median_first_difference": statistics.median(differing) if differing else None,
        "forced": {
            "still_first": statistics.fmean(one["still_first"] for one in found),
            "mean_logprob_error": statistics.fmean(errors),
            "max_logprob_error": max(errors),
        },
        "bytes_ratio": WireFormat(cache.layout, encoding).block_bytes / cache.layout.block_bytes,
        "encode_and_decode_mb_per_s": num_blocks * cache.block_bytes / sum(one["seconds"] for one in found) / 1e6,
        "by_prompt": [{key: one[key] for key in ("agreement", "first_difference", "still_first")} for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the built-in ones")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("results/wire_encoding.json"), help="where the figures go")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = {"source": arguments.model, "dtype": arguments.dtype}
    config = parse_config({"model": model, "pools": {"both": {"device": "cpu", "kv_memory_mib": 256}}})
    built = build_runner(config, config.pools["both"])
    built.runner.set_num_threads(arguments.threads)
    text = TokenizerText(resolve_model(arguments.model))
    decoder = Decoder(built.runner)
    prompts = [text.encode(prompt) for prompt in PROMPTS[: arguments.prompts]]
    with torch.inference_mode():
        found = [compare(decoder, prompt, arguments.tokens) for prompt in prompts]
    num_blocks = sum(built.kv_cache.layout.num_blocks_for(len(prompt)) for prompt in prompts)
    result = {
        "model": arguments.model,
        "engine": built.engine,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tokens": arguments.tokens,
        "encodings": {
            encoding: summary([one[encoding] for one in found], encoding, built.kv_cache, num_blocks)
            for encoding in ENCODINGS
        },
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
