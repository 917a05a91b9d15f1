"""Which workers fail too often to be sent more: a circuit breaker for each of them.

    closed ──`breaker_failures` within `breaker_window_s`, and no more successes meanwhile──► open
       ▲                                                                                      │ ▲
       │ a request succeeds                                            its cooldown is over   │ │ one fails: the
       │                                                                                      ▼ │ cooldown doubles
       └────────────────────────────────────────────────────────────────────────────────── half_open

An open worker gets nothing while others can do it. A half-open one gets one request, and the next when that has
succeeded, or when it has told nothing for a cooldown. A worker that was restarted may be tried at once.

Pure: time is an argument (seconds on any clock). Must not know requests, or what counts as a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from baton.config import RouterConfig
from baton.protocol import BreakerState

SAME_FAULT_S = 0.05
"""Failures closer to each other are one: a step that fails takes all of its requests with it."""


class Breaker:
    """Of one worker, over all its lives."""

    __slots__ = ("_config", "_cooldown_s", "_failures", "_num_successes", "_tried_at", "_until")

    def __init__(self, config: RouterConfig):
        assert config.breaker_failures > 0, "0 means: no breakers"
        self._config = config
        self._failures: deque[tuple[float, int]] = deque(maxlen=config.breaker_failures)
        """While closed: when, and how many successes there had been until then."""
        self._num_successes = 0
        self._cooldown_s = config.breaker_cooldown_s
        self._until: float | None = None
        """When the cooldown ends; None: closed."""
        self._tried_at: float | None = None
        """When the half-open one last got a request of which nothing is known yet."""

    def state(self, now: float) -> BreakerState:
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half_open"

    def takes(self, now: float) -> bool:
        """Whether it may get a request like any other worker."""
        if self._until is None:
            return True
        if now < self._until:
            return False
        return self._tried_at is None or now >= self._tried_at + self._cooldown_s

    def on_placed(self, now: float) -> None:
        """It got a request."""
        if self._until is not None and now >= self._until:
            self._tried_at = now

    def on_success(self, now: float) -> None:
        """A request of it came to something. What an open one had begun before proves nothing."""
        self._num_successes += 1
        if self._until is not None and now >= self._until:
            self._until = self._tried_at = None
            self._cooldown_s = self._config.breaker_cooldown_s

    def on_failure(self, now: float) -> bool:
        """A request failed there. True: the breaker opens with it."""
        if self._until is not None:
            if now < self._until:
                return False  # begun before it opened
            self._cooldown_s = min(2 * self._cooldown_s, self._config.breaker_cooldown_max_s)
            self._open(now)
            return True
        failures = self._failures
        if failures and now < failures[-1][0] + SAME_FAULT_S:
            return False
        failures.append((now, self._num_successes))
        since, successes = failures[0]
        if len(failures) < self._config.breaker_failures or since < now - self._config.breaker_window_s:
            return False
        if self._num_successes - successes > len(failures):
            return False
        self._open(now)
        return True

    def on_restart(self, now: float) -> None:
        """A new life of the worker: what ailed it may be over."""
        if self._until is not None:
            self._until = min(self._until, now)
            self._tried_at = None

    def _open(self, now: float) -> None:
        self._failures.clear()
        self._until = now + self._cooldown_s
        self._tried_at = None


class Breakers:
    """Those of all workers, by id; of workers that never failed there is none."""

    def __init__(self, config: RouterConfig):
        self.num_opened = 0
        self._config = config
        self._by_id: dict[str, Breaker] = {}
        self._tripped: dict[str, Breaker] = {}
        """Those that are not closed."""

    @property
    def tripped(self) -> Collection[str]:
        """Ids of workers whose breaker is not closed."""
        return self._tripped.keys()

    def states(self, now: float) -> dict[str, BreakerState]:
        """By worker id, of those whose breaker is not closed."""
        return {worker_id: breaker.state(now) for worker_id, breaker in self._tripped.items()}

    def shut(self, now: float) -> frozenset[str]:
        """Ids of workers that shall get nothing now, if others can take it."""
        if not self._tripped:
            return frozenset()
        return frozenset(worker_id for worker_id, breaker in self._tripped.items() if not breaker.takes(now))

    def on_placed(self, worker_id: str, now: float) -> None:
        if self._tripped and (breaker := self._tripped.get(worker_id)) is not None:
            breaker.on_placed(now)

    def on_success(self, worker_id: str, now: float) -> None:
        breaker = self._by_id.get(worker_id)
        if breaker is not None:
            breaker.on_success(now)
            if breaker.state(now) == "closed":
                self._tripped.pop(worker_id, None)

    def on_failure(self, worker_id: str, now: float) -> None:
        if not self._config.breaker_failures:
            return
        breaker = self._by_id.get(worker_id)
        if breaker is None:
            breaker = self._by_id[worker_id] = Breaker(self._config)
        if breaker.on_failure(now):
            self.num_opened += 1
            self._tripped[worker_id] = breaker

    def on_restart(self, worker_id: str, now: float) -> None:
        breaker = self._tripped.get(worker_id)
        if breaker is not None:
            breaker.on_restart(now)

    def forget(self, known: Collection[str]) -> None:
        """Only these workers are known any more."""
        for worker_id in [i for i in self._by_id if i not in known]:
            del self._by_id[worker_id]
            self._tripped.pop(worker_id, None)
