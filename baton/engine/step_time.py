"""How long a step will take, learned from those that ran: what a step-time target is kept by.

A step of decodes alone costs what steps with as many decodes cost lately, or what lies on the line through the two
known numbers of decodes next to it. A prompt token costs what is left of the steps that had a chunk, by its tokens.
All are averages that forget (exponentially, one part in five a step): contexts grow, and other work comes and goes.
A number of decodes that no step had for long is unknown again: one step that was slow by chance might keep it from
ever being tried.
Pure: durations are told.
"""

from __future__ import annotations

from bisect import bisect_left

FORGET = 0.2
CAUTIOUS_TOKENS = 64
"""Of a chunk beside decodes, as long as no chunk was ever timed."""
STALE_STEPS = 1000
"""Steps after which a number of decodes that none of them had is forgotten."""


class StepTimes:
    """Seconds of decode steps by their number of decodes, and of a prompt token."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        """By number of decodes, the step that had it last, oldest first."""
        self._num_steps = 0
        self._token_s: float | None = None

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._num_steps += 1
        if num_chunk_tokens == 0:
            self._decode_s[num_decodes] = _blend(self._decode_s.get(num_decodes), seconds)
            self._seen_at.pop(num_decodes, None)
            self._seen_at[num_decodes] = self._num_steps
            oldest = next(iter(self._seen_at))
            if self._seen_at[oldest] < self._num_steps - STALE_STEPS:
                del self._seen_at[oldest], self._decode_s[oldest]
        else:
            rest = max(0.0, seconds - self.decode_s(num_decodes))
            self._token_s = _blend(self._token_s, rest / num_chunk_tokens)

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
