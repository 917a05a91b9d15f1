"""A script for a core (`tests.fakes_router.Script`) with observers, as the router's desk has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from baton.config import ClusterConfig
from baton.protocol import MarksOut, RequestKey
from baton.timeline import Mark
from router.actions import RouterAction
from router.latencies import Latencies
from router.metrics import Metrics
from tests.fakes_router import Script, config_of, out


class Observed(Script):
    """`latencies` and `metrics` watch; append others to `observers`."""

    def __init__(self, *worker_ids: str, config: ClusterConfig | None = None):
        self.observers: list[Any] = []
        self.counters: Counter[str] = Counter()
        self.config = config or config_of()
        super().__init__(*worker_ids, config=self.config)
        self.latencies = Latencies(self.core, self.now)
        self.metrics = Metrics(self.config, "model-a", self.core, self.latencies, self.counters)
        self.observers += [self.latencies, self.metrics]

    def done(self, actions: list[RouterAction]) -> list[Any]:
        for action in actions:
            for observer in self.observers:
                observer.on_action(action, self.now)
        return super().done(actions)

    def run(
        self, label: str = "x", *, gap: float = 0.5, tokens: int = 5, colocated: bool = False, **sampling: Any
    ) -> None:
        """A request from p0 to d0 (or b0 alone), `gap` seconds between all of its marks and between its tokens."""
        prefill, decode = ("b0", "b0") if colocated else ("p0", "d0")
        key, start = self.key(label), self.now
        self.generate(label, max_tokens=tokens, **sampling)
        self.now = start + 2 * gap
        at = {mark: start + mark * gap / 2 for mark in Mark}
        first = {m: at[m] for m in (Mark.SUBMITTED, Mark.PREFILL_START, Mark.FIRST_TOKEN)}
        self.tokens(prefill, out(key, 0, finish="length" if tokens == 1 else None), marks=(_marks(key, first),))
        if not colocated and tokens > 1:
            self.handed(prefill, key)
        for index in range(1, tokens):
            self.now += gap
            passed = {}
            if index == 1:
                passed |= {m: at[m] for m in (Mark.DECODE_START, Mark.SECOND_TOKEN)}
                passed |= {} if colocated else {m: at[m] for m in (Mark.COMMITTED, Mark.ADOPTED)}
            if index == tokens - 1:
                passed[Mark.FINISHED] = self.now
            finish = "length" if index == tokens - 1 else None
            self.tokens(decode, out(key, index, finish=finish), marks=(_marks(key, passed),) if passed else ())


def _marks(key: RequestKey, marks: dict[Mark, float]) -> MarksOut:
    return MarksOut(key.request_id, key.attempt, key.sample, {int(mark): at for mark, at in marks.items()}, 2)
