"""RolePlanner: when a worker changes its role, what keeps it from that, and what no load whatever brings it to do."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import PlannerConfig
from router.phase_load import Loads, PhaseLoad
from router.role_planner import MINUTE_S, Phase, PlannedWorker, RoleChange, RolePlanner

CALM = {"dwell_s": 0.0, "cooldown_s": 0.0, "max_changes_per_minute": 100}
"""Nothing but the loads counts."""


def loads(prefill: float, decode: float, workers: tuple[int, int] = (2, 2)) -> Loads:
    """Shares of so many workers each."""
    return Loads(PhaseLoad(prefill * workers[0], workers[0]), PhaseLoad(decode * workers[1], workers[1]))


def worker(worker_id: str, **other: Any) -> PlannedWorker:
    role = "prefill" if worker_id[0] == "p" else "decode"
    fields = {"worker_id": worker_id, "incarnation": f"{worker_id}#1", "role": role, "state": "ready"}
    return PlannedWorker(**{**fields, **other})


WORKERS = [worker(worker_id) for worker_id in ("p0", "p1", "d0", "d1")]


def planner(**config: Any) -> RolePlanner:
    return RolePlanner(PlannerConfig(enabled=True, **{**CALM, **config}))


def changed(change: RoleChange | None) -> tuple[str, Phase] | None:
    return None if change is None else (change.worker_id, change.to_role)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (0.9, 0.3, ("d0", "prefill")),
        (0.3, 0.9, ("p0", "decode")),
        (3.0, 0.0, ("d0", "prefill")),
        (0.85, 0.38, ("d0", "prefill")),
        (0.84, 0.1, None),
        (0.1, 0.84, None),
        (0.0, 0.0, None),
    ],
)
def test_the_full_phase_gets_a_worker_of_the_other(
    prefill: float, decode: float, expected: tuple[str, Phase] | None
) -> None:
    made = planner()
    assert changed(made.observe(0.0, loads(prefill, decode), WORKERS)) == expected
    assert made.refusal is None
    assert len(made.history) == (expected is not None)


def test_a_reason_in_words_for_a_change() -> None:
    made = planner()
    change = made.observe(5.0, loads(0.9, 0.2), WORKERS)
    assert change is not None
    assert (change.began_at, change.state, change.incarnation) == (5.0, "draining", "d0#1")
    assert change.reason.startswith("prefill is full: prefill 0.90 on 2")
    assert made.take_news() == [f"changes d0 from decode to prefill: {change.reason}"]
    assert made.take_news() == []


@pytest.mark.parametrize(
    ("given_", "workers", "config", "objection", "words"),
    [
        (loads(1.2, 0.9), WORKERS, {}, "no_spare", "both phases are full: more workers would help"),
        (loads(0.9, 0.6), WORKERS, {}, "no_spare", "decode has none to spare: its load is above planner.low, 0.5"),
        (loads(0.6, 0.9), WORKERS, {}, "no_spare", "prefill has none to spare"),
        (loads(0.9, 0.1, (3, 1)), WORKERS, {}, "minimum", "decode keeps at least 1 of its 1 workers"),
        (loads(0.9, 0.1), WORKERS, {"min_decode": 2}, "minimum", r"at least 2 of its 2 workers \(planner.min_decode\)"),
        (loads(0.1, 0.9), WORKERS, {"min_prefill": 2}, "minimum", r"at least 2 of its 2 workers \(planner.min_prefill"),
        # Without it decode would be as full as prefill is now, and get the worker back.
        (loads(0.9, 0.45), WORKERS, {}, "no_gain", "prefill would have 0.60, decode 0.90"),
        # What prefill has not done until now comes to decode then: half as much again.
        (loads(2.0, 0.35), WORKERS, {}, "no_gain", "prefill would have 1.33, decode 1.05"),
        (loads(0.9, 0.1), [*WORKERS, worker("d2", state="lost", seen_at=-5.0)], {"dwell_s": 9.0}, "lost", "d2 is lost"),
        (loads(0.9, 0.1), WORKERS, {"dwell_s": 9.0}, "dwell", "all decode workers have had their role for less than 9"),
    ],
)
def test_what_speaks_against_a_change(
    given_: Loads, workers: list[PlannedWorker], config: dict[str, Any], objection: str, words: str
) -> None:
    made = planner(**config)
    for _ in range(3):
        assert made.observe(0.0, given_, workers) is None
        assert made.refusal is not None
        assert made.refusal.objection == objection
    assert made.num_refused == {objection: 3}
    (news,) = made.take_news()  # said once
    assert news.split(" and no worker changes: ")[1] == made.refusal.words
    assert re.search(words, made.refusal.words)


def test_a_refusal_is_over_with_its_cause() -> None:
    made = planner()
    made.observe(0.0, loads(0.9, 0.6), WORKERS)
    assert made.observe(1.0, loads(0.8, 0.6), WORKERS) is None
    assert made.refusal is None


def test_nothing_is_changed_while_nothing_is_known() -> None:
    made = planner()
    assert made.observe(0.0, None, WORKERS) is None
    assert made.refusal is None


def test_the_load_between_the_thresholds_moves_nobody_back() -> None:
    """Hysteresis: what made a worker change must turn round altogether before it changes back."""
    made = planner()
    roles: dict[str, Phase] = {w.worker_id: w.role for w in WORKERS}
    changes = 0
    for look in range(200):
        work = 1.75 if look % 2 else 1.65  # around the threshold of two workers, 1.7
        workers = [worker(w, role=role) for w, role in roles.items()]
        sizes = tuple(sum(role == phase for role in roles.values()) for phase in ("prefill", "decode"))
        given_ = Loads(PhaseLoad(work, sizes[0]), PhaseLoad(0.6, sizes[1]))
        change = made.observe(float(look), given_, workers)
        if change is not None:
            changes += 1
            roles[change.worker_id] = change.to_role
            made.done(look + 0.5)
    assert changes == 1
    assert sorted(roles.values()) == ["decode", "prefill", "prefill", "prefill"]


def test_one_change_at_a_time_then_a_cooldown() -> None:
    made = planner(cooldown_s=30.0)
    change = made.observe(0.0, loads(0.9, 0.1), WORKERS)
    assert change is not None
    assert made.observe(1.0, loads(0.9, 0.1), WORKERS) is None
    assert made.refusal is None
    made.drained()
    assert change.state == "drained"
    made.done(10.0)
    assert (change.state, change.ended_at, made.change, made.num_changes["prefill"]) == ("done", 10.0, None, 1)
    assert made.observe(39.9, loads(0.1, 0.9, (3, 1)), WORKERS) is None
    assert made.refusal is not None
    assert made.refusal.objection == "cooldown"
    assert made.observe(40.0, loads(0.1, 0.9, (3, 1)), WORKERS) is not None


def test_a_worker_stays_in_its_role_for_a_while() -> None:
    made = planner(dwell_s=100.0)
    made.observe(0.0, loads(0.5, 0.5), WORKERS)
    assert made.observe(99.0, loads(0.9, 0.1), WORKERS) is None
    change = made.observe(100.0, loads(0.9, 0.1), WORKERS)
    assert changed(change) == ("d0", "prefill")
    made.done(110.0)
    now = [*WORKERS[:2], worker("d0", role="prefill"), WORKERS[3]]
    # Of those that prefill has now, the one that just came is the only one that may not go.
    for at, expected in ((120.0, "p0"), (130.0, "p1")):
        change = made.observe(at, loads(0.1, 0.9, (3, 2)), now)
        assert changed(change) == (expected, "decode")
        made.done(at)
        now = [worker(w.worker_id, role="decode" if w.worker_id == expected else w.role) for w in now]
    assert made.observe(140.0, loads(0.1, 0.9, (3, 2)), now) is None
    assert made.refusal is not None
    assert made.refusal.objection == "dwell"


def test_no_more_changes_a_minute_than_allowed() -> None:
    made = planner(max_changes_per_minute=2)
    begun = []
    for second in range(200):
        if made.observe(float(second), loads(0.9, 0.1), WORKERS) is not None:
            begun.append(second)
            made.done(second + 0.5)
    assert begun == [0, 1, 60, 61, 120, 121, 180, 181]
    assert set(made.num_refused) == {"cap"}


def test_the_one_with_the_least_to_finish_goes_and_none_that_is_drained_or_lost() -> None:
    workers = [
        *WORKERS[:2],
        worker("d0", num_outstanding=5),
        worker("d1", num_outstanding=3),
        worker("d2", num_outstanding=3),
        worker("d3", state="draining"),
        worker("d4", state="lost"),
    ]
    assert changed(planner().observe(0.0, loads(0.9, 0.1, (2, 3)), workers)) == ("d1", "prefill")


def test_a_change_that_takes_too_long_is_given_up() -> None:
    made = planner(give_up_s=60.0, cooldown_s=10.0)
    change = made.observe(0.0, loads(0.9, 0.1), WORKERS)
    assert change is not None
    assert made.observe(59.0, loads(0.9, 0.1), WORKERS) is None
    assert made.change is change
    assert made.observe(60.0, loads(0.9, 0.1), WORKERS) is None
    assert (made.change, change.state, made.num_abandoned) == (None, "abandoned", 1)
    assert change.outcome == "it took longer than planner.give_up_s, 60 s"
    assert made.num_changes.total() == 0
    assert changed(made.observe(70.0, loads(0.9, 0.1), WORKERS)) == ("d0", "prefill")


def test_without_a_single_prefill_worker_one_comes() -> None:
    workers = [worker("d0"), worker("d1")]
    assert changed(planner().observe(0.0, loads(0.0, 0.1, (0, 2)), workers)) is None  # nobody wants any
    given_ = Loads(PhaseLoad(0.2, 0), PhaseLoad(0.2, 2))
    assert changed(planner().observe(0.0, given_, workers)) == ("d0", "prefill")


# --- whatever comes -----------------------------------------------------------------------------------

WORK = st.floats(0, 8, allow_subnormal=False)
LOOK = st.tuples(
    st.floats(0.1, 8) | st.floats(8, 60),
    st.sampled_from([(8.0, 0.0), (0.0, 8.0), (8.0, 0.1), (0.1, 8.0)]) | st.tuples(WORK, WORK),
    st.sampled_from(["ends", "ends", "ends", "goes on", "dies", "is drained"]),
)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.lists(LOOK, max_size=60),
    st.integers(1, 3),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from([0.0, 5.0, 50.0]),
    st.sampled_from([0.0, 20.0]),
)
def test_whatever_the_load_changes_are_few_and_the_minimum_stays(
    sizes: tuple[int, int],
    looks: list[tuple[float, tuple[float, float], str]],
    cap: int,
    least: tuple[int, int],
    dwell_s: float,
    cooldown_s: float,
) -> None:
    made = planner(
        max_changes_per_minute=cap,
        min_prefill=least[0],
        min_decode=least[1],
        dwell_s=dwell_s,
        cooldown_s=cooldown_s,
        give_up_s=100.0,
    )
    roles: dict[str, Phase] = {f"p{i}": "prefill" for i in range(sizes[0])}
    roles |= {f"d{i}": "decode" for i in range(sizes[1])}
    states: dict[str, Literal["ready", "draining", "lost"]] = dict.fromkeys(roles, "ready")
    since = dict.fromkeys(roles, 0.0)
    begun: list[float] = []
    now, ended_at = 0.0, -1e9
    for elapsed, (prefill, decode), event in looks:
        now += elapsed
        under_way = made.change
        if under_way is not None and event == "ends":
            roles[under_way.worker_id], since[under_way.worker_id], ended_at = under_way.to_role, now, now
            states[under_way.worker_id] = "ready"
            made.done(now)
        elif event in ("dies", "is drained"):
            victim = sorted(roles)[len(begun) % len(roles)]
            if under_way is None or under_way.worker_id != victim:
                states[victim] = "lost" if event == "dies" else "draining"
        workers = [worker(w, role=roles[w], state=states[w], seen_at=now) for w in roles]
        ready = {p: [w for w in roles if roles[w] == p and states[w] == "ready"] for p in ("prefill", "decode")}
        given_ = Loads(PhaseLoad(prefill, len(ready["prefill"])), PhaseLoad(decode, len(ready["decode"])))
        before = made.change
        change = made.observe(now, given_, workers)
        if before is not None and made.change is None:
            ended_at = now
            states[before.worker_id] = "ready"
        if change is None:
            continue
        begun.append(now)
        giver = ready[change.from_role]
        assert change.worker_id in giver, "neither drained, lost, nor of the other role"
        assert len(giver) > least[change.from_role == "decode"]
        assert now >= since[change.worker_id] + dwell_s
        assert now >= ended_at + cooldown_s
        assert before is None
        states[change.worker_id] = "draining"
    for first, last in zip(begun, begun[cap:], strict=False):
        assert last >= first + MINUTE_S
    for one, other in pairwise(made.history):
        assert one.ended_at is not None
        assert one.ended_at + cooldown_s <= other.began_at


@given(st.lists(st.tuples(WORK, WORK), max_size=30))
def test_the_same_loads_give_the_same_changes(work: list[tuple[float, float]]) -> None:
    def run() -> list[Any]:
        made = planner(dwell_s=3.0, cooldown_s=2.0)
        for second, (prefill, decode) in enumerate(work):
            given_ = Loads(PhaseLoad(prefill, 2), PhaseLoad(decode, 2))
            if made.observe(float(second), given_, WORKERS) is not None:
                made.done(second + 0.5)
        return [*map(msgspec.structs.asdict, made.history), made.refusal, made.num_refused, made.take_news()]

    assert run() == run()
