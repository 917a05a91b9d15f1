"""How long a step will take, learned from those that ran: what a step-time target is kept by.

A step of decodes alone costs what steps with as many decodes cost lately, or what lies on the line through the two
known numbers of decodes next to it. A prompt token costs what is left of the steps that had a chunk, by its tokens.
All are averages that forget (exponentially, one part in five a step): contexts grow, and other work comes and goes.
A number of decodes that no step had for long is unknown again: one step that was slow by chance might keep it from
ever being tried.
What others are told (`summary`) is smoother: a line through all numbers of decodes, so that it has a slope, and a
prompt token's share of all chunks, long and short ones.
Pure: durations are told.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple

FORGET = 0.2
KEEP = 0.95
"""Of the weight of former steps, in what is summed up over steps of all sizes."""
CAUTIOUS_TOKENS = 64
"""Of a chunk beside decodes, as long as no chunk was ever timed."""
MIN_VARIANCE = 1e-3
"""Of the numbers of decodes: below that they were all the same."""
STALE_STEPS = 1000
"""Steps after which a number of decodes that none of them had is forgotten."""


class StepSummary(NamedTuple):
    """What a worker's steps cost. 0: nothing is known."""

    decode_s: float = 0.0
    """Seconds of a decode step of the asked size."""
    slope_s: float = 0.0
    """Seconds that each further decode adds."""
    token_s: float = 0.0
    """Seconds of a prompt token."""


class StepTimes:
    """Seconds of decode steps by their number of decodes, and of a prompt token."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        self._seen_at: OrderedDict[int, int] = OrderedDict()
        """By number of decodes, the step that had it last, oldest first."""
        self._num_steps = 0
        self._token_s: float | None = None
        # Sums over decode steps, of weight, decodes, seconds, decodes squared and decodes times seconds.
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._chunk_s = self._chunk_tokens = 0.0

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._num_steps += 1
        if num_chunk_tokens == 0:
            n = num_decodes
            self._w = self._w * KEEP + 1
            self._x = self._x * KEEP + n
            self._y = self._y * KEEP + seconds
            self._xx = self._xx * KEEP + n * n
            self._xy = self._xy * KEEP + n * seconds
            known, seen_at = self._decode_s, self._seen_at
            known[n] = _blend(known.get(n), seconds)
            seen_at[n] = self._num_steps
            seen_at.move_to_end(n)
            oldest = next(iter(seen_at))
            if seen_at[oldest] < self._num_steps - STALE_STEPS:
                del seen_at[oldest], known[oldest]
        else:
            rest = max(0.0, seconds - self.decode_s(num_decodes))
            self._token_s = _blend(self._token_s, rest / num_chunk_tokens)
            self._chunk_s = self._chunk_s * KEEP + rest
            self._chunk_tokens = self._chunk_tokens * KEEP + num_chunk_tokens

    def summary(self, num_decodes: int) -> StepSummary:
        """What steps cost lately, of which one has `num_decodes` decodes."""
        token_s = self._chunk_s / self._chunk_tokens if self._chunk_tokens else 0.0
        if not self._w:
            return StepSummary(token_s=token_s)
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        slope = 0.0
        if variance > MIN_VARIANCE:
            # An empty step takes no less than nothing, whatever a line through a few points says.
            slope = (self._xy / self._w - mean_x * mean_y) / variance
            slope = min(max(0.0, slope), mean_y / mean_x)
        known = self._decode_s.get(num_decodes)
        if known is None:
            known = max(0.0, mean_y + slope * (num_decodes - mean_x))
        return StepSummary(known, min(slope, known / num_decodes) if num_decodes else slope, token_s)

    def decode_s(self, num_decodes: int) -> float:
        """Expected seconds of a step of so many decodes; 0 as long as nothing is known."""
        known = self._decode_s
        if num_decodes == 0 or not known:
            return 0.0
        if num_decodes in known:
            return known[num_decodes]
        counts = sorted(known)
        if len(counts) == 1:
            return known[counts[0]]
        # The two around it, or the two at the end that it lies beyond.
        at = min(max(bisect_left(counts, num_decodes), 1), len(counts) - 1)
        low, high = counts[at - 1], counts[at]
        slope = max(0.0, (known[high] - known[low]) / (high - low))
        return max(0.0, known[low] + slope * (num_decodes - low))

    def chunk_tokens(self, num_decodes: int, target_s: float) -> int:
        """How many prompt tokens a step may have beside so many decodes; 0 or less: none."""
        if self._token_s is None:
            return CAUTIOUS_TOKENS
        if self._token_s == 0:
            return 1 << 30
        return int((target_s - self.decode_s(num_decodes)) / self._token_s)


def _blend(known: float | None, new: float) -> float:
    return new if known is None else known + FORGET * (new - known)
