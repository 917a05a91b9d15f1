"""Role changes in the router: what the loads are, who drains, when a launcher may act, and what people are shown."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.config import ClusterConfig
from baton.errors import InvalidRequestError
from baton.protocol import LoadReport, Submit
from baton_cli.output import status_data
from router.metrics import text_of
from router.overview import make_overview, pool_states
from router.phase_load import Loads, Smoothed
from router.roles import RoleOrder, Roles
from tests.fakes_router import Script, config_of, out, worker
from tests.observed import Observed

IDS = ("p0", "p1", "d0", "d1")
TOKEN_S = 0.01


def config(**dotted: Any) -> ClusterConfig:
    """The present counts alone, seen every second."""
    sharp: dict[str, Any] = {"enabled": True, "interval_s": 1.0, "smoothing_s": 1e-3, "dwell_s": 0.0, "cooldown_s": 0.0}
    planner = {**sharp, **dotted.pop("planner", {})}
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
    return config_of(**{f"planner__{key}": value for key, value in planner.items()}, **dotted, **_pools(pools))


def _pools(pools: dict[str, Any]) -> dict[str, Any]:
    return {f"pools__{name}": pool for name, pool in pools.items()}


def script(**dotted: Any) -> Observed:
    s = Observed(*IDS, config=config(**dotted))
    for worker_id in ("p0", "p1"):
        s.beat(worker_id, LoadReport(blocks_free=64, blocks_total=64, prefill_token_s=TOKEN_S))
    s.wait(1.0, IDS)  # from here on what comes is counted
    return s


def roles(s: Script) -> Roles:
    assert s.core.roles is not None
    return s.core.roles


def look(s: Script) -> Loads:
    """One second goes by."""
    s.wait(1.0, IDS)
    loads = roles(s).loads
    assert loads is not None
    return loads


# --- loads ----------------------------------------------------------------------------------------------


def test_what_is_smoothed_follows_within_its_time() -> None:
    smoothed = Smoothed()
    assert smoothed.value is None
    assert [smoothed.add(10.0, 0.5), smoothed.add(20.0, 0.5), smoothed.add(20.0, 0.5)] == [10.0, 15.0, 17.5]


def test_prefill_is_what_comes_and_what_waits() -> None:
    s = script()
    assert look(s).prefill.work == 0
    for label in "abc":
        s.generate(label, prompt=100)
    loads = look(s)
    # 300 tokens came within the second, and 300 wait, to be computed within planner.horizon_s.
    assert loads.prefill.work == pytest.approx((300 + 300 / 10) * TOKEN_S)
    assert loads.prefill.share == loads.prefill.work / 2
    assert loads.decode.work == 0
    assert look(s).prefill.work == pytest.approx(300 / 10 * TOKEN_S)  # they still wait
    assert "30" in str(roles(s).loads)


def test_what_prefill_finds_in_its_cache_is_not_work() -> None:
    s = script()
    load = LoadReport(blocks_free=64, blocks_total=64, prefill_token_s=TOKEN_S)
    for label in "ab":
        s.generate(label, prompt=100)
        key = s.key(label)
        prefill = s.core.request(key.request_id).prefill.worker_id  # type: ignore[union-attr]
        s.tokens(prefill, out(key, 0))
    s.beat("p0", LoadReport(**{**_fields(load), "cache_queried_tokens": 200, "cache_hit_tokens": 150}))
    assert look(s).prefill.work == pytest.approx(200 * 0.25 * TOKEN_S)


def _fields(load: LoadReport) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__struct_fields__}


def decoding(s: Script, num: int) -> None:
    """So many requests get their first tokens."""
    for number in range(num):
        label = f"r{number}"
        s.generate(label, prompt=8, max_tokens=100)
        prefill = s.core.request(s.id(label)).prefill.worker_id  # type: ignore[union-attr]
        s.tokens(prefill, out(s.key(label), 0))


def test_decode_is_the_places_that_it_takes() -> None:
    s = script()
    decoding(s, 6)
    loads = look(s)
    assert loads.decode.work == pytest.approx(6 / 8)  # 8 run at once
    assert loads.decode.words == "6.0 requests, limited by places in a batch"


def test_decode_is_the_blocks_that_it_takes() -> None:
    s = script()
    decoding(s, 2)
    for worker_id in ("d0", "d1"):
        s.beat(worker_id, LoadReport(blocks_free=16, blocks_total=64, num_running=1))
    loads = look(s)
    assert loads.decode.work == pytest.approx(2 * 0.75)
    assert "limited by KV blocks" in loads.decode.words


def test_decode_is_the_time_between_tokens() -> None:
    s = script(router__slo_tbt_ms=20.0)
    decoding(s, 4)
    for worker_id in ("d0", "d1"):
        load = LoadReport(blocks_free=60, blocks_total=64, num_running=2, decode_step_s=0.012, decode_slope_s=0.002)
        s.beat(worker_id, load)
    loads = look(s)
    assert loads.decode.work == pytest.approx(4 / 6)  # 10 ms for the first, 2 ms for each of five more
    assert "limited by the time between tokens" in loads.decode.words


def test_requests_without_blocks_are_the_work_of_whoever_holds_them_up() -> None:
    s = script()
    for label in "abcd":
        s.generate(label, prompt=50, max_tokens=100)
    # Two of them wait for blocks at decode, whose pool is reserved for the two that prefill has not come to.
    waiting = {"num_waiting": 2, "num_pending_tokens": 100, "num_uncredited": 1, "num_uncredited_tokens": 50}
    for worker_id in ("p0", "p1"):
        s.beat(worker_id, LoadReport(blocks_free=64, blocks_total=64, prefill_token_s=TOKEN_S, **waiting))
    for worker_id in ("d0", "d1"):
        s.beat(worker_id, LoadReport(blocks_free=0, blocks_total=64))
    look(s)
    loads = look(s)
    assert loads.prefill.work == pytest.approx(200 / 10 * TOKEN_S)
    assert loads.decode.work == 0
    # Those two get their first tokens, so it is decode that all others wait for.
    for label in "ab":
        prefill = s.core.request(s.id(label)).prefill.worker_id  # type: ignore[union-attr]
        s.tokens(prefill, out(s.key(label), 0))
    for worker_id in ("p0", "p1"):
        waiting |= {"num_waiting": 1, "num_pending_tokens": 50}
        s.beat(worker_id, LoadReport(blocks_free=64, blocks_total=64, prefill_token_s=TOKEN_S, **waiting))
    loads = look(s)
    assert loads.prefill.work == 0
    assert loads.decode.work == pytest.approx(2 * 2)  # twice what it has
    assert "4.0 requests" in loads.decode.words


def test_nothing_is_told_before_prefill_has_measured_anything() -> None:
    s = Observed(*IDS, config=config())
    s.generate(prompt=100)
    s.wait(3.0, IDS)
    assert roles(s).loads is None
    assert roles(s).words() == "nothing measured yet"


# --- a change -------------------------------------------------------------------------------------------


def overload(s: Script) -> None:
    """Many prompts come, whose clients leave; the planner sees it and begins a change."""
    for number in range(3):
        s.generate(f"gone{number}", prompt=180, max_tokens=2)
        s.cancel(f"gone{number}")
    s.wait(1.0, IDS)
    assert roles(s).planner.change is not None


def at_both(s: Script) -> dict[str, str]:
    """A request decodes at d0, another at d1: the label of each."""
    labels = {}
    for label in ("first", "second"):
        s.generate(label, prompt=4, max_tokens=100)
        request = s.core.request(s.id(label))
        assert request is not None
        assert request.prefill is not None
        assert request.decode is not None
        s.tokens(request.prefill.worker_id, out(s.key(label), 0))
        s.handed(request.prefill.worker_id, s.key(label))
        labels[request.decode.worker_id] = label
    assert set(labels) == {"d0", "d1"}
    return labels


def test_a_worker_finishes_what_it_has_before_its_launcher_may_replace_it() -> None:
    s = script()
    labels = at_both(s)
    overload(s)
    change = roles(s).planner.change
    assert change is not None
    assert (change.worker_id, change.to_role, change.state) == ("d0", "prefill", "draining")
    assert s.core.view.draining == {"d0"}
    assert roles(s).words() == "changes d0 from decode to prefill (draining)"
    ((_, submit),) = s.generate("next", max_tokens=3)
    assert isinstance(submit, Submit)
    assert submit.decode == "d1"
    s.wait(5.0, IDS)
    assert roles(s).order() is None, "it still has a request"
    s.tokens("d0", out(s.key(labels["d0"]), 1, finish="stop"))
    s.wait(1.0, IDS)
    assert roles(s).order() == RoleOrder("d0", "d0#1", "prefill", change.reason)
    s.lose("d0")
    assert roles(s).order() is not None
    s.join(worker("d0", role="prefill", life=2, pool="prefill"))
    assert (roles(s).order(), s.core.view.draining, change.state) == (None, set(), "done")
    assert [w.worker_id for w in s.core.view.placeable() if w.can_prefill] == ["p0", "p1", "d0"]
    # The other one's request goes on.
    s.tokens("d1", out(s.key(labels["d1"]), 1, finish="stop"))


def test_requests_that_wait_get_the_worker_in_its_new_role() -> None:
    s = Observed(*IDS, config=config(router__max_handoffs=1))
    for worker_id in ("p0", "p1"):
        s.beat(worker_id, LoadReport(blocks_free=64, blocks_total=64, prefill_token_s=1e-6))
    s.wait(1.0, IDS)
    for label in "abc":
        s.generate(label, prompt=8, max_tokens=50)
    assert s.core.num_queued == 1
    for label in "ab":  # decode is what they wait for
        prefill = s.core.request(s.id(label)).prefill.worker_id  # type: ignore[union-attr]
        s.tokens(prefill, out(s.key(label), 0))
    for worker_id in ("d0", "d1"):
        s.beat(worker_id, LoadReport(blocks_free=0, blocks_total=64, num_running=1))
    s.wait(1.0, IDS)
    change = roles(s).planner.change
    assert change is not None
    assert (change.worker_id, change.to_role, change.state) == ("p0", "decode", "drained")
    s.lose("p0")
    said = s.join(worker("p0", role="decode", life=2, pool="decode"))
    ((_, submit),) = [(who, what) for who, what in said if isinstance(what, Submit)]
    assert (submit.key.request_id, submit.decode) == (s.id("c"), "p0")
    assert s.core.num_queued == 0


@pytest.mark.parametrize("undo", [False, True])
def test_an_operators_word_counts_more(undo: bool) -> None:
    s = script()
    at_both(s)
    overload(s)
    change = roles(s).planner.change
    assert change is not None
    s.done(s.core.on_drain("d0", undo, s.now))
    assert (change.state, change.outcome) == ("abandoned", "an operator decided about this worker")
    s.wait(5.0, IDS)
    assert s.core.view.draining == (set() if undo else {"d0"})
    assert roles(s).order() is None


def test_a_drain_of_another_worker_changes_nothing() -> None:
    s = script()
    at_both(s)
    overload(s)
    s.done(s.core.on_drain("p1", False, s.now))
    with pytest.raises(InvalidRequestError):
        s.core.on_drain("nobody", False, s.now)
    assert roles(s).planner.change is not None


def test_a_change_that_takes_too_long_gives_the_worker_back() -> None:
    s = script(planner={"give_up_s": 10.0, "cooldown_s": 100.0})
    at_both(s)
    overload(s)
    s.wait(9.0, IDS)
    assert s.core.view.draining == {"d0"}
    s.wait(1.5, IDS)
    assert s.core.view.draining == set()
    assert roles(s).planner.num_abandoned == 1


def test_a_worker_that_dies_meanwhile_and_comes_back_as_it_was_is_still_to_change() -> None:
    s = script()
    at_both(s)
    overload(s)
    s.lose("d0")
    s.wait(2.0, ("p0", "p1", "d1"))
    assert roles(s).order() is None, "whoever starts it again does that as before"
    s.join(worker("d0", life=2))
    assert s.core.view.draining == {"d0"}
    s.wait(1.0, IDS)
    order = roles(s).order()
    assert order is not None
    assert (order.incarnation, order.pool) == ("d0#2", "prefill")


# --- what people are shown ------------------------------------------------------------------------------


def families(s: Observed) -> dict[str, dict[tuple[str, ...], float]]:
    text = "".join(part for family in s.metrics.collect() for part in text_of(family))
    return {
        family.name.removeprefix("baton:"): {
            tuple(v for k, v in sample.labels.items() if k != "model_name"): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_overview_status_and_metrics_tell_of_it() -> None:
    s = script()
    at_both(s)
    before = families(s)
    assert before["role_changes"] == {("prefill",): 0, ("decode",): 0}
    overload(s)
    data = make_overview(s.config, s.core, s.latencies, s.now)["planner"]
    assert data["refusal"] is None
    (change,) = data["changes"]
    assert (change["worker_id"], change["from"], change["to"], change["state"]) == (
        "d0",
        "decode",
        "prefill",
        "draining",
    )
    assert change["reason"].startswith("prefill is full")
    assert (change["outcome"], change["took_s"]) == ("", None)
    status = s.core.status("x", s.now)
    assert status.planner == "changes d0 from decode to prefill (draining)"
    assert status_data(status, "tcp://somewhere")["planner"] == status.planner
    s.lose("d0")
    s.join(worker("d0", role="prefill", life=2, pool="prefill"))
    after = families(s)
    assert after["role_changes"] == {("prefill",): 1, ("decode",): 0}
    assert after["role_changes_abandoned"] == {(): 0}
    assert set(after["phase_load"]) == {("prefill",), ("decode",)}
    (change,) = make_overview(s.config, s.core, s.latencies, s.now)["planner"]["changes"]
    assert change["state"] == "done"
    assert change["took_s"] is not None


def test_refusals_are_told_in_words_and_counted() -> None:
    s = script(planner={"min_decode": 2})
    for number in range(3):
        s.generate(f"gone{number}", prompt=180, max_tokens=2)
        s.cancel(f"gone{number}")
    s.wait(1.0, IDS)
    words = "decode keeps at least 2 of its 2 workers (planner.min_decode)"
    assert make_overview(s.config, s.core, s.latencies, s.now)["planner"]["refusal"] == words
    assert s.core.status("x", s.now).planner.endswith(f"; no change: {words}")
    assert families(s)["role_changes_refused"] == {("minimum",): 1}
    assert roles(s).planner.take_news() == [f"prefill is full, and no worker changes: {words}"]


def test_without_a_planner_nothing_is_told_but_a_zero() -> None:
    s = Observed(*IDS)
    s.wait(3.0, IDS)
    assert s.core.roles is None
    assert make_overview(s.config, s.core, s.latencies, s.now)["planner"] is None
    assert s.core.status("x", s.now).planner == ""
    found = families(s)
    assert found["role_changes"] == {("prefill",): 0, ("decode",): 0}
    assert "phase_load" not in found


def test_a_pool_is_whole_with_a_worker_less_where_one_has_changed() -> None:
    s = Observed(config=config())
    for worker_id in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        s.join(worker(worker_id, role=worker_id.partition("-")[0], pool=worker_id.partition("-")[0]))
    sizes = lambda: {
        pool["name"]: (pool["ready"], pool["workers"], pool["state"])
        for pool in pool_states(s.config, s.core.worker_statuses(s.now))
    }
    assert sizes() == {"prefill": (2, 2, "ok"), "decode": (2, 2, "ok")}
    s.lose("decode-1")
    assert sizes() == {"prefill": (2, 2, "ok"), "decode": (1, 2, "degraded")}
    s.join(worker("decode-1", role="prefill", life=2, pool="prefill"))
    assert sizes() == {"prefill": (3, 3, "ok"), "decode": (1, 1, "ok")}
    s.lose("decode-1")
    assert sizes() == {"prefill": (2, 3, "degraded"), "decode": (1, 1, "ok")}
