"""The router's core: several samples of a request, and samples that end where their watch says."""

from __future__ import annotations

from typing import Any

import pytest

from baton.protocol import Abort, HandoffDone, MarksOut, RequestKey, Submit, Tokens
from router.actions import RequestDone
from router.lifecycle import SETTLE_S
from tests.fakes_router import Script, config_of, out


class StopAt:
    """A watch that ends the sample at this token."""

    def __init__(self, token: int):
        self.token = token
        self.seen: list[tuple[int, bool]] = []

    def watch(self, token: int, last: bool) -> bool:
        self.seen.append((token, last))
        return token == self.token


def keys(script: Script, n: int, attempt: int = 0) -> list[RequestKey]:
    return [script.key(attempt=attempt, sample=i) for i in range(n)]


def submits(actions: list[Any]) -> list[tuple[str, RequestKey]]:
    return [(to, message.key) for to, message in (a for a in actions if len(a) == 2) if isinstance(message, Submit)]


def aborts(actions: list[Any]) -> set[tuple[str, RequestKey]]:
    return {(a[0], a[1].key) for a in actions if len(a) == 2 and isinstance(a[1], Abort)}


# --- several samples ------------------------------------------------------------------------------


def test_each_sample_is_a_request_of_its_own_to_the_workers() -> None:
    s = Script("p0", "p1", "d0", "d1")
    placed = submits(s.generate(n=4))
    assert [key for _, key in placed] == keys(s, 4)
    assert s.core.num_requests == 4


def test_all_samples_go_to_one_pair_of_workers_where_they_share_the_prompt() -> None:
    s = Script("p0", "p1", "d0", "d1")
    for i in range(3):
        sent = [(to, m) for to, m in (a for a in s.generate(n=4, label=f"r{i}") if len(a) == 2)]
        assert len({(to, m.decode) for to, m in sent}) == 1
    assert {w.prefill_requests for w in s.core.view.workers.values() if w.can_prefill} == {4, 8}


def test_cached_tokens_are_those_of_each_samples_last_attempt() -> None:
    s = Script("b0", "b1")
    s.generate(n=2)
    a, b = keys(s, 2)
    marks = (MarksOut(*a, {}, 3), MarksOut(*b, {}, 5))
    s.tokens("b0", out(a, 0), out(b, 0, finish="stop"), marks=marks)
    s.failed("b0", a)
    again = s.key(attempt=1)
    late = (MarksOut(*a, {}, 9), MarksOut(*again, {}, 2))
    message = Tokens("b1", s.life("b1"), (out(again, 1, finish="stop"),), late)
    (done,) = [a for a in s.core.on_worker_message(s.life("b1"), message, s.now) if isinstance(a, RequestDone)]
    assert done.usage.cached_tokens == 2 + 5


def test_the_request_ends_once_when_all_samples_have() -> None:
    s = Script("b0")
    s.generate(n=3)
    a, b, c = keys(s, 3)
    assert s.tokens("b0", out(a, 0), out(b, 0, finish="stop"), out(c, 0)) == [
        ("tokens", "x", (10,)),
        ("tokens", "x.1", (10,)),
        ("sample", "x.1", "stop"),
        ("tokens", "x.2", (10,)),
    ]
    assert s.core.num_requests == 2
    assert s.tokens("b0", out(c, 1, finish="length")) == [("tokens", "x.2", (11,)), ("sample", "x.2", "length")]
    assert s.generate("x") == [("failed", "x", "invalid_request")], "its label is still taken"
    actions = s.core.on_worker_message("b0#1", _tokens(s, out(a, 1, finish="stop")), s.now)
    done = actions[-1]
    assert isinstance(done, RequestDone)
    assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("stop", 6, 5)
    assert s.core.num_requests == 0
    assert s.core.view.workers["b0"].num_outstanding == 0


def _tokens(s: Script, *tokens: Any) -> Any:
    from baton.protocol import Tokens

    return Tokens("b0", s.life("b0"), tokens)


def test_one_cancelled_sample_leaves_the_others() -> None:
    s = Script("p0", "d0")
    s.generate(n=3)
    a, b, c = keys(s, 3)
    cancelled = s.cancel(sample=1)
    assert aborts(cancelled) == {("p0", b), ("d0", b)}
    assert cancelled[-1] == ("sample", "x.1", "abort")
    assert s.cancel(sample=1) == s.cancel(sample=7) == []
    assert s.tokens("p0", out(a, 0, finish="stop"))[-1] == ("sample", "x.0", "stop")
    assert s.tokens("p0", out(c, 0, finish="stop"))[-2:] == [("sample", "x.2", "stop"), ("done", "x", "stop")]


def test_cancel_ends_all_of_them_and_the_request_once() -> None:
    s = Script("b0")
    s.generate(n=3)
    s.tokens("b0", out(s.key(sample=2), 0, finish="stop"))
    actions = s.cancel()
    assert aborts(actions) == {("b0", s.key(sample=0)), ("b0", s.key(sample=1))}
    assert [a for a in actions if a[0] == "done"] == [actions[-1]] == [("done", "x", "abort")]


def test_a_client_that_is_gone_takes_all_samples_with_it() -> None:
    s = Script("b0")
    s.generate(n=3)
    s.core.on_client_gone(b"c", s.now)
    s.core.check_integrity()
    assert s.core.num_requests == 0


def test_a_sample_that_cannot_be_had_fails_the_request() -> None:
    s = Script("b0", "b1", config=config_of(router__max_attempts=1))
    placed = {key: to for to, key in submits(s.generate(n=2))}
    a, b = keys(s, 2)
    actions = s.failed(placed[a], a)
    assert aborts(actions) == {(placed[b], b)}
    assert actions[-1] == ("failed", "x", "request_failed")
    assert s.core.num_requests == 0


def test_a_lost_worker_that_fails_one_sample_does_not_touch_its_siblings_again() -> None:
    s = Script("b0", config=config_of(router__max_attempts=1))
    s.generate(n=3)
    s.generate("y", n=2)
    actions = s.lose("b0")
    assert [a for a in actions if a[0] == "failed"] == [
        ("failed", "x", "request_failed"),
        ("failed", "y", "request_failed"),
    ]
    assert submits(actions) == []


def test_nothing_follows_a_failure_that_one_message_brings() -> None:
    s = Script("b0", config=config_of(router__max_attempts=1))
    s.generate(n=2)
    a, b = keys(s, 2)
    assert s.tokens("b0", out(a, 0, finish="abort"), out(b, 0)) == [
        ("b0", Abort(a)),
        ("b0", Abort(b)),
        ("failed", "x", "request_failed"),
    ]


def test_samples_that_wait_for_a_worker_give_up_as_one() -> None:
    s = Script("b0", config=config_of(router__worker_wait_s=5))
    s.generate(n=3)
    assert s.lose("b0") == [("b0", Abort(key)) for key in keys(s, 3)]
    assert s.core.num_requests == 3
    assert s.wait(6) == [("failed", "x", "request_failed")]


def test_samples_are_retried_by_themselves() -> None:
    s = Script("b0", "b1")
    placed = {key: to for to, key in submits(s.generate(n=2))}
    a, b = keys(s, 2)
    s.tokens(placed[a], out(a, 0))
    retried = s.failed(placed[a], a)
    again = s.key(attempt=1)
    assert submits(retried) == [("b1", again)], "placed by itself"
    assert next(m for _, m in retried if isinstance(m, Submit)).prior == (10,)
    assert s.tokens(placed[b], out(b, 0)) == [("tokens", "x.1", (10,))]
    assert s.tokens("b1", out(again, 1)) == [("tokens", "x", (11,))]


def test_stale_tokens_of_a_sample_are_told_by_sample() -> None:
    s = Script("b0")
    s.generate(n=2)
    gone = s.key(sample=5)
    assert s.tokens("b0", out(gone, 0)) == [("b0", Abort(gone))]


def test_every_sample_counts_for_max_requests() -> None:
    s = Script("b0", config=config_of(router__max_requests=4))
    assert s.generate(n=5) == [("failed", "x", "invalid_request")]
    assert len(submits(s.generate(n=3))) == 3
    assert s.generate("y", n=2) == [("failed", "y", "overloaded")]
    assert len(submits(s.generate("y"))) == 1


def test_shutdown_fails_a_request_of_many_samples_once_and_tells_workers_nothing() -> None:
    s = Script("b0")
    s.generate(n=3)
    assert s.done(s.core.on_shutdown(s.now)) == [("failed", "x", "request_failed")]


def test_a_request_of_many_samples_can_be_explained() -> None:
    s = Script("p0", "d0")
    s.generate(n=2)
    for key in keys(s, 2):
        s.tokens("p0", out(key, 0, finish="stop"))
    record = s.core.explain(s.id("x"), s.now)
    assert record is not None
    assert (len(record.placements), record.completion_tokens, record.finish_reason) == (2, 2, "stop")


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    s = Script("b0")
    assert s.generate(max_tokens=3, min_tokens=4) == [("failed", "x", "invalid_request")]


# --- watches --------------------------------------------------------------------------------------


def test_a_watch_ends_a_colocated_sample_and_its_worker_is_told() -> None:
    s = Script("b0")
    watch = StopAt(11)
    s.generate(watches=[watch])
    assert s.tokens("b0", out(s.key(), 0), out(s.key(), 1), out(s.key(), 2)) == [
        ("tokens", "x", (10, 11)),
        ("b0", Abort(s.key())),
        ("done", "x", "stop"),
    ]
    assert watch.seen == [(10, False), (11, False)]


def test_a_watch_that_ends_it_at_the_first_token_frees_both_workers() -> None:
    s = Script("p0", "d0")
    s.generate(watches=[StopAt(10)])
    actions = s.tokens("p0", out(s.key(), 0))
    assert aborts(actions) == {("p0", s.key()), ("d0", s.key())}
    assert (actions[0], actions[-1]) == (("tokens", "x", (10,)), ("done", "x", "stop"))


@pytest.mark.parametrize("account", [True, False])
def test_a_watch_that_ends_it_at_decode_waits_for_the_account_of_the_hand_over(account: bool) -> None:
    s = Script("p0", "d0")
    s.generate(watches=[StopAt(11)])
    s.tokens("p0", out(s.key(), 0))
    assert s.tokens("d0", out(s.key(), 1)) == [("tokens", "x", (11,)), ("d0", Abort(s.key()))]
    assert s.tokens("d0", out(s.key(), 2), out(s.key(), 4)) == []
    if account:
        assert s.send("p0", HandoffDone("p0", s.key(), 1, 64)) == [("done", "x", "stop")]
    else:
        assert s.wait(SETTLE_S, beating=["p0", "d0"]) == [("p0", Abort(s.key())), ("done", "x", "stop")]


def test_a_last_token_that_the_watch_also_ends_needs_no_abort() -> None:
    s = Script("b0")
    watch = StopAt(11)
    s.generate(max_tokens=2, watches=[watch])
    actions = s.tokens("b0", out(s.key(), 0), out(s.key(), 1, finish="length"))
    assert actions == [("tokens", "x", (10, 11)), ("done", "x", "stop")]
    assert watch.seen == [(10, False), (11, True)]


def test_a_watch_sees_each_token_once_and_in_order_over_attempts() -> None:
    s = Script("b0", "b1")
    watch = StopAt(13)
    ((to, _),) = submits(s.generate(watches=[watch]))
    other = {"b0": "b1", "b1": "b0"}[to]
    s.tokens(to, out(s.key(), 1), out(s.key(), 1), out(s.key(), 0))
    s.failed(to, s.key())
    again = s.key(attempt=1)
    actions = s.tokens(other, out(again, 2), out(again, 3), out(again, 3))
    assert actions == [("tokens", "x", (12, 13)), (other, Abort(again)), ("done", "x", "stop")]
    assert watch.seen == [(10, False), (11, False), (12, False), (13, False)]


def test_one_sample_stopped_leaves_the_others() -> None:
    s = Script("b0")
    s.generate(n=2, watches=[StopAt(10), StopAt(99)])
    a, b = keys(s, 2)
    assert s.tokens("b0", out(a, 0), out(b, 0)) == [
        ("tokens", "x", (10,)),
        ("b0", Abort(a)),
        ("sample", "x.0", "stop"),
        ("tokens", "x.1", (10,)),
    ]
    assert s.tokens("b0", out(b, 1, finish="length"))[-1] == ("done", "x", "stop")
