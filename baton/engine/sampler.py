"""From logits to tokens: the most probable token, or one drawn by a counter-based random stream.

Knows logits and sampling parameters. Must not know requests, batches or where a row was computed:
a token depends on its logits row, seed, sample and position, and on nothing else, so a request gives
the same tokens colocated, handed over, preempted or retried.

One uniform per position: Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by the seed, with the counter (position, sample). There is no state to carry around or to
hand over. The token is the inverse of the cumulative distribution, in token-id order, at that uniform.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.protocol import SamplingParams


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number in [0, 1) for this seed, sample and position; a pure function of the three.

    Each must be at least 0 and less than 2^64.
    """
    bits = np.random.Philox(key=seed, counter=position | (sample << 64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53  # the upper 53 bits: as many as a float64 holds exactly


def draw(logits: npt.NDArray[np.float64], temperature: float, u: float) -> int:
    """Token id at quantile `u` in [0, 1) of softmax(logits / temperature), in token-id order.

    `logits`: shape [vocab]; `temperature` > 0. Never returns a token of probability 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        cumulative = np.cumsum(np.exp((logits - logits.max()) / temperature))
    total = cumulative[-1]
    token = int(np.searchsorted(cumulative, u * total, side="right"))
    if token == len(cumulative):  # u * total was rounded up to total: the last token that has weight
        token = int(np.searchsorted(cumulative, total, side="left"))
    return token


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], samples: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """One token per row. Ties of the most probable token go to the lowest id.

    logits: `[rows, vocab]` float32. `samples` and `positions`, one per row: which sample of its request
    the row is, and the index that the new token gets in the request's token sequence. The router mints
    missing seeds; a row that still has none uses seed 0.
    """
    if not len(logits) == len(params) == len(samples) == len(positions):
        raise ValueError(
            f"{len(logits)} rows, {len(params)} params, {len(samples)} samples, {len(positions)} positions"
        )
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()  # documented: the first of equal maxima
    for row, p in enumerate(params):
        if p.temperature > 0:
            u = uniform(p.seed or 0, samples[row], positions[row])
            tokens[row] = draw(logits[row].cpu().numpy().astype(np.float64), p.temperature, u)
    return tokens
