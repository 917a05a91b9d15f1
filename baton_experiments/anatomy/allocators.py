"""What share of KV memory holds keys and values, under four ways of giving it out: the question of PagedAttention's
figure 2 (Kwon et al., SOSP 2023, arXiv 2309.06180).

A server with `slots` token slots has more requests than fit, always: the next ones are admitted in their order of
arrival as long as they fit, and every running one gets a token a step. Every slot is at each step one of

    token         holds the KV of a token that is there
    reservation   will hold one of this request's later tokens
    internal      is set aside for the request and will never be used, since its answer ends before that
    external      belongs to nobody, or fills a request's span up to the size that the allocator hands out

and `Usage` is their mean over the steps. Contiguous allocation has to say at admission how long the request may get:
`max` the model's limit, `pow2` the prompt and the next power of two of the answer, `oracle` its true length. Orca's
memory is given out by a buddy allocator, whose spans are powers of two; `first_fit` takes spans of any size, and shows
what of the loss is the buddies'. `paged` takes a block when the last one is full.

Pure. Must not know models or devices; lengths come from the caller.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from baton.errors import ConfigError

Reserve = Literal["max", "pow2", "oracle"]
Lengths = Sequence[tuple[int, int]]
"""Tokens of prompt and answer, in order of arrival."""

WARM_UP = 0.1
"""Of all requests: until so many have ended the server fills, and nothing is counted."""
FILLS = 4
"""Of the pool: fewer are over before it is in balance."""
WATERMARK = 0.01
"""Of the blocks that paged admission leaves free, as vLLM does, so that a newcomer is not preempted at once."""


class Usage(NamedTuple):
    """Shares of all slots; they sum to 1."""

    token: float
    reservation: float
    internal: float
    external: float
    batch: float
    """Requests running at once, mean."""
    preemptions: int = 0

    @property
    def useful(self) -> float:
        """The figure's number."""
        return self.token


class Spans(Protocol):
    """Gives out contiguous spans of slots."""

    def take(self, slots: int) -> int | None:
        """Where the span begins; None: no hole is large enough."""

    def free(self, start: int, slots: int) -> None:
        """Take back what `take(slots)` gave at `start`."""


class Buddy:
    """Spans are powers of two, each aligned to its size; a hole is halved until it fits, and joined with its twin."""

    def __init__(self, slots: int):
        self._holes: dict[int, set[int]] = {}
        start = 0
        for order in reversed(range(slots.bit_length())):  # what is no power of two is several
            if slots >> order & 1:
                self._holes.setdefault(order, set()).add(start)
                start += 1 << order

    def take(self, slots: int) -> int | None:
        order = (slots - 1).bit_length()
        fitting = [o for o, holes in self._holes.items() if holes and o >= order]
        if not fitting:
            return None
        found = min(fitting)
        start = min(self._holes[found])
        self._holes[found].remove(start)
        while found > order:
            found -= 1
            self._holes.setdefault(found, set()).add(start + (1 << found))
        return start

    def free(self, start: int, slots: int) -> None:
        order = (slots - 1).bit_length()
        while (twin := start ^ (1 << order)) in self._holes.get(order, ()):
            self._holes[order].remove(twin)
            start, order = min(start, twin), order + 1
        self._holes.setdefault(order, set()).add(start)


class FirstFit:
    """Spans of any size, each in the first hole that has room."""

    def __init__(self, slots: int):
        self._holes: list[tuple[int, int]] = [(0, slots)]
        """(start, end), in order, no two of them side by side."""

    def take(self, slots: int) -> int | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= slots:
                self._holes[index : index + 1] = [(start + slots, end)] if end - start > slots else []
                return start
        return None

    def free(self, start: int, slots: int) -> None:
        insort(self._holes, (start, start + slots))
        index = self._holes.index((start, start + slots))
        for left in (index, index - 1):
            if 0 <= left < len(self._holes) - 1 and self._holes[left][1] == self._holes[left + 1][0]:
                self._holes[left : left + 2] = [(self._holes[left][0], self._holes[left + 1][1])]


SPANS: dict[str, Callable[[int], Spans]] = {"buddy": Buddy, "first_fit": FirstFit}


def reserved(reserve: Reserve, prompt: int, answer: int, max_len: int) -> int:
    """Slots that a request is given at admission."""
    if reserve == "max":
        return max_len
    if reserve == "pow2":
        return min(max_len, prompt + (1 << (answer - 1).bit_length()))
    return prompt + answer


def contiguous(lengths: Lengths, *, slots: int, max_len: int, reserve: Reserve, spans: str = "buddy") -> Usage:
    """Contiguous allocation. Raises ConfigError for a request that cannot fit an empty pool, or none at all."""
    _check(lengths, slots, max_len)
    pool = SPANS[spans](slots)
    if pool.take(max(reserved(reserve, p, a, max_len) for p, a in lengths)) is None:
        raise ConfigError("slots", "hold not one request", value=slots, allowed=f">= {max_len}")
    pool = SPANS[spans](slots)
    waiting = deque(lengths)
    ends: list[tuple[int, int, int, int, int]] = []
    """(step, start, span, prompt, answer), the next to end first."""
    now = tokens = final = granted = num_ended = 0
    counted_from = max(1, int(len(lengths) * WARM_UP))
    sums = [0, 0, 0, 0]  # token, reservation, internal, batch, times steps
    steps = 0
    while True:
        while waiting:
            prompt, answer = waiting[0]
            span = reserved(reserve, prompt, answer, max_len)
            start = pool.take(span)
            if start is None:
                break
            waiting.popleft()
            heapq.heappush(ends, (now + answer, start, span, prompt, answer))
            tokens, final, granted = tokens + prompt, final + prompt + answer, granted + span
        if not waiting:
            break  # from here on nothing is admitted, and the pool only drains
        took = ends[0][0] - now
        running = len(ends)
        if num_ended >= counted_from:
            held = tokens * took + running * took * (took - 1) // 2
            sums[0] += held
            sums[1] += final * took - held
            sums[2] += (granted - final) * took
            sums[3] += running * took
            steps += took
        now += took
        tokens += running * took
        while ends and ends[0][0] == now:
            _, start, span, prompt, answer = heapq.heappop(ends)
            pool.free(start, span)
            tokens, final, granted = tokens - prompt - answer, final - prompt - answer, granted - span
            num_ended += 1
    return _usage(sums, steps, slots)


class _Running:
    __slots__ = ("answer", "blocks", "tokens", "until")

    def __init__(self, tokens: int, until: int, blocks: int):
        self.tokens = tokens
        self.until = until
        self.blocks = blocks


def paged(lengths: Lengths, *, slots: int, max_len: int, block_size: int = 16) -> Usage:
    """Blocks as they are needed. Who needs one and finds none has the youngest give up its own and start again."""
    _check(lengths, slots, max_len)
    num_blocks = slots // block_size
    if max(-(-(p + a) // block_size) for p, a in lengths) > num_blocks:
        raise ConfigError("slots", "hold not one request", value=slots, allowed=f">= {max_len}")
    waiting = deque(_Running(p, p + a, 0) for p, a in lengths)
    running: list[_Running] = []  # the youngest last
    free, num_ended, preemptions, steps = num_blocks, 0, 0, 0
    spare = int(num_blocks * WATERMARK)
    counted_from = max(1, int(len(lengths) * WARM_UP))
    sums = [0, 0, 0, 0]
    while True:
        while waiting:
            need = -(-waiting[0].tokens // block_size)
            if need > free - (spare if running else 0):
                break
            request = waiting.popleft()
            request.blocks, free = need, free - need
            running.append(request)
        if not waiting:
            break
        if num_ended >= counted_from:
            held = sum(request.tokens for request in running)
            sums[0] += held
            sums[2] += (num_blocks - free) * block_size - held
            sums[3] += len(running)
            steps += 1
        index = 0
        while index < len(running):
            request = running[index]
            if request.tokens == request.blocks * block_size:
                while not free and running[-1] is not request:
                    victim = running.pop()
                    free, victim.blocks = free + victim.blocks, 0
                    waiting.appendleft(victim)
                    preemptions += 1
                if not free:  # it is the youngest itself
                    running.pop()
                    free, request.blocks = free + request.blocks, 0
                    waiting.appendleft(request)
                    preemptions += 1
                    break
                request.blocks, free = request.blocks + 1, free - 1
            request.tokens += 1
            index += 1
        ended = [request for request in running if request.tokens >= request.until]
        num_ended += len(ended)
        free += sum(request.blocks for request in ended)
        running = [request for request in running if request.tokens < request.until]
    return _usage(sums, steps, slots)._replace(preemptions=preemptions)


def compare(lengths: Lengths, *, slots: int, max_len: int, block_size: int = 16) -> dict[str, Usage]:
    """The figure's four systems, and the three reservations without buddies: `max`, `max_first_fit`, ..., `paged`."""
    found = {}
    reserves: tuple[Reserve, ...] = ("max", "pow2", "oracle")
    for reserve in reserves:
        for spans, suffix in (("buddy", ""), ("first_fit", "_first_fit")):
            usage = contiguous(lengths, slots=slots, max_len=max_len, reserve=reserve, spans=spans)
            found[reserve + suffix] = usage
    return found | {"paged": paged(lengths, slots=slots, max_len=max_len, block_size=block_size)}


def times_to_fill(lengths: Lengths, slots: int) -> int:
    """How often such requests must come again to keep the pool full: their prompts fill it twice, and all of their
    tokens FILLS times."""
    prompts = sum(prompt for prompt, _ in lengths)
    tokens = prompts + sum(answer for _, answer in lengths)
    return max(1, -(-2 * slots // max(1, prompts)), -(-FILLS * slots // tokens))


def _usage(sums: Sequence[int], steps: int, slots: int) -> Usage:
    if not steps:
        raise ConfigError("lengths", "are too few to fill the pool: it never was full and in balance", allowed="more")
    token, reservation, internal = (total / steps / slots for total in sums[:3])
    return Usage(token, reservation, internal, 1 - token - reservation - internal, sums[3] / steps)


def _check(lengths: Iterable[tuple[int, int]], slots: int, max_len: int) -> None:
    longest = max((p + a for p, a in lengths), default=0)
    if not 0 < longest <= max_len:
        raise ConfigError(
            "lengths", "must be some, of at most the model's limit", value=longest, allowed=f"<= {max_len}"
        )
