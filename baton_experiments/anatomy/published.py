"""What PagedAttention (Kwon et al., SOSP 2023, arXiv 2309.06180) published of KV memory, and a set-up that shows it.

Its figure 2 is of OPT-13B on an A100 of 40 GB: 12 GB, that is 15.7 thousand token slots (table 1), requests of at most
2,048 tokens, and ShareGPT's lengths, of which it gives the means: 161.31 tokens in and 337.99 out (figure 11).

The spread is not given, but the bars of `orca_max` tell it: with 7 requests of 2,048 slots a request has 457 tokens on
average and is to get 298 more. A running request is halfway through its answer, on average over time, so those 298 are
E[n^2] / (2 E[n]) of the answers' lengths n: a coefficient of variation of 0.87 at that mean. The other 159 are the
prompt's mean, as published. So one bar's division gives the spread, and the other bars are predicted
(`tests/unit/test_anatomy.py`). Lengths are of gamma distributions, which have few answers that the limit would cut;
prompt and answer are independent, and whoever is longer than 2,048 together is left out. Pure data.
"""

from __future__ import annotations

from random import Random

from scipy.stats import gamma

NAME = "ShareGPT, as in PagedAttention"
"""Of its lengths, for tables."""
SLOTS = 12 * 2**30 // (800 * 2**10)
MAX_LEN = 2048
MEAN_PROMPT, MEAN_OUTPUT = 161.31, 337.99
CV_OUTPUT = 0.87
CV_PROMPT = 1.0
"""Assumed; it matters little, since time is spent in answers."""

USAGE = {
    "max": {"token": 0.204, "reservation": 0.133, "internal": 0.573, "external": 0.089},
    "pow2": {"token": 0.268, "reservation": 0.179, "internal": 0.136, "external": 0.416},
    "oracle": {"token": 0.382, "reservation": 0.252, "external": 0.366},
    "paged": {"token": 0.963},
}
"""Of figure 2, as shares: Orca's three ways and vLLM."""
BATCH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
"""Requests batched on average, figure 13, ShareGPT at 2 requests/s: there vLLM does not fill its memory."""


def sharegpt_lengths(num_requests: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Prompt and answer of about so many requests: evenly spaced quantiles of each, in random order."""
    draw = Random(f"sharegpt/{seed}")
    levels = [(i + 0.5) / num_requests for i in range(num_requests)]
    columns = []
    for mean, cv in ((MEAN_PROMPT, CV_PROMPT), (MEAN_OUTPUT, CV_OUTPUT)):
        lengths = [max(1, round(n)) for n in gamma.ppf(levels, 1 / cv**2, scale=mean * cv**2)]
        draw.shuffle(lengths)
        columns.append(lengths)
    return tuple(pair for pair in zip(*columns, strict=True) if sum(pair) <= MAX_LEN)
