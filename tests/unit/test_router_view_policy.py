"""The router's view of its workers, and where it places requests."""

from __future__ import annotations

import msgspec
import pytest

from baton.errors import OverloadedError
from baton.protocol import LoadReport, WorkerInfo
from router.policy import Demand, Placement, PlacementPolicy
from router.view import ClusterView
from tests.fakes_router import LAYOUT, config_of, worker

SMALL = Demand(context=6, total=12)


def view_of(*workers: str | WorkerInfo) -> ClusterView:
    view = ClusterView()
    for w in workers:
        view.join(worker(w) if isinstance(w, str) else w, 0.0)
    return view


def put(view: ClusterView, placement: Placement, demand: Demand = SMALL) -> tuple[str, str]:
    """Charge the placement as the core would."""
    view.stamp()
    view.charge_prefill(view.workers[placement.prefill], demand.context)
    view.charge_decode(view.workers[placement.decode], demand.total)
    return placement.prefill, placement.decode


def policy(prefill: str = "least_loaded", decode: str = "least_loaded") -> PlacementPolicy:
    return PlacementPolicy(config_of(router__prefill_policy=prefill, router__decode_policy=decode))


def spread(which: PlacementPolicy, view: ClusterView, num: int) -> list[tuple[str, str]]:
    return [put(view, which.place(SMALL, view, 0.0)) for _ in range(num)]


# --- the view -------------------------------------------------------------------------------------


def test_a_new_life_replaces_the_former_one_and_starts_uncharged() -> None:
    view = view_of("p0")
    view.charge_prefill(view.workers["p0"], 10)
    former = view.workers["p0"]
    view.join(worker("p0", life=2), 3.0)
    assert view.find("p0#1") is None
    assert view.find("p0#2") is view.workers["p0"] is not former
    assert view.workers["p0"].prefill_tokens == 0
    assert not former.ready


def test_peers_are_the_live_workers_that_can_decode() -> None:
    view = view_of("p0", "d0", "d1", "b0")
    view.workers["d1"].state = "lost"
    assert [w.worker_id for w in view.peers()] == ["d0", "b0"]


def test_status_lists_lost_workers_with_their_silence() -> None:
    view = view_of("p0", "d0")
    view.workers["d0"].state = "lost"
    assert [(s.info.worker_id, s.state, s.seen_s_ago) for s in view.statuses(4.0)] == [
        ("p0", "ready", 4.0),
        ("d0", "lost", 4.0),
    ]


# --- which pairs are candidates -------------------------------------------------------------------


def test_split_where_both_kinds_exist_and_colocated_where_only_both_do() -> None:
    assert policy().place(SMALL, view_of("p0", "d0"), 0.0).colocated is False
    placement = policy().place(SMALL, view_of("b0"), 0.0)
    assert (placement.prefill, placement.decode, placement.colocated) == ("b0", "b0", True)


def test_mixed_pools_go_by_score() -> None:
    view = view_of("p0", "d0", "b0")
    assert put(view, policy().place(SMALL, view, 0.0)) == ("p0", "d0")
    assert put(view, policy().place(SMALL, view, 0.0)) == ("b0", "b0")


@pytest.mark.parametrize(("present", "expected"), [(("p0", "b0"), {"p0", "b0"}), (("d0", "b0"), {"d0", "b0"})])
def test_both_workers_stand_in_for_a_missing_kind(present: tuple[str, ...], expected: set[str]) -> None:
    view = view_of(*present)
    used = {w for pair in spread(policy(), view, 6) for w in pair}
    assert used == expected


def test_lost_workers_are_no_candidates_and_the_error_names_them() -> None:
    view = view_of("p0", "d0")
    view.workers["d0"].state = "lost"
    with pytest.raises(OverloadedError, match=r"no live decode worker \(lost: d0\)"):
        policy().place(SMALL, view, 0.0)


def test_the_error_before_anyone_joined_says_so() -> None:
    with pytest.raises(OverloadedError, match="no worker has joined"):
        policy().place(SMALL, view_of(), 0.0)


def test_too_small_a_pool_is_no_candidate() -> None:
    view = view_of("p0", worker("d0", num_blocks=2), worker("d1", num_blocks=50))
    assert policy().place(Demand(6, 12), view, 0.0).decode == "d1"
    view.workers["d1"].state = "lost"
    with pytest.raises(OverloadedError, match="can hold the 12 tokens"):
        policy().place(Demand(6, 12), view, 0.0)


def test_prefill_needs_room_for_the_prompt_only() -> None:
    view = view_of(worker("p0", num_blocks=2), "d0")
    assert policy().place(Demand(8, 60), view, 0.0).prefill == "p0"
    with pytest.raises(OverloadedError):
        policy().place(Demand(9, 60), view, 0.0)


def test_a_worker_with_a_shorter_model_is_no_candidate() -> None:
    view = view_of("p0", worker("d0", max_model_len=10), "d1")
    assert policy().place(SMALL, view, 0.0).decode == "d1"


def test_avoided_workers_are_not_chosen() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    assert put(view, policy().place(SMALL, view, 0.0, avoid={"p0", "d1"})) == ("p1", "d0")


# --- policies -------------------------------------------------------------------------------------


def test_round_robin_takes_turns_apart_for_prefill_and_decode() -> None:
    view = view_of("p0", "p1", "p2", "d0", "d1")
    got = spread(policy("round_robin", "round_robin"), view, 6)
    assert [p for p, _ in got] == ["p0", "p1", "p2"] * 2
    assert [d for _, d in got] == ["d0", "d1"] * 3


def test_round_robin_over_both_workers() -> None:
    view = view_of("b0", "b1", "b2")
    assert [p for p, _ in spread(policy("round_robin", "round_robin"), view, 4)] == ["b0", "b1", "b2", "b0"]


def test_policies_are_chosen_apart() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    view.charge_decode(view.workers["d0"], 200)
    got = spread(policy("round_robin", "least_loaded"), view, 4)
    assert [p for p, _ in got] == ["p0", "p1", "p0", "p1"]
    assert [d for _, d in got] == ["d1", "d1", "d1", "d1"]


def test_least_loaded_counts_what_was_placed_since_the_last_report() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    assert spread(policy(), view, 4) == [("p0", "d0"), ("p1", "d1")] * 2


def test_least_loaded_prefill_goes_by_tokens_not_by_requests() -> None:
    view = view_of("p0", "p1", "d0")
    put(view, policy().place(Demand(100, 110), view, 0.0), Demand(100, 110))
    assert [p for p, _ in spread(policy(), view, 3)] == ["p1", "p1", "p1"]


def test_least_loaded_believes_a_report_of_more_than_it_placed() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    view.workers["p0"].load = LoadReport(num_pending_tokens=500, blocks_free=64, blocks_total=64)
    view.workers["d0"].load = LoadReport(num_running=2, blocks_free=10, blocks_total=64)
    assert spread(policy(), view, 2) == [("p1", "d1"), ("p1", "d1")]


def test_equal_loads_go_to_who_waited_longest() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    for expected in (("p0", "d0"), ("p1", "d1"), ("p0", "d0")):
        placement = policy().place(SMALL, view, 0.0)
        assert put(view, placement) == expected
        view.release_prefill(view.workers[placement.prefill], SMALL.context)
        view.release_decode(view.workers[placement.decode], SMALL.total)


@pytest.mark.parametrize("name", ["least_loaded", "round_robin"])
def test_a_worker_that_missed_heartbeats_is_the_last_choice(name: str) -> None:
    view = view_of("p0", "p1", "d0")
    view.workers["p1"].seen = view.workers["d0"].seen = 10.0
    which = policy(name, name)
    assert which.place(SMALL, view, 10.0).prefill == "p1"
    view.workers["p1"].state = "lost"
    assert which.place(SMALL, view, 10.0).prefill == "p0"


def test_scores_of_all_candidates_are_kept() -> None:
    view = view_of("p0", "p1", "d0", "b0")
    placement = policy().place(SMALL, view, 0.0)
    assert sorted((s.worker_id, s.part) for s in placement.scores) == [
        ("b0", "both"),
        ("d0", "decode"),
        ("p0", "prefill"),
        ("p1", "prefill"),
    ]


# --- after a refusal ------------------------------------------------------------------------------


def test_decode_is_placed_anew_among_those_that_did_not_refuse() -> None:
    view = view_of("p0", "d0", "d1", "b0")
    which, prefill = policy(), view.workers["p0"]
    second = which.place_decode(SMALL, prefill, view, 0.0, {"d0"})
    assert second is not None
    assert second.decode in ("d1", "b0")
    assert which.place_decode(SMALL, prefill, view, 0.0, {"d0", "d1", "b0"}) is None


def test_a_both_worker_keeps_what_nobody_else_takes() -> None:
    view = view_of("b0", "d0")
    placement = policy().place_decode(SMALL, view.workers["b0"], view, 0.0, {"d0"})
    assert placement is not None
    assert placement.colocated


# --- capacity -------------------------------------------------------------------------------------


def test_capacity_is_the_most_any_placement_holds() -> None:
    view = view_of("p0", worker("d0", num_blocks=10), worker("d1", num_blocks=20))
    capacity = policy().capacity(view)
    assert capacity is not None
    assert (capacity.tokens, capacity.max_model_len, capacity.blocks) == (80, 200, 20)
    assert policy().fits_somewhere(Demand(10, 80), view)
    assert not policy().fits_somewhere(Demand(10, 81), view)


def test_the_largest_pool_is_the_one_for_most_tokens() -> None:
    """Pools may differ in block size: fewer blocks can be more."""
    large = msgspec.structs.replace(LAYOUT, block_size=16)
    view = view_of("p0", worker("d0", num_blocks=20), worker("d1", num_blocks=10, layout=large))
    capacity = policy().capacity(view)
    assert capacity is not None
    assert (capacity.tokens, capacity.blocks, capacity.block_size) == (160, 10, 16)
    assert policy().fits_somewhere(Demand(10, 160), view)
    assert not policy().fits_somewhere(Demand(10, 161), view)


def test_capacity_is_unknown_before_a_request_could_run() -> None:
    assert policy().capacity(view_of()) is None
    assert policy().capacity(view_of("p0")) is None


def test_the_configured_limit_caps_the_models() -> None:
    which = PlacementPolicy(config_of(model__max_model_len=50))
    view = view_of("p0", "d0")
    capacity = which.capacity(view)
    assert capacity is not None
    assert capacity.max_model_len == capacity.tokens == 50
    assert not which.fits_somewhere(Demand(10, 51), view)
