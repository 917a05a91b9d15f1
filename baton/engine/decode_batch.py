"""The running requests of which a step computes one token and samples the next, and nothing else is to be done.

That is what most steps are for most requests, so they are kept from step to step in lists, and a step goes through
those with as little as possible for each. Who needs a closer look is known beforehand: when a block is full, when the
prefix cache wants to know, at the last token. Must not know queues or budgets, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from baton.engine.request import DecodeItem, Effect, Emit, EngineRequest, StepItem
from baton.plain_steps import PlainSteps
from baton.protocol import FinishReason, RequestKey, TokenOut

GATHER_STEPS = 16
"""After it had to be dissolved it is not gathered again for so many steps: for nothing, where blocks are short."""


class DecodeBatch:
    """`block_size` in tokens. All lists are by member; who comes or goes is taken in with `begin`."""

    def __init__(self, block_size: int):
        self.items: list[DecodeItem] = []
        self.requests: list[EngineRequest] = []
        self.keys: list[RequestKey] = []
        self.context = 0
        """Tokens that the members have, in all: as many positions a step attends to."""
        self._block_size = block_size
        self._appends: list[Callable[[int], None]] = []
        self._rows: list[Callable[[int, int, FinishReason | None], TokenOut]] = []
        self._bases: list[int] = []
        """Index of the next token, less `_age`."""
        self._age = 0
        """Steps that it took part in."""
        self._looks: dict[int, list[EngineRequest]] = {}
        """By age: whose token of that step is to be looked at closely."""
        self._growths: dict[int, list[EngineRequest]] = {}
        """By age: who lacks a block in that step."""
        self._stop_ids: frozenset[int] = frozenset()
        """Of all members."""
        self._coming: list[EngineRequest] = []
        self._gone: list[EngineRequest] = []
        self._dissolved_for = 0
        """Steps to go until it may be gathered again."""

    def __len__(self) -> int:
        return len(self.items)

    # --- members ----------------------------------------------------------------------------------

    def join(self, request: EngineRequest) -> None:
        """From the next step on; `plain_until` is set."""
        if not request.in_batch and not self._dissolved_for:
            request.in_batch = True
            self._coming.append(request)

    def leave(self, request: EngineRequest) -> None:
        """It does not run any more. If a step is under way, it stays in that."""
        if request.in_batch:
            request.in_batch = False
            self._gone.append(request)

    def begin(self, running: Iterable[EngineRequest]) -> None:
        """A step is to be planned: let come and go. `running`: all who run."""
        if self._dissolved_for:
            self._dissolved_for -= 1
            if not self._dissolved_for:
                for request in running:
                    if request.plain_until > len(request.tokens):
                        self.join(request)
        if not self._gone and not self._coming:
            return
        for request in self._gone:
            if request in self._coming:
                self._coming.remove(request)
            else:
                self._remove(request)
        self._gone.clear()
        if not self.items:
            self._clear()
        for request in self._coming:
            self._add(request)
        self._coming.clear()
        self.context = sum([len(request.tokens) for request in self.requests])

    def dissolve(self) -> None:
        """Each is dealt with by itself for a while."""
        for request in (*self.requests, *self._coming):
            request.in_batch = False
        self._coming.clear()
        self._gone.clear()
        self._clear()
        self._dissolved_for = GATHER_STEPS

    def _clear(self) -> None:
        for members in (self.items, self.requests, self.keys, self._appends, self._rows, self._bases):
            members.clear()
        self._looks.clear()
        self._growths.clear()
        self._stop_ids = frozenset()
        self._age = self.context = 0

    def _add(self, request: EngineRequest) -> None:
        num_known = len(request.tokens)
        self.items.append(DecodeItem(request))
        self.requests.append(request)
        self.keys.append(request.key)
        self._appends.append(request.tokens.append)
        self._rows.append(request.row)
        self._bases.append(num_known - request.num_prompt - self._age)
        if request.stop_ids:
            self._stop_ids |= request.stop_ids
        self._watch(request, self._age)
        self._watch_growth(request)

    def _remove(self, request: EngineRequest) -> None:
        place = self.requests.index(request)
        for members in (self.items, self.requests, self.keys, self._appends, self._rows, self._bases):
            del members[place]
        if request.stop_ids:
            self._stop_ids = frozenset().union(*[member.stop_ids for member in self.requests])

    def _watch(self, request: EngineRequest, age: int) -> None:
        """`age`: of its next step."""
        plain_steps = request.plain_until - len(request.tokens) - 1
        self._looks.setdefault(age + max(0, plain_steps), []).append(request)

    def _watch_growth(self, request: EngineRequest) -> None:
        room = len(request.blocks) * self._block_size - len(request.tokens)
        self._growths.setdefault(self._age + max(0, room + 1), []).append(request)

    # --- steps ------------------------------------------------------------------------------------

    def grow(self, grow: Callable[[EngineRequest], bool]) -> None:
        """Call `grow`, which gives it one, for each that lacks a block in this step."""
        for request in self._growths.pop(self._age, ()):
            if request.in_batch:
                if len(request.tokens) > len(request.blocks) * self._block_size:
                    grow(request)
                self._watch_growth(request)

    def start(self) -> list[StepItem]:
        """A step takes them all: their items."""
        for request in self.requests:
            request.in_step = True
        return [*self.items]

    def plain_steps(self, token: int) -> PlainSteps:
        """Of steps from this one on, as long as they are plain."""
        age = self._age
        return PlainSteps(token, self.keys.copy(), [base + age for base in self._bases])

    def is_plain(self, token: int) -> bool:
        """Whether all members stay if each gets `token` in this step."""
        if self._gone or token in self._stop_ids:
            return False
        looks = self._looks.get(self._age)
        return looks is None or not any(r.in_batch and len(r.tokens) + 1 >= r.max_len for r in looks)

    def advance_all(self, token: int, computed: Callable[[EngineRequest], None]) -> None:
        """The step is over, and each gets `token`: what `looks`, `advance` and `end` do where `is_plain`.

        `computed`: called for each of which the prefix cache wants to know.
        """
        for request in self.requests:
            request.in_step = False
            request.num_computed += 1
        looks = self._looks.pop(self._age, None)
        if looks is not None:
            looks = [request for request in looks if request.in_batch]
            if len(looks) > 1:
                looks.sort(key=self.requests.index)
            for request in looks:
                if request.num_computed >= request.register_at:
                    computed(request)
                request.plain_until = min(request.max_len, request.register_at + 1)
        for append in self._appends:
            append(token)
        self._age += 1
        self.context += len(self.items)
        for request in looks or ():
            self._watch(request, self._age)

    def looks(self, tokens: Sequence[int | None]) -> Collection[int]:
        """Places, in order, of members whose token is to be looked at closely; `tokens`: of the step, by member."""
        stop_ids = self._stop_ids
        if self._age not in self._looks and not self._gone and (not stop_ids or stop_ids.isdisjoint(tokens)):
            return ()
        places: set[int] = set()
        for requests in (self._looks.pop(self._age, ()), self._gone):
            for request in requests:
                if request in self.requests:
                    places.add(self.requests.index(request))
        if stop_ids:
            places.update(place for place, token in enumerate(tokens) if token in stop_ids)
        return sorted(places)

    def advance(
        self,
        start: int,
        end: int,
        tokens: Sequence[int | None],
        rows: list[TokenOut] | None,
        effects: list[Effect],
        plain: PlainSteps | None = None,
    ) -> None:
        """Take in the tokens of the members `start` to `end`, which are only to be kept and told: in `plain` if given
        (then they are all its token), or in `rows` if given, or else as effects."""
        age = self._age
        if plain is not None:
            for request in self.requests[start:end]:
                request.in_step = False
                request.num_computed += 1
            for append in self._appends[start:end]:
                append(plain.token)
            plain.keys += self.keys[start:end]
            plain.first += [base + age for base in self._bases[start:end]]
            return
        columns: tuple[Sequence[Any], ...] = (self.requests, self._appends, self._rows, self._bases, tokens)
        if end - start < len(tokens):
            columns = tuple([column[start:end] for column in columns])
        members = zip(*columns, strict=True)
        if rows is None:
            for request, append, _, base, token in members:
                request.in_step = False
                request.num_computed += 1
                append(token)
                effects.append(Emit(request, base + age, token, None))
            return
        tell = rows.append
        for request, append, row, base, token in members:
            request.in_step = False
            request.num_computed += 1
            append(token)
            tell(row(base + age, token, None))

    def end(self, looks: Iterable[int]) -> None:
        """The step is over. `looks`: places of those that were dealt with one by one."""
        self._age += 1
        self.context += len(self.items)
        for place in looks:
            request = self.requests[place]
            if request.in_batch:
                self._watch(request, self._age)
