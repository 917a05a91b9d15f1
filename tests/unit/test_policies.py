"""What each placement policy prefers, and what holds for all of them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from baton.config import PolicyName, parse_config
from baton.errors import OverloadedError
from baton.prefix_hash import hashes_of_keys, unpack_hashes
from baton.protocol import LoadReport, WorkerInfo
from baton.sampling_params import SamplingParams
from baton_cli.output import record_tables
from baton_cluster.latency import LinearLatency, LinkModel
from baton_cluster.simulated import SimulatedCluster
from router.policies.base import mix
from router.policy import Demand, Placement, PlacementPolicy, Score
from router.prefix_index import PromptHashes
from router.records import RequestRecord, record_dict
from router.view import ClusterView
from tests.fakes_router import LAYOUT, config_of, worker

NAMES: tuple[str, ...] = get_args(PolicyName)
BLOCK = LAYOUT.block_size
TOKEN_MS, STEP_MS = 1.0, 10.0
"""What `measured` workers report."""


def policy(prefill: str = "least_loaded", decode: str | None = None, **router: Any) -> PlacementPolicy:
    keys = {f"router__{name}": value for name, value in router.items()}
    return PlacementPolicy(config_of(router__prefill_policy=prefill, router__decode_policy=decode or prefill, **keys))


def view_of(*workers: str | WorkerInfo, seen: float = 0.0) -> ClusterView:
    view = ClusterView()
    for w in workers:
        view.join(worker(w, num_blocks=1000, max_model_len=4000) if isinstance(w, str) else w, seen)
    return view


def measured(view: ClusterView, worker_id: str, **load: Any) -> None:
    """A load report; with `TOKEN_MS` and `STEP_MS` unless said otherwise."""
    total = view.workers[worker_id].info.num_blocks
    fields = {"decode_step_s": STEP_MS / 1e3, "prefill_token_s": TOKEN_MS / 1e3, "blocks_total": total}
    view.workers[worker_id].load = LoadReport(**{**fields, "blocks_free": total, **load})


def demand_of(prompt: Sequence[int] | int, max_tokens: int = 16, session: str = "") -> Demand:
    tokens = range(prompt) if isinstance(prompt, int) else prompt
    return Demand(len(tokens), len(tokens) + max_tokens, PromptHashes(tokens), session)


def put(view: ClusterView, placement: Placement, demand: Demand) -> tuple[str, str]:
    """Charge the placement as the book would."""
    prefill, decode = view.workers[placement.prefill], view.workers[placement.decode]
    cached = 0 if demand.prompt is None else min(view.expect_prompt(prefill, demand.prompt), demand.context - 1)
    view.stamp()
    view.charge_prefill(prefill, demand.context - cached, cached)
    view.charge_decode(decode, demand.total)
    if demand.prompt is not None:
        view.expect_prompt(decode, demand.prompt)
    return placement.prefill, placement.decode


def cache(view: ClusterView, worker_id: str, prompt: Sequence[int]) -> None:
    """The worker has the KV of this prompt's full blocks."""
    view.expect_prompt(view.workers[worker_id], PromptHashes(prompt))


def parts(placement: Placement, worker_id: str, part: str) -> Score:
    (score,) = [s for s in placement.scores if (s.worker_id, s.part) == (worker_id, part)]
    return score


# --- what holds for all ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_uses_all_workers_of_a_busy_cluster(name: str) -> None:
    view = view_of("p0", "p1", "p2", "d0", "d1", "d2")
    which = policy(name)
    pairs = []
    for i in range(60):
        prompt = range(i * 1000, i * 1000 + 40)
        demand = demand_of(prompt, session=f"session {i}")
        pairs.append(put(view, which.place(demand, view, 0.0), demand))
    assert {p for p, _ in pairs} == {"p0", "p1", "p2"}
    assert {d for _, d in pairs} == {"d0", "d1", "d2"}


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_scores_all_candidates_and_says_who_scored(name: str) -> None:
    view = view_of("p0", "p1", "d0", "d1", "b0")
    placement = policy(name, "least_loaded").place(demand_of(40, session="s"), view, 0.0)
    assert sorted((s.worker_id, s.part) for s in placement.scores) == [
        ("b0", "both"),
        ("d0", "decode"),
        ("d1", "decode"),
        ("p0", "prefill"),
        ("p1", "prefill"),
    ]
    assert parts(placement, "p0", "prefill").policy == name
    assert parts(placement, "b0", "both").policy == (name if name == "least_loaded" else f"{name} + least_loaded")
    assert msgspec.convert(msgspec.to_builtins(placement), Placement).scores == placement.scores


@pytest.mark.parametrize("name", NAMES)
def test_a_silent_worker_is_the_last_choice_of_every_policy(name: str) -> None:
    view = view_of("p0", "p1", "d0", "d1")
    view.workers["p1"].seen = view.workers["d0"].seen = 10.0
    prompt = range(40)
    cache(view, "p0", prompt)
    for i in range(20):
        demand = demand_of(prompt, session=str(i))
        placement = policy(name).place(demand, view, 10.0)
        assert (placement.prefill, placement.decode) == ("p1", "d0")
        view.stamp()


WORKERS = st.lists(
    st.tuples(
        st.sampled_from("pdb"),
        st.integers(4, 40),  # blocks
        st.integers(10, 200),  # max_model_len
        st.sampled_from(["ready", "ready", "ready", "lost", "leaving", "draining", "avoided", "full", "silent"]),
        st.integers(0, 400),  # pending tokens
        st.integers(0, 12),  # running
        st.sampled_from([0.0, 0.001, 0.05]),  # seconds
        st.booleans(),  # has the prompt
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.booleans(),
    WORKERS,
    st.integers(1, 80),
    st.integers(1, 80),
    st.integers(0, 50),
)
def test_who_is_chosen_may_be(
    prefill: str, decode: str, split: bool, workers: list[Any], context: int, max_tokens: int, placed: int
) -> None:
    """Never an unfit, lost, leaving, draining, avoided or full worker; and twice the same."""
    view = ClusterView()
    view.num_placed = placed
    avoid, full, prompt = set(), set(), range(context)
    for i, (role, blocks, length, state, pending, running, seconds, cached) in enumerate(workers):
        name = f"{role}{i}"
        w = view.join(worker(name, num_blocks=blocks, max_model_len=length), 0.0 if state == "silent" else 100.0)
        measured(view, name, num_pending_tokens=pending, num_running=running, decode_step_s=seconds)
        if state == "lost":
            w.state = "lost"
        w.leaving = state == "leaving"
        (avoid if state == "avoided" else full if state == "full" else set()).add(name)
        if state == "draining":
            view.draining.add(name)
        if cached:
            cache(view, name, prompt)
    demand = demand_of(prompt, max_tokens, session="s")
    which = policy(prefill, decode, conditional_split=split, slo_ttft_ms=50.0, slo_tbt_ms=20.0)
    try:
        placement = which.place(demand, view, 100.0, avoid, full)
    except OverloadedError:
        with pytest.raises(OverloadedError):
            which.place(demand, view, 100.0, avoid, full)
        return
    again = policy(prefill, decode, conditional_split=split, slo_ttft_ms=50.0, slo_tbt_ms=20.0)
    assert which.place(demand, view, 100.0, avoid, full) == placement == again.place(demand, view, 100.0, avoid, full)
    p, d = view.workers[placement.prefill], view.workers[placement.decode]
    assert {p, d} <= set(view.placeable())
    assert not {p.worker_id, d.worker_id} & avoid
    assert d.worker_id not in full
    assert d.can_decode and (p.can_prefill or (p is d and split))
    assert d.info.layout.num_blocks_for(demand.total) <= d.info.num_blocks
    assert p.info.layout.num_blocks_for(demand.context) <= p.info.num_blocks
    assert demand.total <= min(p.info.max_model_len, d.info.max_model_len)


# --- random, power of two -------------------------------------------------------------------------


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of the generator seeded with 0, as its authors' C code gives them."""
    assert [mix(i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("roles", ["pd", "b"])
def test_random_is_even_and_draws_prefill_and_decode_apart(roles: str) -> None:
    view = view_of(*(f"{role}{i}" for role in roles for i in range(4)))
    which = policy("random")
    pairs: Counter[tuple[str, str]] = Counter()
    for _ in range(3200):
        placement = which.place(Demand(6, 12), view, 0.0)
        assert which.place(Demand(6, 12), view, 0.0) == placement, "the draw is the view's"
        pairs[placement.prefill, placement.decode] += 1
        view.stamp()
    assert len(pairs) == (16 if roles == "pd" else 4)
    even = 3200 / len(pairs)
    assert all(0.7 * even < count < 1.3 * even for count in pairs.values()), pairs


def test_random_uses_workers_of_every_role() -> None:
    view = view_of("p0", "d0", "b0")
    which = policy("random")
    used: Counter[str] = Counter()
    for _ in range(200):
        used[which.place(Demand(6, 12), view, 0.0).prefill] += 1
        view.stamp()
    assert min(used["p0"], used["b0"]) > 50


def spread(name: str, num_workers: int, num_requests: int) -> list[int]:
    """Tokens placed on each prefill worker."""
    view = view_of(*(f"p{i}" for i in range(num_workers)), "d0")
    which = policy(name, "round_robin")
    for _ in range(num_requests):
        put(view, which.place(Demand(10, 20), view, 0.0), Demand(10, 20))
    return [view.workers[f"p{i}"].prefill_tokens for i in range(num_workers)]


def test_power_of_two_balances_far_better_than_random_draws() -> None:
    one, two = spread("random", 20, 2000), spread("power_of_two", 20, 2000)
    assert sum(one) == sum(two) == 20_000
    assert max(two) <= 1.06 * 1000 < 1.12 * 1000 <= max(one)


def test_power_of_two_looks_at_two_only() -> None:
    view = view_of("p0", "p1", "p2", "p3", "d0")
    for i in range(1, 4):
        view.charge_prefill(view.workers[f"p{i}"], 100)
    which, seen = policy("power_of_two"), Counter[str]()
    for _ in range(300):
        placement = which.place(Demand(6, 12), view, 0.0)
        drawn = {s.worker_id for s in placement.scores if s.part == "prefill" and s.parts["drawn"]}
        assert len(drawn) == 2 and placement.prefill in drawn
        assert "p0" not in drawn or placement.prefill == "p0"
        seen.update(drawn)
        view.stamp()
    assert all(120 < seen[f"p{i}"] < 180 for i in range(4)), seen


# --- least outstanding tokens ----------------------------------------------------------------------


def test_outstanding_tokens_count_alike_on_large_and_small_workers() -> None:
    view = view_of("p0", worker("d0", num_blocks=100), worker("d1", num_blocks=1000, max_model_len=4000))
    view.charge_decode(view.workers["d0"], 40)
    view.charge_decode(view.workers["d1"], 60)
    assert policy("least_outstanding_tokens").place(Demand(6, 12), view, 0.0).decode == "d0"
    assert policy("least_loaded").place(Demand(6, 12), view, 0.0).decode == "d1", "which has more room left"


# --- sessions -------------------------------------------------------------------------------------


def places(which: PlacementPolicy, view: ClusterView, now: float = 0.0) -> dict[str, tuple[str, str]]:
    """Where each of 60 sessions goes."""
    found = {}
    for i in range(60):
        placement = which.place(Demand(6, 12, session=f"s{i}"), view, now)
        found[f"s{i}"] = (placement.prefill, placement.decode)
        view.stamp()
    return found


def test_a_session_keeps_its_workers_and_sessions_spread() -> None:
    view, which = view_of("p0", "p1", "p2", "d0", "d1", "d2"), policy("session")
    home = places(which, view)
    assert places(policy("session"), view) == home, "of another router, too"
    for side in (0, 1):
        counts = Counter(pair[side] for pair in home.values())
        assert len(counts) == 3 and min(counts.values()) >= 10, counts


@pytest.mark.parametrize("how", ["lost", "leaving", "draining", "silent", "overloaded"])
def test_only_the_sessions_of_a_worker_that_cannot_take_them_move(how: str) -> None:
    view, which = view_of("p0", "p1", "p2", "d0", seen=100.0), policy("session")
    home = places(which, view, 100.0)
    p1 = view.workers["p1"]
    match how:
        case "lost":
            p1.state = "lost"
        case "leaving":
            p1.leaving = True
        case "draining":
            view.draining.add("p1")
        case "silent":
            for w in view.workers.values():
                w.seen = 100.0 if w is p1 else 102.0
        case "overloaded":
            view.charge_prefill(p1, 10_000)
    now = 102.0 if how == "silent" else 100.0
    away = places(which, view, now)
    assert {s for s in home if home[s] != away[s]} == {s for s in home if home[s][0] == "p1"}
    assert {pair[0] for pair in away.values()} == {"p0", "p2"}
    p1.state, p1.leaving, p1.seen = "ready", False, now
    view.draining.clear()
    if how == "overloaded":
        view.release_prefill(p1, 10_000)
    assert places(which, view, now) == home, "they come back"


def test_a_full_decode_worker_is_passed_by() -> None:
    view, which = view_of("p0", "d0", "d1"), policy("session")
    demand = Demand(6, 12, session="s")
    home = which.place(demand, view, 0.0).decode
    for _ in range(8):
        view.charge_decode(view.workers[home], 12)
    assert which.place(demand, view, 0.0).decode != home


def test_without_a_session_load_decides() -> None:
    view = view_of("p0", "p1", "d0", "d1")
    view.charge_prefill(view.workers["p0"], 10)
    view.charge_decode(view.workers["d1"], 10)
    for _ in range(5):
        placement = policy("session").place(Demand(6, 12), view, 0.0)
        assert (placement.prefill, placement.decode) == ("p1", "d0")


# --- kv_aware -------------------------------------------------------------------------------------

PROMPT = range(100)


def kv_view(*ids: str) -> ClusterView:
    view = view_of(*(ids or ("p0", "p1", "d0", "d1")))
    for worker_id in view.workers:
        measured(view, worker_id)
    return view


@pytest.mark.parametrize(
    ("cached", "queued", "chosen"),
    [
        ({}, {"p0": 10}, "p1"),
        ({"p0": 40}, {}, "p0"),
        ({"p0": 40, "p1": 80}, {}, "p1"),
        ({"p0": 40}, {"p0": 79}, "p0"),
        ({"p0": 40}, {"p0": 81}, "p1"),
        ({"p0": 100}, {"p0": 197}, "p0"),
        ({"p0": 100}, {"p0": 199}, "p1"),
    ],
)
def test_a_cached_prefix_is_worth_the_tokens_that_it_saves(
    cached: dict[str, int], queued: dict[str, int], chosen: str
) -> None:
    view = kv_view()
    for worker_id, tokens in cached.items():
        cache(view, worker_id, PROMPT[:tokens])
    for worker_id, tokens in queued.items():
        view.charge_prefill(view.workers[worker_id], tokens)
    placement = policy("kv_aware").place(demand_of(PROMPT), view, 0.0)
    assert placement.prefill == chosen
    for worker_id in ("p0", "p1"):
        score = parts(placement, worker_id, "prefill")
        tokens = cached.get(worker_id, 0)
        assert score.parts["cached_tokens"] == min(tokens, 99), "the last token is computed in any case"
        assert score.parts["queue_ms"] == pytest.approx(queued.get(worker_id, 0) * TOKEN_MS)
        assert score.parts["compute_ms"] == pytest.approx((100 - tokens or 1) * TOKEN_MS)
        assert score.value == pytest.approx(score.parts["queue_ms"] + 2 * score.parts["compute_ms"])


def test_milliseconds_are_each_workers_own() -> None:
    view = kv_view()
    measured(view, "p0", prefill_token_s=0.004)
    cache(view, "p0", PROMPT[:60])
    which = policy("kv_aware")
    assert which.place(demand_of(PROMPT), view, 0.0).prefill == "p1", "40 times 4 ms are more than 100 times 1 ms"
    cache(view, "p0", PROMPT[:80])
    assert which.place(demand_of(PROMPT), view, 0.0).prefill == "p0"


def test_who_measured_nothing_is_taken_for_an_average_one() -> None:
    view = view_of("p0", "p1", "d0")
    measured(view, "p0", prefill_token_s=0.0002)
    view.workers["p1"].load = LoadReport(blocks_total=1000, blocks_free=1000)
    view.charge_prefill(view.workers["p0"], 10)
    assert policy("kv_aware").place(demand_of(PROMPT), view, 0.0).prefill == "p1"


def test_small_differences_between_workers_are_noise() -> None:
    """Else whoever seems to be a little faster would get everything as long as nobody waits."""
    view, which, got = kv_view("p0", "p1", "p2", "d0"), policy("kv_aware"), Counter[str]()
    for i in range(30):
        for j, worker_id in enumerate(("p0", "p1", "p2")):
            measured(view, worker_id, prefill_token_s=0.001 * (1 + 0.05 * ((i + j) % 4 - 2)))
        demand = demand_of(range(i * 1000, i * 1000 + 40))
        placement = which.place(demand, view, 0.0)
        got[put(view, placement, demand)[0]] += 1
        view.release_prefill(view.workers[placement.prefill], 40)
    assert got == {"p0": 10, "p1": 10, "p2": 10}
    measured(view, "p1", prefill_token_s=0.0005)
    assert which.place(demand_of(range(99_000, 99_040)), view, 0.0).prefill == "p1", "half the time is none"


def test_a_queue_of_cached_prompts_is_no_queue() -> None:
    """What a worker reports as pending counts prompts in full, with what it will find in its cache."""
    view = kv_view()
    view.charge_prefill(view.workers["p0"], 1, cached=99)
    measured(view, "p0", num_pending_tokens=100)
    assert view.workers["p0"].queue_ms == pytest.approx(TOKEN_MS)
    measured(view, "p0", num_pending_tokens=300)
    assert view.workers["p0"].queue_ms == pytest.approx(201 * TOKEN_MS), "others' work there counts"


def test_a_burst_of_equal_prompts_sticks_together_and_spreads_where_the_queue_is_long() -> None:
    view, which = kv_view(), policy("kv_aware")
    got = []
    for i in range(60):
        demand = demand_of([*range(96), 1000 + i, 0, 0, 0])
        got.append(put(view, which.place(demand, view, 0.0), demand)[0])
    first = got[0]
    counts = Counter(got)
    switch = next(i for i, name in enumerate(got) if name != first)
    # 100 tokens wait there for the first prompt and 4 for each further one. Elsewhere 100 would be computed, not 4.
    assert switch == pytest.approx(1 + (2 * 96 - 100) / 4, abs=1), "although no worker told of anything"
    assert abs(counts["p0"] - counts["p1"]) <= 2, "from then on both have it, and it is balanced"


def test_a_burst_stays_where_the_queue_is_short() -> None:
    view, which = kv_view(), policy("kv_aware")
    homes = []
    for i in range(20):
        demand = demand_of([*range(96), 1000 + i, 0, 0, 0])
        placement = which.place(demand, view, 0.0)
        homes.append(put(view, placement, demand)[0])
        view.release_prefill(view.workers[placement.prefill], 4 if i else 100, 96 if i else 0)
    assert len(set(homes)) == 1


def test_decode_weighs_what_must_be_sent_against_its_load() -> None:
    big = msgspec.structs.replace(LAYOUT, num_layers=64, num_kv_heads=8, head_dim=128)  # 512 KiB a token
    infos = [worker(w, num_blocks=1000, max_model_len=4000, layout=big) for w in ("p0", "d0", "d1")]
    view, which = view_of(*infos), policy("kv_aware")
    for worker_id in view.workers:
        measured(view, worker_id, decode_slope_s=0.001)
    cache(view, "d0", PROMPT)
    placement = which.place(demand_of(PROMPT), view, 0.0)
    assert placement.decode == "d0"
    assert parts(placement, "d0", "decode").parts["transfer_ms"] == 0
    sent = parts(placement, "d1", "decode").parts["transfer_ms"]
    assert sent == pytest.approx(100 * big.token_bytes / 1e6)
    running = 0
    while which.place(demand_of(PROMPT), view, 0.0).decode == "d0":
        running += 1
        assert running < 50
        view.charge_decode(view.workers["d0"], 20)
    # Each request adds 1 ms to each of 16 steps: three to four of them cost what 52 ms of sending do.
    assert running == pytest.approx(sent / 16, abs=1)


def test_a_full_pool_or_batch_costs() -> None:
    view, which = kv_view("p0", "d0", "d1"), policy("kv_aware")
    measured(view, "d0", blocks_free=0)
    assert which.place(demand_of(PROMPT), view, 0.0).decode == "d1"
    measured(view, "d0")
    measured(view, "d1", num_running=4, num_waiting=4)
    assert which.place(demand_of(PROMPT), view, 0.0).decode == "d0"


def test_prefixes_are_found_in_pools_of_different_block_sizes() -> None:
    large = msgspec.structs.replace(LAYOUT, block_size=16)
    view = view_of("p0", worker("p1", num_blocks=1000, layout=large, max_model_len=4000), "d0")
    for worker_id in view.workers:
        measured(view, worker_id)
    cache(view, "p1", PROMPT)
    placement = policy("kv_aware").place(demand_of(PROMPT), view, 0.0)
    assert placement.prefill == "p1"
    assert parts(placement, "p1", "prefill").parts["cached_tokens"] == 96
    cache(view, "p0", PROMPT)
    assert parts(policy("kv_aware").place(demand_of(PROMPT), view, 0.0), "p0", "prefill").parts["cached_tokens"] == 99


def test_prefixes_are_asked_for_only_where_they_matter() -> None:
    for name in NAMES:
        asks = name in ("kv_aware", "slo_aware")
        assert policy(name, "least_loaded").uses_prefixes is policy("least_loaded", name).uses_prefixes is asks
    assert policy(conditional_split=True).uses_prefixes
    off = config_of(router__prefill_policy="kv_aware", engine__prefix_cache=False)
    assert not PlacementPolicy(off).uses_prefixes


# --- slo_aware ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promised", "queue", "chosen"),
    [
        (None, 30, "p0"),  # 30 + 20 ms are less than 100 ms
        (None, 90, "p1"),  # every millisecond counts the same
        (200.0, 90, "p0"),  # in time, and less work
        (200.0, 170, "p0"),
        (200.0, 195, "p1"),  # 215 ms: too late
        (50.0, 400, "p1"),  # too late everywhere: the earliest
    ],
)
def test_in_time_who_has_least_to_compute(promised: float | None, queue: int, chosen: str) -> None:
    view = kv_view()
    cache(view, "p0", PROMPT[:80])
    view.charge_prefill(view.workers["p0"], queue)
    placement = policy("slo_aware", slo_ttft_ms=promised).place(demand_of(PROMPT), view, 0.0)
    assert placement.prefill == chosen
    assert parts(placement, "p0", "prefill").parts["ttft_ms"] == pytest.approx(queue + 20)


def test_decode_keeps_the_promised_time_between_tokens() -> None:
    big = msgspec.structs.replace(LAYOUT, num_layers=64, num_kv_heads=8, head_dim=128)
    view = view_of(*[worker(w, num_blocks=1000, max_model_len=4000, layout=big) for w in ("p0", "d0", "d1")])
    for worker_id in view.workers:
        measured(view, worker_id, decode_slope_s=0.002)
    cache(view, "d0", PROMPT)
    for _ in range(5):
        view.charge_decode(view.workers["d0"], 20)
    which = policy("slo_aware", slo_tbt_ms=29.0)
    placement = which.place(demand_of(PROMPT), view, 0.0)
    assert parts(placement, "d0", "decode").parts["tbt_ms"] == pytest.approx(10 + 5 * 2)
    assert placement.decode == "d0", "nothing need be sent there, and it keeps the promise"
    assert policy("slo_aware").place(demand_of(PROMPT), view, 0.0).decode == "d1"
    for _ in range(5):
        view.charge_decode(view.workers["d0"], 20)
    assert which.place(demand_of(PROMPT), view, 0.0).decode == "d1", "with one more a step takes 30 ms"


# --- conditional split ----------------------------------------------------------------------------


def split_view(**prefill: Any) -> ClusterView:
    view = kv_view("p0", "d0")
    measured(view, "p0", **prefill)
    return view


SPLIT = {"conditional_split": True}


def local(which: PlacementPolicy, view: ClusterView, prompt: int | range = 20) -> bool:
    return which.place(demand_of(prompt), view, 0.0).colocated


def test_off_it_changes_nothing() -> None:
    for name in NAMES:
        on, off = policy(name, **SPLIT), policy(name)
        view = split_view()
        one = off.place(demand_of(400, session="s"), view, 0.0)
        other = on.place(demand_of(400, session="s"), view, 0.0)
        assert (one.prefill, one.decode) == (other.prefill, other.decode) == ("p0", "d0")
        assert other.rankings[:2] == one.rankings
        assert [r.part for r in other.rankings] == ["prefill", "decode", "local"]


def test_a_short_prompt_is_prefilled_at_decode_where_that_is_faster() -> None:
    view, which = split_view(), policy(**SPLIT)
    assert not local(which, view), "an idle prefill worker saves hardly more than the hand-over"
    view.charge_prefill(view.workers["p0"], 30)
    placement = which.place(demand_of(20), view, 0.0)
    assert (placement.prefill, placement.decode) == ("d0", "d0")
    score = parts(placement, "d0", "local")
    assert score.policy == "conditional_split"
    assert score.parts["split_ms"] - score.value == pytest.approx(30 + 2, abs=0.1), "p0's queue, and the hand-over"
    assert score.parts["step_ms"] == 0, "nobody else decodes there"


def test_others_that_decode_there_are_not_delayed_beyond_the_promise() -> None:
    view = split_view()
    view.charge_prefill(view.workers["p0"], 1000)
    view.charge_decode(view.workers["d0"], 100)
    assert local(policy(**SPLIT), view, 20), "it is still on its way"
    view.end_handoff(view.workers["d0"])
    assert local(policy(**SPLIT), view, 8)
    assert not local(policy(**SPLIT), view, 20), "20 ms beside a step of 10 ms: more than twice as long"
    assert local(policy(**SPLIT, slo_tbt_ms=35.0), view, 20)
    assert not local(policy(**SPLIT, slo_tbt_ms=35.0), view, 40)


def test_a_long_prompt_that_is_cached_at_decode_is_short() -> None:
    view = split_view()
    view.charge_prefill(view.workers["p0"], 100)
    view.charge_decode(view.workers["d0"], 100)
    view.end_handoff(view.workers["d0"])
    assert not local(policy(**SPLIT), view, 400)
    cache(view, "d0", range(400))
    assert local(policy(**SPLIT), view, 400)


def test_it_does_not_flap_around_the_threshold() -> None:
    view, which = split_view(), policy(**SPLIT)
    p0 = view.workers["p0"]
    seen = []
    # The gain is p0's queue and 2 ms. It begins where that is a tenth of the queue and 402 ms: with 43 ms of queue.
    for queue in (0, 40, 46, 40, 2, 40, 46):
        view.charge_prefill(p0, queue)
        seen.append(local(which, view, 400))
        assert local(which, view, 400) is seen[-1], "asking changes nothing"
        view.release_prefill(p0, queue)
    assert seen == [False, False, True, True, True, True, True]
    measured(view, "d0", prefill_token_s=0.01)  # clearly slower there
    assert not local(which, view, 400)
    measured(view, "d0")
    view.charge_prefill(p0, 40)
    assert not local(which, view, 400), "and it begins anew only where it is clearly faster"


def test_sizes_are_judged_apart() -> None:
    view, which = split_view(), policy(**SPLIT)
    view.charge_prefill(view.workers["p0"], 40)
    assert local(which, view, 20)
    assert not local(which, view, 500), "42 ms are not a tenth of 542"
    view.release_prefill(view.workers["p0"], 40)
    assert local(which, view, 20), "what was said of a long prompt is nothing to a short one"
    assert not local(policy(**SPLIT), view, 20)


def test_what_takes_more_than_a_step_is_not_short() -> None:
    view, which = split_view(), policy(**SPLIT)
    view.charge_prefill(view.workers["p0"], 10_000)
    placement = which.place(demand_of(513), view, 0.0)
    assert not placement.colocated
    assert [r.part for r in placement.rankings] == ["prefill", "decode"]
    cache(view, "d0", range(600))
    assert local(which, view, 1000)


def test_no_local_prefill_on_silent_full_or_small_workers() -> None:
    view, which = view_of("p0", "d0", "d1", seen=100.0), policy(**SPLIT)
    for worker_id in view.workers:
        measured(view, worker_id)
    view.charge_prefill(view.workers["p0"], 500)
    assert which.place(demand_of(20), view, 100.0).colocated
    assert which.place(demand_of(20), view, 100.0, full={"d0"}).decode == "d1"
    view.workers["d0"].seen = view.workers["p0"].seen = 110.0
    placement = which.place(demand_of(20), view, 110.0)
    assert (placement.prefill, placement.decode) == ("d0", "d0")
    assert {s.worker_id for s in placement.scores if s.part == "local"} == {"d0"}


# --- whole clusters, simulated ----------------------------------------------------------------------


def simulate(name: str, *, faults: bool = False, **router: Any) -> tuple[SimulatedCluster, float]:
    """60 questions about 8 documents on 2 + 2 workers; and the share of prompt tokens that prefill had cached."""
    tree = {
        "pools": {"prefill": {"workers": 2, "kv_blocks": 60}, "decode": {"workers": 2, "kv_blocks": 100}},
        "router": {"prefill_policy": name, "decode_policy": name, **router},
        "engine": {"block_size": BLOCK, "max_batch_tokens": 64},
    }
    cluster = SimulatedCluster(
        parse_config(tree),
        LinearLatency(0.002, 0.0005),
        LinkModel(),
        layout=LAYOUT,
        max_model_len=200,
        next_token=5,
    )
    for i in range(60):
        document = mix(i) % 8
        prompt = (*range(document * 50, document * 50 + 44), 1000 + i)
        cluster.submit(i * 0.04, prompt, SamplingParams(max_tokens=6))
    if faults:
        cluster.restart("prefill-0", 0.7)
        cluster.kill("decode-1", 1.0)
        cluster.restart("decode-1", 1.3)
    done = cluster.run()
    assert [r.finish_reason for r in done] == ["length"] * 60
    cluster.run(until=cluster.clock.now + 2)  # heartbeats bring the last news
    cluster.check_ledger()
    loads = [w.core.engine.load() for w in cluster.workers.values() if w.info.role == "prefill"]
    return cluster, sum(x.cache_hit_tokens for x in loads) / sum(x.cache_queried_tokens for x in loads)


def test_kv_aware_finds_more_in_the_caches_than_turns_do() -> None:
    _, in_turns = simulate("round_robin")
    _, aware = simulate("kv_aware")
    assert aware > 0.75 > 0.6 > in_turns


@pytest.mark.parametrize("name", ["kv_aware", "slo_aware", "session"])
def test_after_losses_and_restarts_the_index_is_what_the_workers_have(name: str) -> None:
    cluster, _ = simulate(name, faults=True, conditional_split=True)
    for worker_id, simulated in cluster.workers.items():
        prefixes = cluster.router.view.workers[worker_id].prefixes
        keys = [key for key in simulated.core.engine.pool.all_keys() if len(key) == 16 + 4 * BLOCK]
        assert prefixes.known == set(unpack_hashes(hashes_of_keys(keys))), worker_id
        assert not prefixes.expected


# --- what people are shown --------------------------------------------------------------------------


def test_explain_shows_what_each_score_is_made_of() -> None:
    view = split_view()
    cache(view, "p0", PROMPT[:40])
    placement = policy("kv_aware", "least_loaded", **SPLIT).place(demand_of(PROMPT), view, 0.0)
    record = RequestRecord("ab" * 16, "l", "length", "", "", 100, 16, (placement,), {0: 1.0, 4: 1.5})
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    for table in record_tables(record):
        console.print(table)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "1 p0 d0 kv_aware, least_loaded, conditional_split" in shown
    assert "1 prefill p0 120 queue 0 ms, compute 60 ms, cached 40 tokens" in shown
    assert "1 decode d0 0 batch share 0, pool share 0" in shown
    assert "1 local d0" in shown and "split 2" in shown
    scores = record_dict(record)["placements"][0]["scores"]
    assert scores[0] == {
        "worker_id": "p0",
        "part": "prefill",
        "value": 120.0,
        "policy": "kv_aware",
        "parts": {"queue_ms": 0.0, "compute_ms": 60.0, "cached_tokens": 40.0},
    }
