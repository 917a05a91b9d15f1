"""What a workload consists of: when a request comes, how long it is, and which tokens it has.

A `RequestShape` has lengths and, where its prompt begins like others, the ids of the blocks that they
share; it has no tokens, so that a trace of millions of rows stays a stream of small records. A `Prompt`
turns a shape into token ids when they are asked for, and keeps none.

    prompt = | block ids[0] | block ids[1] | ... | the request's own tokens |
             '-- block_size -'

The tokens of a block are a pure function of the seed and the block's id, the others of the seed and the
request's index: Philox 4x64-10 (Salmon et al., SC 2011), keyed by the seed, with the counter (position, id,
kind). So prompts that name the same ids share exactly those tokens and, but for chance, nothing more; no
order of requests and no state is involved, and the integers are the same on every platform.

Must not know files, distributions, rates or clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError

TokenIds = npt.NDArray[np.int64]

FIRST_TOKEN = 100
"""Prompts use the ids from here up: the first ones are special tokens in most tokenizers."""
_BLOCK, _OWN = 0, 1
_MAX_ID = 2**64


class RequestShape(msgspec.Struct, frozen=True, gc=False):
    """One request before it has tokens. Lengths in tokens, at least 1."""

    at_s: float
    """Arrival since the start of the workload; 0 where the source has no times."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids (0 to 2^64 - 1) of the blocks that the prompt begins with; the last may be cut. Equal ids, equal tokens."""
    block_size: int = 0
    """Tokens per block."""


class Prompt(Sequence[int]):
    """The token ids of one request, made anew whenever they are looked at. Equal if all tokens are."""

    __slots__ = ("_index", "_key", "_salted", "_vocab_size", "shape")

    def __init__(self, shape: RequestShape, *, index: int, key: int, salted: int, vocab_size: int):
        self.shape = shape
        self._index, self._key, self._salted, self._vocab_size = index, key, salted, vocab_size

    def tokens(self) -> TokenIds:
        """All of them, shape [prompt_tokens]. A new array each time."""
        shape = self.shape
        left, pieces = shape.prompt_tokens, []
        for block in shape.blocks:
            if left <= 0:
                break
            pieces.append(_draw(self._key, _BLOCK, block, min(shape.block_size, left), self._vocab_size))
            left -= len(pieces[-1])
        if left > 0:
            pieces.append(_draw(self._key, _OWN, self._index, left, self._vocab_size))
        tokens = np.concatenate(pieces) if len(pieces) != 1 else pieces[0]
        origin = (_BLOCK, shape.blocks[0]) if shape.blocks else (_OWN, self._index)
        tokens[:1] = _draw(self._salted, *origin, 1, self._vocab_size)
        return tokens

    def __len__(self) -> int:
        return self.shape.prompt_tokens

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens().tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        tokens = self.tokens()[index]
        return tuple(tokens.tolist()) if isinstance(index, slice) else int(tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompt) and np.array_equal(self.tokens(), other.tokens())

    def __hash__(self) -> int:
        return hash(self.tokens().tobytes())

    def __repr__(self) -> str:
        return f"Prompt({self.shape.prompt_tokens} tokens, {len(self.shape.blocks)} blocks)"


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request to send `at_s` seconds after the start: this prompt, exactly this many output tokens."""

    at_s: float
    prompt: Prompt
    max_tokens: int

    @property
    def shape(self) -> RequestShape:
        return self.prompt.shape


def plan(
    shapes: Iterable[RequestShape], *, vocab_size: int, seed: int, salt: str = "", first_index: int = 0
) -> Iterator[PlannedRequest]:
    """Give each shape its prompt, lazily. Token ids are in [FIRST_TOKEN, vocab_size).

    The same seed gives the same tokens. `salt` changes the first token of every prompt and no other: runs with
    different salts are the same work, and find nothing of one another in a cluster's prefix cache. Prompts that
    share blocks share them under one salt too. `first_index` numbers the requests, for parts of one workload.

    Raises ConfigError if the vocabulary has no such ids.
    """
    if vocab_size <= FIRST_TOKEN:
        raise ConfigError("vocab_size", "leaves no ids for prompts", value=vocab_size, allowed=f"> {FIRST_TOKEN}")
    key, salted = _key(f"{seed}"), _key(f"{seed}/{salt}")
    return (
        PlannedRequest(
            at_s=shape.at_s,
            prompt=Prompt(shape, index=index, key=key, salted=salted, vocab_size=vocab_size),
            max_tokens=shape.output_tokens,
        )
        for index, shape in enumerate(shapes, first_index)
    )


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"prompts/{name}".encode(), digest_size=16).digest(), "little")


def _draw(key: int, kind: int, identity: int, count: int, vocab_size: int) -> TokenIds:
    """The first `count` tokens of a stream. The upper 32 bits scaled: no id is more than 2^-32 off its share."""
    if not 0 <= identity < _MAX_ID:
        raise ConfigError("blocks", "hold an id that is out of range", value=identity, allowed="0 to 2^64 - 1")
    bits = np.random.Philox(key=key, counter=identity << 64 | kind << 128).random_raw(count)
    high = bits >> np.uint64(32)
    return (high * np.uint64(vocab_size - FIRST_TOKEN) >> np.uint64(32)).astype(np.int64) + FIRST_TOKEN
