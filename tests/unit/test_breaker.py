"""Circuit breakers: when a worker gets nothing more, when it is tried again, and when it counts as well."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from router.breaker import SAME_FAULT_S, Breaker, Breakers

CONFIG = RouterConfig(breaker_failures=3, breaker_window_s=10.0, breaker_cooldown_s=1.0, breaker_cooldown_max_s=5.0)


def opened(at: float = 0.0) -> Breaker:
    """One that opens at `at + 2`."""
    breaker = Breaker(CONFIG)
    assert [breaker.on_failure(at + i) for i in range(3)] == [False, False, True]
    return breaker


def test_it_opens_after_so_many_failures_within_the_window() -> None:
    breaker = opened()
    assert breaker.state(2.0) == "open"
    assert not breaker.takes(2.0)


def test_failures_further_apart_than_the_window_leave_it_closed() -> None:
    breaker = Breaker(CONFIG)
    assert not any(breaker.on_failure(at) for at in (0.0, 6.0, 12.0, 18.0, 24.0))
    assert breaker.on_failure(24.5), "the last three are within ten seconds"


def test_failures_of_one_moment_are_one() -> None:
    breaker = Breaker(CONFIG)
    assert not any(breaker.on_failure(i * SAME_FAULT_S / 100) for i in range(100))
    assert breaker.state(1.0) == "closed"


def test_a_worker_that_mostly_succeeds_stays_closed() -> None:
    breaker = Breaker(CONFIG)
    for i in range(20):
        for _ in range(5):
            breaker.on_success(float(i))
        assert not breaker.on_failure(float(i))


def test_one_request_tries_it_and_closes_it() -> None:
    breaker = opened()
    assert (breaker.state(2.9), breaker.state(3.0)) == ("open", "half_open")
    assert breaker.takes(3.0)
    breaker.on_placed(3.0)
    assert not breaker.takes(3.1), "one is enough to find out"
    breaker.on_success(3.5)
    assert breaker.state(3.5) == "closed"
    assert breaker.takes(3.5)
    assert not breaker.on_failure(4.0), "it starts afresh"


def test_a_trial_that_fails_doubles_the_cooldown_up_to_the_limit() -> None:
    breaker, at = opened(), 2.0
    for cooldown in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert breaker.state(at + cooldown - 0.01) == "open"
        assert breaker.state(at + cooldown) == "half_open"
        at += cooldown
        breaker.on_placed(at)
        assert breaker.on_failure(at)
    breaker.on_placed(at + 5)
    breaker.on_success(at + 6)
    assert not any(breaker.on_failure(at + 10 + i) for i in range(2))
    assert breaker.on_failure(at + 12)
    assert breaker.state(at + 13) == "half_open", "after a success the first cooldown holds again"


def test_a_trial_of_which_nothing_is_heard_is_followed_by_another() -> None:
    breaker = opened()
    breaker.on_placed(3.0)
    assert not breaker.takes(3.9)
    assert breaker.takes(4.0)


def test_what_had_begun_before_it_opened_changes_nothing() -> None:
    breaker = opened()
    breaker.on_success(2.5)
    assert breaker.state(2.6) == "open"
    assert not breaker.on_failure(2.9)
    assert breaker.state(3.0) == "half_open", "no longer, either"


def test_a_restarted_worker_is_tried_at_once() -> None:
    breaker = opened()
    breaker.on_restart(2.1)
    assert breaker.takes(2.1)
    breaker.on_placed(2.1)
    assert breaker.on_failure(2.2)
    assert breaker.state(4.1) == "open", "for twice as long"


def test_breakers_by_worker() -> None:
    breakers = Breakers(CONFIG)
    for at in (0.0, 1.0, 2.0):
        breakers.on_failure("d0", at)
    breakers.on_failure("d1", 2.0)
    assert breakers.states(2.0) == {"d0": "open"}
    assert breakers.shut(2.0) == {"d0"}
    assert breakers.shut(3.0) == frozenset()
    assert breakers.states(3.0) == {"d0": "half_open"}
    breakers.on_placed("d0", 3.0)
    assert breakers.shut(3.1) == {"d0"}
    breakers.on_success("d0", 3.2)
    assert (breakers.states(3.2), breakers.num_opened) == ({}, 1)


def test_a_worker_that_is_forgotten_has_no_breaker() -> None:
    breakers = Breakers(CONFIG)
    for at in (0.0, 1.0, 2.0):
        breakers.on_failure("d0", at)
    breakers.forget({"d1"})
    assert breakers.states(2.0) == {}
    assert breakers.shut(2.0) == frozenset()


@pytest.mark.parametrize("at", [0.0, 1.0, 100.0])
def test_zero_failures_mean_no_breakers(at: float) -> None:
    breakers = Breakers(RouterConfig(breaker_failures=0))
    for i in range(100):
        breakers.on_failure("d0", at + i)
    assert breakers.shut(at + 100) == frozenset()
