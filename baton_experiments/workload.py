"""Workloads: when requests arrive, and how long they are. Arrivals and lengths are drawn apart, by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from baton.errors import InvalidRequestError


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request to send `at_s` seconds after the start: this prompt, exactly this many output tokens."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


class Lengths(msgspec.Struct, frozen=True):
    """Uniform prompt and output lengths, in tokens, both ends included."""

    prompt: tuple[int, int] = (32, 96)
    output: tuple[int, int] = (8, 24)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds since the start of each arrival of a Poisson process of `rate` per second."""
    if rate <= 0:
        raise InvalidRequestError(f"a rate must be positive, not {rate}", field="rate")
    draw = random.Random(f"arrivals/{seed}")
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


def synthetic(*, rate: float, num_requests: int, lengths: Lengths, vocab_size: int, seed: int) -> list[PlannedRequest]:
    """`num_requests` Poisson arrivals with uniform lengths and random token ids.

    The same seed gives the same prompts and lengths at every rate, and arrivals that are those of
    another rate scaled in time, so that rates and placements are compared on the same work. Only the prompts'
    first tokens differ between rates: no run is to find the KV of another in a cluster's prefix cache.
    """
    draw = random.Random(f"lengths/{seed}")
    first = random.Random(f"first/{seed}/{rate}")
    arrivals = poisson_arrivals(rate, seed)
    return [
        PlannedRequest(
            at_s=next(arrivals),
            # The first ids of a vocabulary are special tokens in most tokenizers.
            prompt=(
                first.randrange(100, vocab_size),
                *(draw.randrange(100, vocab_size) for _ in range(draw.randint(*lengths.prompt) - 1)),
            ),
            max_tokens=draw.randint(*lengths.output),
        )
        for _ in range(num_requests)
    ]
