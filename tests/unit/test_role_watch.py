"""RoleWatch: orders are carried out once, and what goes wrong on the way is survived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.errors import ClusterError
from baton_cluster.role_watch import RoleWatch
from router.roles import RoleOrder
from tests.stub_cluster import wait_until

FIRST, SECOND = (RoleOrder("decode-0", f"life-{n}", "prefill", "prefill is full") for n in (1, 2))


class Launcher:
    def __init__(self, answers: list[RoleOrder | Exception | None]):
        self.answers = answers
        self.num_asked = 0
        self.carried_out: list[RoleOrder] = []
        self.outcomes: Iterator[bool | Exception] = iter(())

    def ask(self) -> RoleOrder | None:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def carry_out(self, order: RoleOrder) -> bool:
        self.carried_out.append(order)
        outcome = next(self.outcomes, True)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def watched(launcher: Launcher, num_asked: int) -> list[str]:
    """What it told, after so many questions."""
    lines: list[str] = []
    watch = RoleWatch(launcher.ask, launcher.carry_out, 0.001, lines.append)
    try:
        wait_until(lambda: launcher.num_asked >= num_asked, "it has asked so often")
    finally:
        watch.stop()
        watch.stop()  # idempotent
    return lines


def test_an_order_is_carried_out_once_and_the_next_life_gets_its_own() -> None:
    launcher = Launcher([None, FIRST, FIRST, FIRST, None, SECOND])
    assert watched(launcher, 20) == ["decode-0 moves to pool prefill: prefill is full"] * 2
    assert launcher.carried_out == [FIRST, SECOND]


def test_an_order_for_another_life_is_looked_at_again() -> None:
    launcher = Launcher([FIRST])
    launcher.outcomes = iter((False, False, True))
    assert len(watched(launcher, 20)) == 1
    assert launcher.carried_out == [FIRST] * 3


def test_a_router_that_does_not_answer_and_a_start_that_fails_are_survived(caplog: pytest.LogCaptureFixture) -> None:
    gone = ClusterError("the router is not running")
    launcher = Launcher([gone, gone, FIRST, gone, SECOND])
    launcher.outcomes = iter((ClusterError("no memory"), True))
    watched(launcher, 20)
    assert launcher.carried_out == [FIRST, SECOND]
    silent = "the router does not tell of role changes: ClusterError: the router is not running"
    assert caplog.messages == [silent, "decode-0 could not be moved to pool prefill", silent]
