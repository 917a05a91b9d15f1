"""The router's core: events in, instruction lists out. Fake workers are lines of a script; no clock, no sockets."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config import RouterConfig
from baton.errors import InvalidRequestError
from baton.layout import KVLayout
from baton.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AttemptFailed,
    HandoffDone,
    Heartbeat,
    Joined,
    JoinRefused,
    LoadReport,
    MarksOut,
    Peers,
    Replace,
    RequestKey,
    Submit,
    TokenOut,
    Tokens,
)
from baton.sampling_params import SamplingParams
from baton.timeline import Mark
from router.actions import RequestDone, RequestFailed
from router.lifecycle import SETTLE_S
from tests.fakes_router import Script, config_of, join, out, worker


def submit(
    key: RequestKey, decode: str | None, prompt: int = 6, prior: tuple[int, ...] = (), **sampling: Any
) -> Submit:
    params = SamplingParams(**{"max_tokens": 5, "seed": 77, **sampling})
    return Submit(key, tuple(range(prompt)), params, prior, decode)


def started(script: Script, label: str = "x", **sampling: Any) -> RequestKey:
    """A request that is placed on the script's p0 and d0."""
    assert script.generate(label, **sampling)[0][0] == "p0"
    return script.key(label)


def decoding(script: Script, label: str = "x", **sampling: Any) -> RequestKey:
    """... and whose tokens 0 and 1 are delivered, hand-over booked."""
    key = started(script, label, **sampling)
    assert script.tokens("p0", out(key, 0)) == [("tokens", label, (10,))]
    assert script.handed("p0", key) == []
    assert script.tokens("d0", out(key, 1)) == [("tokens", label, (11,))]
    return key


# --- placing and the plain life -------------------------------------------------------------------


def test_a_split_request_from_submit_to_done() -> None:
    s = Script("p0", "d0")
    key = s.key()
    assert s.generate() == [("p0", submit(key, "d0"))]
    assert s.tokens("p0", out(key, 0)) == [("tokens", "x", (10,))]
    assert s.handed("p0", key, 4096) == []
    for i in (1, 2, 3):
        assert s.tokens("d0", out(key, i)) == [("tokens", "x", (10 + i,))]
    last = Tokens("d0", s.life("d0"), (out(key, 4, finish="length"),))
    actions = s.core.on_worker_message(s.life("d0"), last, s.now)
    assert s.done(actions) == [("tokens", "x", (14,)), ("done", "x", "length")]
    done = actions[1]
    assert isinstance(done, RequestDone)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.kv_bytes, done.attempts) == (6, 5, 4096, 1)
    assert (done.prefill_worker, done.decode_worker) == ("p0", "d0")
    assert s.core.num_requests == 0


def test_a_colocated_request_names_no_decode_worker() -> None:
    s = Script("b0")
    key = s.key()
    assert s.generate() == [("b0", submit(key, None))]
    assert s.tokens("b0", out(key, 0), out(key, 1, finish="stop")) == [("tokens", "x", (10, 11)), ("done", "x", "stop")]


def test_a_given_seed_is_kept_and_a_missing_one_filled_in() -> None:
    s = Script("b0")
    assert s.generate("a", seed=5)[0][1].sampling.seed == 5
    assert s.generate("b")[0][1].sampling.seed == 77


def test_one_message_may_carry_tokens_of_many_requests() -> None:
    s = Script("b0")
    s.generate("a"), s.generate("b")
    a, b = s.key("a"), s.key("b")
    assert s.tokens("b0", out(a, 0), out(b, 0), out(a, 1)) == [("tokens", "a", (10, 11)), ("tokens", "b", (10,))]


def test_marks_of_the_current_attempt_and_the_routers_own() -> None:
    s = Script("b0")
    s.now = 101.0
    request = s.core.on_generate(b"c", "x", "r", 1, (1,), SamplingParams(max_tokens=9), 101.0, received_at=100.5)
    assert s.done(request)[0][0] == "b0"
    marks = (MarksOut("r", 0, 0, {int(Mark.PREFILL_START): 101.5}), MarksOut("r", 7, 0, {int(Mark.SUBMITTED): 9.0}))
    message = Tokens("b0", s.life("b0"), (TokenOut("r", 0, 0, 0, 3, "stop"),), marks)
    done = s.core.on_worker_message(s.life("b0"), message, 102.0)[-1]
    assert isinstance(done, RequestDone)
    assert done.marks == {Mark.RECEIVED: 100.5, Mark.PLACED: 101.0, Mark.PREFILL_START: 101.5}


def test_a_report_reaches_the_view() -> None:
    s = Script("p0", "d0")
    s.beat("p0", LoadReport(num_waiting=3))
    s.tokens("d0", load=LoadReport(num_running=4))
    assert s.core.view.workers["p0"].load.num_waiting == 3
    assert s.core.view.workers["d0"].load.num_running == 4


def test_prefill_is_charged_until_its_first_token_and_decode_until_the_end() -> None:
    s = Script("p0", "d0")
    key = started(s)
    p0, d0 = s.core.view.workers["p0"], s.core.view.workers["d0"]
    assert (p0.prefill_tokens, d0.decode_tokens) == (6, 11)
    s.tokens("p0", out(key, 0))
    assert (p0.prefill_tokens, d0.decode_tokens) == (0, 11)
    s.cancel()
    assert (p0.num_outstanding, d0.num_outstanding) == (0, 0)


def test_an_ended_request_can_be_explained() -> None:
    s = Script("p0", "d0", "b0")
    s.generate()
    s.cancel()
    record = s.core.explain("c-", s.now)
    assert record is not None
    assert {score.worker_id for score in record.placements[0].scores} == {"p0", "d0", "b0"}
    assert record.finish_reason == "abort"
    with pytest.raises(InvalidRequestError, match="nobody"):
        s.core.explain("nobody", s.now)


# --- order and duplicates (I2) --------------------------------------------------------------------


def test_token_1_before_token_0_is_held_back() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.tokens("d0", out(key, 1)) == []
    assert s.tokens("d0", out(key, 2)) == []
    assert s.tokens("p0", out(key, 0)) == [("tokens", "x", (10, 11, 12))]


def test_the_end_may_come_before_the_beginning() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.tokens("d0", out(key, 1, finish="stop")) == []
    assert s.handed("p0", key) == []
    assert s.tokens("p0", out(key, 0)) == [("tokens", "x", (10, 11)), ("done", "x", "stop")]


def test_duplicates_are_dropped_in_every_place() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.tokens("d0", out(key, 1), out(key, 1, token=99)) == []
    assert s.tokens("p0", out(key, 0), out(key, 0, token=98)) == [("tokens", "x", (10, 11))]
    assert s.tokens("p0", out(key, 0)) == []
    assert s.tokens("d0", out(key, 1), out(key, 2)) == [("tokens", "x", (12,))]


def test_tokens_beyond_max_tokens_never_reach_the_client() -> None:
    s = Script("b0")
    key = (s.generate(max_tokens=2), s.key())[1]
    assert s.tokens("b0", out(key, 5)) == []
    assert s.tokens("b0", out(key, 0), out(key, 1), out(key, 2)) == [("tokens", "x", (10, 11)), ("done", "x", "length")]


def test_a_gap_that_never_closes_is_a_failed_attempt() -> None:
    s = Script("p0", "d0")
    key = decoding(s)
    assert s.tokens("d0", out(key, 3)) == []
    got = s.wait(2.0, beating=("p0", "d0"))
    assert got == [("p0", Abort(key)), ("d0", Abort(key)), ("p0", submit(s.key(attempt=1), "d0", prior=(10, 11)))]


def test_a_gap_that_closes_in_time_is_nothing() -> None:
    s = Script("p0", "d0")
    key = decoding(s)
    s.tokens("d0", out(key, 3))
    s.tokens("d0", out(key, 2))
    assert s.wait(5.0, beating=("p0", "d0")) == []


# --- endings --------------------------------------------------------------------------------------


def test_a_first_token_that_is_the_last_ends_it_and_frees_the_reservation() -> None:
    s = Script("p0", "d0")
    key = started(s)
    got = s.tokens("p0", out(key, 0, finish="stop"))
    assert got == [("tokens", "x", (10,)), ("d0", Abort(key)), ("done", "x", "stop")]


def test_a_request_of_one_token_was_never_offered_so_decode_is_not_told() -> None:
    s = Script("p0", "d0")
    key = started(s, max_tokens=1)
    assert s.tokens("p0", out(key, 0, finish="length")) == [("tokens", "x", (10,)), ("done", "x", "length")]


def test_the_end_waits_for_the_account_of_the_hand_over() -> None:
    s = Script("p0", "d0")
    key = started(s, max_tokens=2)
    s.tokens("p0", out(key, 0))
    assert s.tokens("d0", out(key, 1, finish="length")) == [("tokens", "x", (11,))]
    assert s.handed("p0", key, 99) == [("done", "x", "length")]


def test_but_not_for_long() -> None:
    s = Script("p0", "d0")
    key = started(s, max_tokens=2)
    s.tokens("p0", out(key, 0))
    s.tokens("d0", out(key, 1, finish="length"))
    assert s.wait(SETTLE_S) == [("p0", Abort(key)), ("done", "x", "length")]


@pytest.mark.parametrize("what", ["cancel", "prefill", "decode", "gone", "failed", "stop"])
def test_whatever_happens_while_it_settles_it_ends_as_its_last_token_said(what: str) -> None:
    s = Script("p0", "d0")
    key = started(s, max_tokens=2)
    s.tokens("p0", out(key, 0))
    s.tokens("d0", out(key, 1, finish="length"))
    got = {
        "cancel": lambda: s.cancel(),
        "prefill": lambda: s.lose("p0"),
        "decode": lambda: s.lose("d0"),
        "gone": lambda: s.done(s.core.on_client_gone(b"c", s.now)),
        "failed": lambda: s.failed("p0", key) + s.wait(SETTLE_S),
        "stop": lambda: s.wait(SETTLE_S),
    }[what]()
    assert [a for a in got if a[0] in ("done", "failed")] == [("done", "x", "length")]


def test_cancel_tells_both_workers_and_ends_as_abort() -> None:
    s = Script("p0", "d0")
    key = decoding(s)
    assert s.cancel() == [("p0", Abort(key)), ("d0", Abort(key)), ("done", "x", "abort")]
    assert s.cancel() == []
    assert s.tokens("d0", out(key, 2)) == []


def test_cancel_of_a_colocated_request_tells_its_worker_once() -> None:
    s = Script("b0")
    s.generate()
    assert s.cancel() == [("b0", Abort(s.key())), ("done", "x", "abort")]


def test_a_client_that_is_gone_takes_its_requests_with_it_and_no_others() -> None:
    s = Script("b0")
    s.generate("a"), s.generate("b"), s.generate("a", client=b"other")
    assert [a for a in s.done(s.core.on_client_gone(b"c", s.now)) if a[0] == "done"] == [
        ("done", "a", "abort"),
        ("done", "b", "abort"),
    ]
    assert s.core.clients() == {b"other": "a"}


def test_equal_labels_of_two_clients_are_two_requests() -> None:
    s = Script("b0")
    s.generate("x", client=b"c"), s.generate("x", client=b"e")
    assert s.cancel("x", client=b"e")[-1] == ("done", "x", "abort")
    assert s.tokens("b0", out(s.key(), 0)) == [("tokens", "x", (10,))]


def test_shutdown_fails_what_is_open_and_tells_workers_nothing() -> None:
    s = Script("p0", "d0")
    s.generate("a"), s.generate("b")
    assert s.done(s.core.on_shutdown(s.now)) == [("failed", "a", "request_failed"), ("failed", "b", "request_failed")]
    assert s.core.num_requests == 0


# --- refusals -------------------------------------------------------------------------------------


def test_refused_requests_get_one_answer_and_leave_nothing() -> None:
    s = Script(config=config_of(router__max_requests=1))
    assert s.generate("none-lives") == [("failed", "none-lives", "overloaded")]
    s.join(worker("b0"))
    assert s.generate("large", max_tokens=500) == [("failed", "large", "request_too_large")]
    assert s.generate("empty", prompt=0) == [("failed", "empty", "invalid_request")]
    s.generate("a")
    assert s.generate("a") == [("failed", "a", "invalid_request")]
    assert s.generate("b") == [("failed", "b", "overloaded")]
    s.cancel("a")
    assert s.generate("b")[0][0] == "b0"


def test_a_refused_hand_over_is_offered_to_others_and_then_fails_as_overloaded() -> None:
    s = Script("p0", "d0", "d1")
    key = started(s)
    assert s.refused("p0", key, "d0") == [("p0", Replace(key, "d1"))]
    assert s.core.view.workers["d0"].num_outstanding == 0
    assert s.refused("p0", key, "d0") == []  # a late answer about the former offer
    assert s.refused("p0", key, "d1") == [
        ("p0", Abort(key)),
        ("d1", Abort(key)),
        ("failed", "x", "overloaded"),
    ]


def test_a_worker_of_role_both_keeps_what_nobody_takes() -> None:
    s = Script("b0", "d0")
    got: list[Any] = []
    while not got or got[0][1].decode != "d0":  # placed (b0, d0) or (b0, b0), whichever scores better
        got = s.generate(str(len(s.core.clients()) + s.num_requests))
    key = got[0][1].key
    assert s.refused("b0", key, "d0") == [("b0", Replace(key, None))]
    assert s.tokens("b0", TokenOut(key.request_id, 0, 0, 0, 1, None), TokenOut(key.request_id, 0, 0, 1, 2, None)) == [
        ("tokens", key.request_id.removeprefix("c-"), (1, 2))
    ]


def test_tokens_come_from_the_worker_that_took_it_in_the_end() -> None:
    s = Script("p0", "d0", "d1")
    key = started(s)
    s.refused("p0", key, "d0")
    s.tokens("p0", out(key, 0))
    assert s.tokens("d0", out(key, 1, token=66)) == [("d0", Abort(key))]
    assert s.tokens("d1", out(key, 1)) == [("tokens", "x", (11,))]


# --- failed attempts ------------------------------------------------------------------------------


def test_a_failed_attempt_goes_on_elsewhere_with_what_was_delivered() -> None:
    s = Script("p0", "d0", "p1", "d1")
    key = decoding(s)
    got = s.failed("d0", key)
    assert got == [("p0", Abort(key)), ("p1", submit(s.key(attempt=1), "d1", prior=(10, 11)))]
    second = s.key(attempt=1)
    assert s.tokens("p1", out(second, 2)) == [("tokens", "x", (12,))]
    assert s.tokens("d1", out(second, 3, finish="stop")) == [("tokens", "x", (13,))]
    done = s.core.on_worker_message(s.life("p1"), HandoffDone("p1", second, 1, 10), s.now)
    assert isinstance(done[0], RequestDone)
    assert (done[0].attempts, done[0].usage.prompt_tokens, done[0].usage.completion_tokens) == (2, 6, 4)


def test_held_back_tokens_of_a_failed_attempt_are_not_delivered() -> None:
    s = Script("p0", "d0")
    key = started(s)
    s.tokens("d0", out(key, 1, token=99))
    assert s.failed("p0", key)[-1] == ("p0", submit(s.key(attempt=1), "d0"))
    assert s.tokens("p0", out(s.key(attempt=1), 0)) == [("tokens", "x", (10,))]


def test_refused_ends_the_request_and_the_other_worker_is_told() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.failed("p0", key, "refused") == [("d0", Abort(key)), ("failed", "x", "request_failed")]


def test_attempts_are_bounded_and_the_error_says_why() -> None:
    s = Script("b0", config=config_of(router__max_attempts=2))
    s.generate()
    assert s.failed("b0", s.key()) == [("b0", submit(s.key(attempt=1), None))]
    failed = AttemptFailed("b0", s.key(attempt=1), "engine", "it broke")
    actions = s.core.on_worker_message(s.life("b0"), failed, s.now)
    assert isinstance(actions[0], RequestFailed)
    assert "attempt 2 of 2" in actions[0].message
    assert "it broke" in actions[0].message


def test_a_worker_that_gives_a_request_up_by_its_finish_reason_is_a_failed_attempt() -> None:
    s = Script("b0")
    s.generate()
    got = s.tokens("b0", out(s.key(), 0), out(s.key(), 1, finish="error"))
    assert got == [
        ("tokens", "x", (10,)),
        ("b0", Abort(s.key())),
        ("b0", submit(s.key(attempt=1), None, prior=(10,))),
    ]


def test_a_failure_of_prefill_after_decode_took_over_is_nothing() -> None:
    s = Script("p0", "d0")
    key = decoding(s)
    assert s.failed("p0", key) == []
    assert s.tokens("d0", out(key, 2)) == [("tokens", "x", (12,))]


def test_a_lost_peer_that_we_still_see_is_avoided_and_waited_for_not_hammered() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.failed("p0", key, "peer_lost") == [("d0", Abort(key))]
    assert s.core.num_requests == 1
    s.now += 0.1
    assert s.join(worker("d0", life=2))[-1] != ("p0", submit(s.key(attempt=1), "d0"))
    assert ("p0", submit(s.key(attempt=1), "d0")) in s.wait(2.0, beating=("p0", "d0"))


def test_a_lost_peer_is_avoided_where_there_is_another() -> None:
    s = Script("p0", "d0", "p1", "d1")
    key = started(s)
    assert s.failed("p0", key, "peer_lost")[-1] == ("p1", submit(s.key(attempt=1), "d1"))


def test_further_failures_of_a_request_wait_twice_as_long_each_time() -> None:
    s = Script(
        "b0", config=config_of(router__max_attempts=6, router__retry_backoff_max_s=0.3, router__breaker_failures=0)
    )
    s.generate()
    assert len(s.failed("b0", s.key())) == 1, "the first failure is followed at once"
    for attempt, wait in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.3)):
        assert s.failed("b0", s.key(attempt=attempt)) == []
        assert s.wait(wait - 0.01, beating=["b0"]) == []
        assert s.wait(0.01, beating=["b0"]) == [("b0", submit(s.key(attempt=attempt + 1), None))]
    assert s.core.num_retries == 5


def test_a_worker_that_comes_meanwhile_does_not_cut_the_wait_short() -> None:
    s = Script("b0")
    s.generate()
    s.failed("b0", s.key())
    assert s.failed("b0", s.key(attempt=1)) == []
    assert not [m for _, m in s.join(worker("b1")) if isinstance(m, Submit)]
    assert s.wait(0.1, beating=["b0", "b1"]) == [("b1", submit(s.key(attempt=2), None))]


def test_workers_on_which_it_failed_are_avoided_in_all_further_attempts() -> None:
    s = Script("b0", "b1", "b2", config=config_of(router__max_attempts=5))
    seen = [s.generate()[0][0]]
    for attempt in range(3):
        found = s.failed(seen[-1], s.key(attempt=attempt)) or s.wait(0.5, beating=["b0", "b1", "b2"])
        seen.append(found[-1][0])
    assert sorted(seen[:3]) == ["b0", "b1", "b2"]
    assert seen[3] != seen[2], "all failed it: at least not the last one again"


def test_a_cancelled_request_that_waits_for_its_next_attempt() -> None:
    s = Script("b0")
    s.generate()
    s.failed("b0", s.key())
    s.failed("b0", s.key(attempt=1))
    assert s.cancel() == [("done", "x", "abort")]
    assert s.wait(1.0, beating=["b0"]) == []


# --- circuit breakers -----------------------------------------------------------------------------


def broken(*worker_ids: str, **router: Any) -> Script:
    """A script whose b0 has failed three requests, one a second."""
    settings = {"breaker_failures": 3, "breaker_cooldown_s": 2.0, **router}
    s = Script("b0", config=config_of(**{f"router__{key}": value for key, value in settings.items()}))
    for i in range(3):
        assert s.generate(f"bad{i}")[0][0] == "b0"
        s.failed("b0", s.key(f"bad{i}"), "engine_error")
        s.cancel(f"bad{i}")
        s.now += 1.0
        s.beat("b0")
    for worker_id in worker_ids:
        s.join(worker(worker_id))
    return s


def breaker_of(s: Script, worker_id: str) -> str:
    return next(w.breaker for w in s.core.status("x", s.now).workers if w.info.worker_id == worker_id)


def test_a_worker_that_fails_again_and_again_gets_nothing_until_it_is_tried() -> None:
    s = broken("b1")
    assert breaker_of(s, "b0") == "open"
    assert [s.generate(f"x{i}")[0][0] for i in range(4)] == ["b1"] * 4
    s.wait(1.5, beating=["b0", "b1"])
    assert breaker_of(s, "b0") == "half_open"
    assert [s.generate(f"y{i}")[0][0] for i in range(3)] == ["b0", "b1", "b1"], "one request tries it"
    s.tokens("b0", out(s.key("y0"), 0))
    assert breaker_of(s, "b0") == "closed"
    assert s.generate("z")[0][0] == "b0"
    assert s.core.num_breakers_opened == 1


def test_an_open_worker_is_used_if_nobody_else_is_left() -> None:
    s = broken()
    assert breaker_of(s, "b0") == "open"
    assert s.generate()[0][0] == "b0"


def test_it_is_waited_for_the_others_rather_than_that_an_open_worker_is_used() -> None:
    s = broken("b1", max_handoffs=1)
    assert s.generate("x")[0][0] == "b1"
    assert s.generate("y") == [], "b0 has room, and is left alone"
    assert s.tokens("b1", out(s.key("x"), 0))[-1] == ("b1", submit(s.key("y"), None))


def test_a_restarted_worker_is_tried_at_once() -> None:
    s = broken("b1")
    s.join(worker("b0", life=2))
    assert breaker_of(s, "b0") == "half_open"
    assert s.generate("x")[0][0] == "b0"
    assert s.generate("y")[0][0] == "b1"


def test_a_hand_over_that_fails_counts_against_both_and_a_lost_peer_against_the_peer() -> None:
    s = Script("p0", "d0", config=config_of(router__breaker_failures=1))
    started(s)
    s.failed("p0", s.key(), "peer_lost")
    assert (breaker_of(s, "p0"), breaker_of(s, "d0")) == ("closed", "open")
    s = Script("p0", "d0", config=config_of(router__breaker_failures=1))
    started(s)
    s.failed("p0", s.key(), "transfer")
    assert (breaker_of(s, "p0"), breaker_of(s, "d0")) == ("open", "open")


# --- a router that stops --------------------------------------------------------------------------


def test_a_router_that_stops_lets_nothing_in_and_open_requests_go_on() -> None:
    s = Script("p0", "d0", config=config_of(router__shutdown_grace_s=3.0, router__max_handoffs=1))
    key = started(s)
    assert s.generate("queued") == []
    assert s.done(s.core.on_stopping(s.now)) == []
    (refused,) = s.core.on_generate(b"c", "y", "c-y", 1, (1,), SamplingParams(max_tokens=5), s.now)
    assert isinstance(refused, RequestFailed)
    assert (refused.code, refused.retry_after_s) == ("overloaded", 4.0)
    s.tokens("p0", out(key, 0))
    s.handed("p0", key)
    assert s.tokens("d0", out(key, 1))[-1] == ("p0", submit(s.key("queued"), "d0"))
    assert s.done(s.core.on_shutdown(s.now)) == [
        ("failed", "x", "request_failed"),
        ("failed", "queued", "request_failed"),
    ]


# --- stale attempts -------------------------------------------------------------------------------


def test_tokens_of_a_stale_attempt_are_ignored_and_its_worker_is_told_once() -> None:
    s = Script("p0", "d0")
    key = started(s)
    s.failed("p0", key)
    assert s.tokens("p0", out(key, 0, token=99)) == [("p0", Abort(key))]
    assert s.tokens("p0", out(key, 1, token=99)) == []
    assert s.tokens("d0", out(key, 1, token=99)) == []  # was told when the attempt failed
    assert s.tokens("p0", out(s.key(attempt=1), 0)) == [("tokens", "x", (10,))]


def test_messages_about_stale_or_foreign_attempts_change_nothing() -> None:
    s = Script("p0", "d0", "p1")
    key = started(s)
    for stale in (s.key(attempt=9), s.key("unknown")):
        assert s.failed("p0", stale) == []
        assert s.refused("p0", stale, "d0") == []
        assert s.handed("p0", stale) == []
    assert s.failed("p1", key) == []
    assert s.refused("d0", key, "d0") == []
    assert s.tokens("p1", out(key, 0, token=99)) == [("p1", Abort(key))]


def test_unknown_requests_are_told_to_end_once() -> None:
    s = Script("b0")
    ghost = s.key("ghost")
    assert s.tokens("b0", out(ghost, 0)) == [("b0", Abort(ghost))]
    assert s.tokens("b0", out(ghost, 1)) == []


# --- lost workers, in each phase ------------------------------------------------------------------


def test_prefill_lost_before_the_first_token() -> None:
    s = Script("p0", "d0", "p1")
    key = started(s)
    assert s.lose("p0") == [
        ("p0", Abort(key)),
        ("d0", Abort(key)),
        ("p1", submit(s.key(attempt=1), "d0")),
    ]


def test_prefill_lost_between_first_token_and_hand_over() -> None:
    s = Script("p0", "d0", "p1")
    key = started(s)
    s.tokens("p0", out(key, 0))
    assert s.lose("p0")[-1] == ("p1", submit(s.key(attempt=1), "d0", prior=(10,)))


def test_prefill_lost_with_its_first_token_though_decode_has_begun() -> None:
    s = Script("p0", "d0", "p1")
    key = started(s)
    s.tokens("d0", out(key, 1))
    assert s.lose("p0")[-1] == ("p1", submit(s.key(attempt=1), "d0"))


def test_prefill_lost_once_decode_has_produced_a_token_is_nothing() -> None:
    s = Script("p0", "d0")
    key = started(s)
    s.tokens("p0", out(key, 0))
    s.tokens("d0", out(key, 1))
    assert s.lose("p0") == []
    assert s.tokens("d0", out(key, 2, finish="stop")) == [
        ("tokens", "x", (12,)),
        ("p0", Abort(key)),
        ("done", "x", "stop"),
    ]


def test_prefill_lost_after_the_hand_over_is_nothing() -> None:
    s = Script("p0", "d0")
    key = started(s)
    s.tokens("p0", out(key, 0))
    s.handed("p0", key)
    assert s.lose("p0") == []
    assert s.tokens("d0", out(key, 1, finish="stop")) == [("tokens", "x", (11,)), ("done", "x", "stop")]


@pytest.mark.parametrize("phase", ["placed", "first token", "decoding"])
def test_decode_lost(phase: str) -> None:
    s = Script("p0", "d0", "d1")
    key = started(s)
    prior: tuple[int, ...] = ()
    if phase != "placed":
        s.tokens("p0", out(key, 0))
        prior = (10,)
    if phase == "decoding":
        s.handed("p0", key)
        s.tokens("d0", out(key, 1), out(key, 2))
        prior = (10, 11, 12)
    got = s.lose("d0")
    assert got[0] == ("p0", Peers((worker("d1"),)))
    assert got[1:] == [
        ("p0", Abort(key)),
        ("d0", Abort(key)),
        ("p0", submit(s.key(attempt=1), "d1", prior=prior)),
    ]


def test_a_colocated_worker_lost() -> None:
    s = Script("b0", "b1")
    s.generate()
    s.tokens("b0", out(s.key(), 0))
    assert s.lose("b0")[-1] == ("b1", submit(s.key(attempt=1), None, prior=(10,)))


def test_without_another_worker_a_request_waits_for_one() -> None:
    s = Script("p0", "d0")
    decoding(s)
    assert s.lose("d0")[-1] == ("d0", Abort(s.key()))
    assert s.wait(5.0, beating=("p0",)) == []
    assert s.generate("new") == [("failed", "new", "overloaded")]
    assert s.join(worker("d0", life=2))[-1] == ("p0", submit(s.key(attempt=1), "d0", prior=(10, 11)))


def test_but_not_for_ever() -> None:
    s = Script("p0", "d0")
    decoding(s)
    s.lose("d0")
    assert s.wait(RouterConfig().worker_wait_s - 1, beating=("p0",)) == []
    assert s.wait(1.0, beating=("p0",)) == [("failed", "x", "request_failed")]


def test_a_waiting_request_can_be_cancelled() -> None:
    s = Script("p0", "d0")
    decoding(s)
    s.lose("d0")
    assert s.cancel() == [("done", "x", "abort")]


def test_losing_a_worker_twice_or_a_former_life_is_nothing() -> None:
    s = Script("b0")
    s.lose("b0")
    assert s.lose("b0") == []
    s.join(worker("b0", life=2))
    assert s.done(s.core.on_worker_lost("b0#1", "late news", s.now)) == []
    assert s.core.view.workers["b0"].ready


# --- liveness -------------------------------------------------------------------------------------


def test_heartbeats_go_to_live_workers_every_heartbeat_s() -> None:
    s = Script("p0", "d0")
    assert s.core.next_deadline() == pytest.approx(100.5)
    s.now = 100.5
    beat = Heartbeat("router#1")
    assert s.done(s.core.on_deadline(s.now)) == [("p0", beat), ("d0", beat)]
    assert s.core.next_deadline() == pytest.approx(101.0)
    assert s.done(s.core.on_deadline(100.7)) == []


def test_silence_is_a_loss_and_the_reason_is_told() -> None:
    s = Script("p0", "d0", "d1", config=config_of(router__max_attempts=1))
    key = started(s)
    s.now = 102.0
    s.beat("p0"), s.beat("d1")
    actions = s.core.on_deadline(102.0)
    assert s.done(actions)[:4] == [
        ("p0", Peers((worker("d1"),))),
        ("p0", Abort(key)),
        ("d0", Abort(key)),
        ("failed", "x", "request_failed"),
    ]
    assert isinstance(actions[3], RequestFailed)
    assert "d0: silent for 2.0 s, liveness.timeout_s is 2" in actions[3].message


def test_a_worker_that_was_only_silent_comes_back() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.wait(2.0, beating=("p0",)) == [("p0", Peers(())), ("p0", Abort(key)), ("d0", Abort(key))]
    assert s.beat("d0") == [("p0", Peers((worker("d0"),))), ("p0", submit(s.key(attempt=1), "d0"))]
    assert s.tokens("d0", out(key, 1)) == [("d0", Abort(key))]  # the first Abort may not have reached it


def test_nothing_to_wake_for_without_workers_or_requests() -> None:
    s = Script()
    assert s.core.next_deadline() is None
    s.join(worker("b0"))
    s.wait(3.0)
    assert s.core.next_deadline() is None


# --- joining --------------------------------------------------------------------------------------


def test_join_is_answered_with_its_own_clock_and_peers_follow() -> None:
    s = Script()
    assert s.join(worker("p0")) == [("p0", Joined("router#1", 5.0, 100.0, 100.0)), ("p0", Peers(()))]
    d0, b0 = worker("d0"), worker("b0")
    assert s.join(d0) == [("d0", Joined("router#1", 5.0, 100.0, 100.0)), ("p0", Peers((d0,)))]
    assert s.join(b0)[1:] == [("p0", Peers((d0, b0))), ("b0", Peers((d0, b0)))]
    assert s.join(worker("p1"))[1:] == [("p1", Peers((d0, b0)))]


@pytest.mark.parametrize(
    ("info", "version", "both_values"),
    [
        (worker("d0"), 99, ("99", str(PROTOCOL_VERSION))),
        (worker("d0", fingerprint="model-b"), PROTOCOL_VERSION, ("model-a", "model-b")),
        (worker("d0", layout=KVLayout(2, 3, 32, 8, "float32")), PROTOCOL_VERSION, ("num_kv_heads", "has 1", "has 3")),
        (worker("d0", num_blocks=0), PROTOCOL_VERSION, ("0 blocks", "1")),
    ],
    ids=["version", "fingerprint", "layout", "no blocks"],
)
def test_what_cannot_work_is_refused_naming_both_values(info: Any, version: int, both_values: tuple[str, ...]) -> None:
    s = Script("p0")
    ((worker_id, message),) = s.done(s.core.on_join(join(info, version), s.now))
    assert worker_id == "d0"
    assert isinstance(message, JoinRefused)
    assert all(value in message.reason for value in both_values), message.reason
    assert s.core.view.get("d0") is None


def test_the_clusters_own_fingerprint_binds_the_first_worker_too() -> None:
    s = Script(fingerprint="model-z")
    assert isinstance(s.done(s.core.on_join(join(worker("p0")), s.now))[0][1], JoinRefused)


def test_a_restart_under_the_same_name_moves_what_the_former_life_had() -> None:
    s = Script("p0", "d0")
    key = decoding(s)
    got = s.join(worker("d0", life=2))
    assert got[1:] == [
        ("p0", Peers((worker("d0", life=2),))),
        ("p0", Abort(key)),
        ("p0", submit(s.key(attempt=1), "d0", prior=(10, 11))),
    ]
    assert s.core.on_worker_message("d0#1", Tokens("d0", "d0#1", (out(key, 2),)), s.now) == []
    assert s.core.num_dropped == 1


def test_a_worker_that_joins_again_in_the_same_life_is_told_to_end_what_it_had() -> None:
    s = Script("b0")
    s.generate()
    assert s.join(worker("b0"))[2:] == [("b0", Abort(s.key())), ("b0", submit(s.key(attempt=1), None))]


def test_messages_that_name_another_worker_than_their_connection_are_dropped() -> None:
    s = Script("p0", "d0")
    key = started(s)
    assert s.send("d0", Tokens("p0", "p0#1", (out(key, 0),))) == []
    assert s.send("d0", AttemptFailed("p0", key, "engine", "it broke")) == []
    assert s.core.num_dropped == 2


def test_status_tells_workers_and_limits() -> None:
    s = Script("p0", "d0")
    s.generate()
    s.lose("d0")
    status = s.core.status("me", s.now)
    assert (status.label, status.num_requests, status.max_model_len) == ("me", 1, 200)
    assert [(w.info.worker_id, w.state) for w in status.workers] == [("p0", "ready"), ("d0", "lost")]
