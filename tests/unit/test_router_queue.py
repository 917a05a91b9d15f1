"""The router's queue: who is next, who must give way, and what is told about how long it takes."""

from __future__ import annotations

import pytest

from baton.protocol import Abort, LoadReport
from baton.sampling_params import SamplingParams
from router.actions import RequestFailed
from router.dispatch import RETRY_AFTER_S
from router.queue import MEMORY_S, MIN_MEASURED_S, RequestQueue
from router.request import ClientRequest, RoutedRequest, State
from tests.fakes_router import Script, config_of, out, worker

ORDER = iter(range(10_000))


def request(priority: int = 0, n: int = 1) -> ClientRequest:
    order = next(ORDER)
    return ClientRequest(b"c", str(order), f"r{order}", (1, 2), SamplingParams(), n=n, priority=priority, order=order)


def queued(queue: RequestQueue, *owners: ClientRequest, now: float = 0.0) -> list[RoutedRequest]:
    samples = [sample for owner in owners for sample in owner.samples]
    for sample in samples:
        queue.add(sample, now)
    return samples


# --- the queue by itself ----------------------------------------------------------------------------


def test_priority_first_then_arrival() -> None:
    queue = RequestQueue()
    late, early, urgent = request(1), request(), request(-1)
    then = request()
    queued(queue, late, then, urgent, early)
    assert list(queue) == [urgent.samples[0], early.samples[0], then.samples[0], late.samples[0]]
    assert queue.first(2) == [urgent.samples[0], early.samples[0]]


def test_samples_of_a_request_stay_together_and_leave_one_by_one() -> None:
    queue = RequestQueue()
    both = request(n=2)
    samples = queued(queue, both, request())
    assert queue.first(2) == samples[:2]
    queue.remove(samples[0], 1.0)
    assert list(queue) == samples[1:]


def test_how_many_are_before_one_that_comes() -> None:
    queue = RequestQueue()
    queued(queue, request(n=3), request(1), request(-1))
    assert queue.num_before(request()) == 4
    assert queue.num_before(request(-1)) == 1
    assert queue.num_before(request(5)) == 5
    assert queue.goes_first(request(-2))
    assert not queue.goes_first(request(-1)), "the earlier one of a priority goes first"


def test_less_important_ones_are_told_the_last_first_and_none_that_has_begun() -> None:
    queue = RequestQueue()
    owners = [request(2), request(1, n=2), request(1), request()]
    queued(queue, *owners)
    assert list(queue.less_important(0)) == [owners[0], owners[2], owners[1]]
    assert list(queue.less_important(1)) == [owners[0]]
    owners[2].samples[0].attempt = 1
    assert list(queue.less_important(0)) == [owners[0], owners[1]]


def test_the_rate_counts_only_time_in_which_somebody_waited() -> None:
    queue = RequestQueue()
    assert queue.leave_rate(0.0) is None
    for round_ in range(3):
        start = 1000.0 * round_  # nobody waits in between
        samples = queued(queue, *(request() for _ in range(10)), now=start)
        for i, sample in enumerate(samples):
            queue.leave(sample, start + 0.2 * (i + 1))
    assert queue.leave_rate(5000.0) == pytest.approx(5.0, rel=0.1)


def test_the_rate_follows_a_change_within_seconds() -> None:
    queue = RequestQueue()
    samples = queued(queue, *(request() for _ in range(400)))
    now = 0.0
    for sample in samples[:100]:
        now += 0.1
        queue.leave(sample, now)
    for sample in samples[100:]:
        now += 0.5
        queue.leave(sample, now)
        if now > 10 + 5 * MEMORY_S:
            break
    assert queue.leave_rate(now) == pytest.approx(2.0, rel=0.1)
    assert queue.wait_s(9, now) == pytest.approx(5.0, rel=0.1), "(9 before it + itself) / 2 per second"


def test_nothing_is_told_of_a_moment() -> None:
    queue = RequestQueue()
    samples = queued(queue, request(), request())
    queue.leave(samples[0], MIN_MEASURED_S / 2)
    assert queue.leave_rate(MIN_MEASURED_S / 2) is None
    assert queue.wait_s(0, MIN_MEASURED_S / 2) is None
    assert queue.leave_rate(MIN_MEASURED_S * 2) is not None


# --- in the router ----------------------------------------------------------------------------------


def full(**router: object) -> Script:
    """A pair of workers with one hand-over allowed, and request `a` on its way."""
    s = Script("p0", "d0", config=config_of(router__max_handoffs=1, **{f"router__{k}": v for k, v in router.items()}))
    assert s.generate("a")[0][0] == "p0"
    return s


def decodes(s: Script, label: str) -> list[object]:
    """What follows when `label` decodes at d0."""
    s.tokens("p0", out(s.key(label), 0))
    s.handed("p0", s.key(label))
    return s.tokens("d0", out(s.key(label), 1))


def placed(actions: list[object]) -> list[str]:
    """Labels of the requests that these actions submit."""
    return [m.key.request_id.partition("-")[2] for _, m in (a for a in actions if len(a) == 2) if hasattr(m, "prompt")]  # type: ignore[arg-type,misc,attr-defined]


def test_who_finds_all_workers_at_their_limit_waits_for_the_first_decode_token() -> None:
    s = full()
    assert s.generate("b") == []
    assert s.core.num_queued == 1
    assert placed(s.tokens("p0", out(s.key("a"), 0))) == [], "not yet: it is on its way to decode"
    assert placed(s.handed("p0", s.key("a"))) == []
    assert placed(s.tokens("d0", out(s.key("a"), 1))) == ["b"]
    assert s.core.num_queued == 0
    assert s.core.view.workers["d0"].handoffs == 1


def test_a_request_that_ends_makes_room_too() -> None:
    s = full()
    s.generate("b"), s.generate("c")
    assert placed(s.cancel("a")) == ["b"]
    assert placed(s.tokens("p0", out(s.key("b"), 0, finish="stop"))) == ["c"]


def test_they_are_placed_by_priority_and_arrival() -> None:
    s = full()
    for label, priority in (("b", 0), ("c", 5), ("d", -1), ("e", 0)):
        assert s.generate(label, priority=priority) == []
    order = []
    label = "a"
    for _ in range(4):
        (label,) = placed(decodes(s, label))
        order.append(label)
    assert order == ["d", "b", "e", "c"]


def test_samples_go_together_as_soon_as_there_is_one_slot() -> None:
    s = full()
    assert s.generate("b", n=3) == []
    assert placed(decodes(s, "a")) == ["b", "b", "b"]
    assert s.core.view.workers["d0"].handoffs == 3
    assert s.generate("c") == []


def test_other_workers_with_room_are_used_and_the_wait_is_for_any_of_them() -> None:
    s = Script("p0", "d0", "d1", config=config_of(router__max_handoffs=1))
    assert placed(s.generate("a")) == ["a"]
    assert placed(s.generate("b")) == ["b"], "d1 has room"
    assert s.generate("c") == []
    request = s.core.request(s.id("b"))
    assert request is not None
    assert request.decode is not None
    s.tokens("p0", out(s.key("b"), 0))
    assert placed(s.tokens(request.decode.worker_id, out(s.key("b"), 1))) == ["c"]


def test_who_fits_only_a_worker_without_room_holds_up_nobody_else() -> None:
    s = Script(config=config_of(router__max_handoffs=1))
    s.join(worker("p0"))
    s.join(worker("d0"))
    s.join(worker("d1", num_blocks=6))
    large = {"prompt": 20, "max_tokens": 20}
    assert placed(s.generate("large", **large)) == ["large"]
    assert s.generate("larger", **large) == []
    assert placed(s.generate("small", prompt=4)) == ["small"], "d1 has room for it"
    assert placed(s.cancel("small")) == [], "but not for the large one"
    assert placed(s.cancel("large")) == ["larger"]


def test_a_cancelled_one_leaves_the_queue() -> None:
    s = full()
    s.generate("b"), s.generate("c")
    assert s.cancel("b") == [("done", "b", "abort")]
    assert placed(decodes(s, "a")) == ["c"]


def test_beyond_the_queues_limit_they_are_refused_and_told_when_to_come_again() -> None:
    s = full(max_queue=1)
    s.generate("b")
    actions = s.core.on_generate(b"c", "c", "c-c", 1, (1,), SamplingParams(max_tokens=5), s.now)
    (refusal,) = actions
    assert isinstance(refusal, RequestFailed)
    assert (refusal.code, refusal.retry_after_s) == ("overloaded", RETRY_AFTER_S), "nothing was measured yet"
    assert "router.max_queue is 1" in refusal.message
    assert (s.core.num_refused, s.core.num_queued) == (1, 1)
    label, following = "a", "b"
    for i in range(20):  # one leaves each two seconds
        s.now += 2.0
        assert placed(decodes(s, label)) == [following]
        label, following = following, f"n{i}"
        assert s.generate(following) == []
    (refusal,) = s.core.on_generate(b"c", "x", "c-x", 1, (1,), SamplingParams(max_tokens=5), s.now)
    assert isinstance(refusal, RequestFailed)
    assert refusal.retry_after_s == pytest.approx(4.0, rel=0.15), "the one that waits and itself, two seconds each"


def test_no_queue_at_all() -> None:
    s = full(max_queue=0)
    assert s.generate("b") == [("failed", "b", "overloaded")]


def test_a_more_important_one_takes_the_place_of_the_least_important() -> None:
    s = full(max_queue=2)
    s.generate("b", priority=1), s.generate("c", priority=2)
    assert s.generate("d", priority=2) == [("failed", "d", "overloaded")], "who waits already goes first"
    assert s.generate("e") == [("failed", "c", "overloaded")]
    assert s.generate("f") == [("failed", "b", "overloaded")]
    assert s.generate("g") == [("failed", "g", "overloaded")]
    assert (s.core.num_displaced, s.core.num_queued) == (2, 2)


def test_the_same_where_the_whole_router_is_full() -> None:
    s = full(max_requests=2)
    s.generate("b", priority=1)
    assert s.generate("c") == [("failed", "b", "overloaded")]
    assert s.generate("d") == [("failed", "d", "overloaded")], "a runs, c is as important"


def test_nobody_is_displaced_for_one_that_cannot_get_in_even_so() -> None:
    s = full(max_queue=2)
    s.generate("b"), s.generate("c", priority=1)
    assert s.generate("d", n=2, priority=-1) == [("failed", "c", "overloaded"), ("failed", "b", "overloaded")]
    s.generate("e", priority=1)
    assert s.generate("f", n=3) == [("failed", "f", "overloaded")]
    assert s.core.num_queued == 2


def test_whose_worker_fails_waits_before_those_that_came_later() -> None:
    s = Script("p0", "d0", "d1", config=config_of(router__max_handoffs=1))
    s.generate("a"), s.generate("b")
    s.generate("c"), s.generate("d")
    a = s.core.request(s.id("a"))
    assert a is not None
    assert a.decode is not None
    assert placed(s.lose(a.decode.worker_id)) == [], "d1 has no room either"
    assert [r.owner.label for r in s.core._life.dispatch.queue] == ["a", "c", "d"]
    assert a.state is State.QUEUED
    assert placed(s.cancel("b")) == ["a"]


def test_if_all_workers_go_those_in_the_queue_wait_for_one_to_come() -> None:
    s = full(worker_wait_s=5.0)
    s.generate("b")
    s.lose("d0")
    assert s.core.num_queued == 0
    assert s.core.num_parked == 2
    assert placed(s.join(worker("d0", life=2))) == ["a"]
    assert s.core.num_queued == 1
    s.lose("d0")
    failed = s.wait(6.0, beating=["p0"])
    assert sorted(failed) == [("failed", "a", "request_failed"), ("failed", "b", "request_failed")]


def test_a_drained_worker_is_not_waited_for() -> None:
    s = full(worker_wait_s=5.0)
    s.generate("b")
    assert s.core.on_drain("d0", False, s.now) == []
    assert (s.core.num_queued, s.core.num_parked) == (0, 1)
    assert placed(decodes(s, "a")) == []
    assert placed(s.done(s.core.on_drain("d0", True, s.now))) == ["b"]


def test_time_that_is_over_ends_a_request_in_the_queue() -> None:
    s = full()
    s.generate("b", timeout_s=3.0)
    (failed,) = [a for a in s.core.on_deadline(s.now + 3.0) if isinstance(a, RequestFailed)]
    assert (
        failed.message
        == "the request took too long: not complete within 3 s (its timeout_s), it was in the router's queue"
    )
    assert (s.core.num_queued, s.core.attempts.num_timeouts) == (0, 1)


def test_time_that_is_over_ends_a_request_at_its_workers() -> None:
    s = full(request_timeout_s=5.0)
    later = s.wait(5.0, beating=["p0", "d0"])
    assert later == [("p0", Abort(s.key("a"))), ("d0", Abort(s.key("a"))), ("failed", "a", "request_failed")]


def test_the_shorter_time_holds() -> None:
    s = full(request_timeout_s=5.0)
    s.cancel("a")
    s.generate("b", timeout_s=60.0), s.generate("c", timeout_s=1.0)
    assert s.wait(1.0, beating=["p0", "d0"]) == [("failed", "c", "request_failed")]
    assert ("failed", "b", "request_failed") in s.wait(4.0, beating=["p0", "d0"])


def test_an_open_request_can_be_explained() -> None:
    s = full()
    s.generate("b")
    s.now += 2.0
    waiting, running = s.core.explain(s.id("b"), s.now), s.core.explain(s.id("a"), s.now)
    assert (waiting.state, waiting.queued_s, waiting.placements, waiting.finish_reason) == ("queued", 2.0, (), "")
    assert (running.state, running.queued_s, len(running.placements)) == ("running", 0.0, 1)
    decodes(s, "a")
    s.now += 5.0
    s.cancel("b")
    ended = s.core.explain(s.id("b"), s.now)
    assert (ended.state, ended.queued_s, len(ended.placements), ended.finish_reason) == ("ended", 2.0, 1, "abort")


# --- the promise of a time to the first token ---------------------------------------------------------


def promised(slo_ttft_ms: float = 500) -> Script:
    s = Script("p0", "d0", config=config_of(router__slo_ttft_ms=slo_ttft_ms, router__max_handoffs=2))
    s.beat("p0", LoadReport(prefill_token_s=0.01))
    return s


def refusal(s: Script, label: str, prompt: int, priority: int = 0) -> RequestFailed | None:
    first = s.core.on_generate(
        b"c", label, s.id(label), 1, tuple(range(prompt)), SamplingParams(max_tokens=5), s.now, priority=priority
    )[:1]
    s.core.check_integrity()
    return first[0] if first and isinstance(first[0], RequestFailed) else None


def test_a_first_token_that_would_be_late_is_refused_at_once() -> None:
    s = promised()
    assert refusal(s, "a", 30) is None
    late = refusal(s, "b", 40)
    assert late is not None
    assert late.code == "overloaded"
    assert "after 700 ms, router.slo_ttft_ms is 500" in late.message
    assert late.retry_after_s == pytest.approx(0.2), "by then so much of what waits is done"
    assert refusal(s, "c", 20) is None, "30 + 20 tokens of 10 ms each"


def test_urgent_ones_pass() -> None:
    s = promised()
    assert refusal(s, "a", 100) is not None
    assert refusal(s, "a", 100, priority=-1) is None


def test_the_queue_counts() -> None:
    s = promised(slo_ttft_ms=2000)
    s.generate("a"), s.generate("b")
    for label in "cde":
        assert refusal(s, label, 10) is None
    s.now += 1.0
    assert placed(decodes(s, "a")) == ["c"]
    s.now += 1.0
    assert placed(decodes(s, "b")) == ["d"]
    late = refusal(s, "f", 10)
    assert late is not None
    assert late.retry_after_s == pytest.approx(0.3, abs=0.15), "2 leave in 2 s, c, d and its own are 30 tokens of 10 ms"
    assert refusal(s, "g", 10, priority=-1) is None
