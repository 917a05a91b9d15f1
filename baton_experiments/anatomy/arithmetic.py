"""Bytes and operations of a model's steps, and how much of what fits where. Pure arithmetic.

Operations count a multiplication and an addition apart: two for each parameter that a token passes, and four per head
and number for each position it attends to (scores and their sum). Bytes are those that must come from memory at least:
the weights once a step, the cache that is attended to once, the new keys and values. Activations are left out, and so
are norms, rotations and softmax, which are few beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.errors import ConfigError
from baton.layout import DTYPE_BYTES
from baton_experiments.anatomy.shape import ModelShape


class Work(NamedTuple):
    """Of one step."""

    operations: float
    weight_bytes: float
    kv_bytes: float
    """Of the cache, read and written."""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes

    @property
    def kv_share(self) -> float:
        return self.kv_bytes / self.bytes


class Sizes(NamedTuple):
    """Bytes of a number of weights and of the cache."""

    weight: float = 2
    kv: float = 2
    body: float | None = None
    """Of the matrices that every token passes, where they are quantised; None: as `weight`."""
    experts: float | None = None
    """Of the experts', likewise."""

    def stored(self, others: float, body: float, experts: float) -> float:
        """Bytes of so many numbers of each kind of weights."""
        body_bytes = self.weight if self.body is None else self.body
        experts_bytes = self.weight if self.experts is None else self.experts
        return others * self.weight + body * body_bytes + experts * experts_bytes


HALVES = Sizes()
"""Both in 16 bits."""


ELEMENT_BYTES: dict[str, float] = {
    **DTYPE_BYTES,
    **dict.fromkeys(("float64", "fp64"), 8),
    **dict.fromkeys(("fp32",), 4),
    **dict.fromkeys(("fp16", "bf16"), 2),
    **dict.fromkeys(("int8", "uint8", "float8", "fp8", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int4", "uint4", "fp4", "nf4"), 0.5),
}
"""By a dtype's name, as PyTorch, vLLM and papers have it."""


def element_bytes(dtype: str, setting: str = "dtype") -> float:
    """Of a dtype's name. Raises ConfigError, which names `setting`, for one that is not in the table."""
    found = ELEMENT_BYTES.get(dtype.lower())
    if found is None:
        raise ConfigError(setting, "is no dtype that is known here", value=dtype, allowed=", ".join(ELEMENT_BYTES))
    return found


def kv_bytes_per_token(shape: ModelShape, sizes: Sizes = HALVES) -> int:
    """Whole bytes: what is less than one counts as one."""
    return math.ceil(shape.kv_per_token * sizes.kv)


def weight_bytes(shape: ModelShape, sizes: Sizes = HALVES) -> int:
    """Of all that are stored."""
    others = shape.parameters - shape.body - shape.experts_parameters
    return math.ceil(sizes.stored(others, shape.body, shape.experts_parameters))


def step_work(shape: ModelShape, items: Iterable[tuple[int, int]], sizes: Sizes = HALVES) -> Work:
    """A step of items (tokens in the cache, tokens to compute), each of which samples one token at its end."""
    tokens = samples = 0
    attended = read = 0.0
    for start, count in items:
        tokens += count
        samples += 1
        attended += shape.attended(start, count)
        read += shape.kv_read(start + count) if count == 1 else start + count
    return _work(shape, tokens, samples, attended, read, sizes)


def _work(shape: ModelShape, tokens: int, samples: int, attended: float, read: float, sizes: Sizes) -> Work:
    active = shape.body + shape.experts_parameters * shape.experts_per_token / shape.experts
    per_position = 2 * shape.attention_layers * shape.heads * (shape.qk_dim + shape.v_dim)
    operations = 2 * (tokens * active + samples * shape.head) + per_position * attended
    weights = sizes.stored(shape.head, shape.body, shape.experts_read(tokens))
    return Work(operations, weights, (read + tokens) * kv_bytes_per_token(shape, sizes))


def prefill(shape: ModelShape, tokens: int, context: int = 0, sizes: Sizes = HALVES) -> Work:
    """One prompt, or a chunk of one with `context` tokens before it."""
    return step_work(shape, [(context, tokens)], sizes)


def decode(shape: ModelShape, batch: int, context: int, sizes: Sizes = HALVES) -> Work:
    """One token each for `batch` sequences that have `context` tokens, the new one included."""
    start = max(context - 1, 0)
    return _work(shape, batch, batch, batch * shape.attended(start, 1), batch * shape.kv_read(start + 1), sizes)


def decode_batch_at_ridge(shape: ModelShape, context: int, ridge: float, sizes: Sizes = HALVES) -> int | None:
    """The smallest batch whose decode step is limited by compute; None: no batch is, since the cache grows with it."""
    low, high = 1, 1 << 20
    if decode(shape, high, context, sizes).intensity < ridge:
        return None
    while low < high:
        middle = (low + high) // 2
        if decode(shape, middle, context, sizes).intensity >= ridge:
            high = middle
        else:
            low = middle + 1
    return low


class Fit(NamedTuple):
    """What of a worker's memory is left for the cache."""

    memory_bytes: int
    """That the engine may use."""
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int

    def requests(self, tokens: int, block_size: int) -> int:
        """How many of so many tokens each, in whole blocks."""
        return self.kv_tokens // block_size // -(-tokens // block_size)


def memory_fit(shape: ModelShape, memory_bytes: float, share: float, sizes: Sizes = HALVES) -> Fit:
    """Weights and cache in `share` of the memory. `kv_tokens` is 0 where the weights alone are too large."""
    usable, weights = int(memory_bytes * share), weight_bytes(shape, sizes)
    left = max(0, usable - weights)
    return Fit(usable, weights, left, left // kv_bytes_per_token(shape, sizes))


class Generation(NamedTuple):
    """Answers of growing length to one prompt."""

    generated: int
    tokens: int
    """Computed in all, the prompt's included."""
    operations: float


def work_with_cache(shape: ModelShape, prompt: int, lengths: Sequence[int], sizes: Sizes = HALVES) -> list[Generation]:
    """The prompt once, then one token a step: linear in the length, but for attention."""
    return [_generation(shape, [(0, prompt)] + [(prompt + i, 1) for i in range(n - 1)], n, sizes) for n in lengths]


def work_without_cache(
    shape: ModelShape, prompt: int, lengths: Sequence[int], sizes: Sizes = HALVES
) -> list[Generation]:
    """All that is known anew for each token: quadratic."""
    return [_generation(shape, [(0, prompt + i) for i in range(n)], n, sizes) for n in lengths]


def _generation(shape: ModelShape, steps: Sequence[tuple[int, int]], generated: int, sizes: Sizes) -> Generation:
    operations = sum(step_work(shape, [step], sizes).operations for step in steps)
    return Generation(generated, sum(count for _, count in steps), operations)
