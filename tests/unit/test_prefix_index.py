"""What the router knows of prefixes on its workers: hashes, news, expectations, matching, and its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.blocks import BlockPool
from baton.engine.prefix_cache import PrefixCache
from baton.engine.prefix_log import PrefixLog
from baton.engine.request import EngineRequest
from baton.prefix_hash import hashes_of_keys, prefix_hashes, unpack_hashes
from baton.protocol import PrefixNews, RequestKey
from baton.sampling_params import SamplingParams
from baton.wire import MAX_PREFIX_HASHES
from router.prefix_index import PrefixIndex, PromptHashes, WorkerPrefixes


def packed(*hashes: int) -> bytes:
    return b"".join(h.to_bytes(8, "little") for h in hashes)


def news(number: int, added: tuple[int, ...] = (), removed: tuple[int, ...] = (), *, reset: bool = False) -> PrefixNews:
    return PrefixNews(number, packed(*added), packed(*removed), reset)


def index_of(*told: tuple[int, ...], max_blocks: int = 1000) -> tuple[PrefixIndex, list[WorkerPrefixes]]:
    """An index, and a worker for each tuple that has told of these hashes."""
    index = PrefixIndex(max_blocks)
    workers = [index.open(100) for _ in told]
    for worker, hashes in zip(workers, told, strict=True):
        assert index.take(worker, news(1, hashes, reset=True))
    index.check_integrity(workers)
    return index, workers


def depths(index: PrefixIndex, workers: list[WorkerPrefixes], *hashes: int) -> list[int]:
    found = index.match(hashes)
    assert all(found.values()), "who has nothing is left out"
    return [found.get(worker.slot, 0) for worker in workers]


# --- hashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_router_and_prefix_cache_name_a_block_alike(block_size: int) -> None:
    prompt, salt = [7, 1 << 31, 0, *range(60)], "tenant"
    cache = PrefixCache(BlockPool(64), block_size, "model")
    request = EngineRequest(RequestKey("r", 0), prompt, SamplingParams(max_tokens=1), cache_salt=salt)
    full = len(prompt) // block_size
    keys = [cache.key(request, i, (i + 1) * block_size) for i in range(full)]
    assert unpack_hashes(hashes_of_keys(keys)) == prefix_hashes(prompt, block_size, "model", salt)


def test_a_hash_tells_of_all_that_comes_before() -> None:
    base = prefix_hashes(range(12), 4, "m")
    assert len(base) == 3
    assert prefix_hashes(range(15), 4, "m") == base, "a rest is no block"
    assert prefix_hashes([*range(11), 99], 4, "m")[:2] == base[:2]
    changed = prefix_hashes([99, *range(1, 12)], 4, "m")
    others = (changed, prefix_hashes(range(12), 4, "n"), prefix_hashes(range(12), 4, "m", "salt"))
    assert all(set(other).isdisjoint(base) for other in others)
    assert prefix_hashes(range(3), 4, "m") == ()


def test_a_prompt_is_hashed_once_for_each_kind_of_pool() -> None:
    hashes = PromptHashes(range(32))
    assert hashes.of("m", 4) is hashes.of("m", 4)
    assert (len(hashes.of("m", 4)), len(hashes.of("m", 16))) == (8, 2)


# --- what a worker tells ----------------------------------------------------------------------------


def key(number: int, tokens: int = 2) -> bytes:
    return bytes(16) + number.to_bytes(4, "little") * tokens


def test_the_log_tells_of_what_is_there_and_then_of_changes() -> None:
    log = PrefixLog(len(key(0)), [key(1), key(2), key(3, tokens=1)])
    assert log.take() == (hashes_of_keys([key(1), key(2)]), b""), "and of no partial block"
    log.note(key(2), False)
    log.note(key(4), True)
    log.note(key(5), True)
    log.note(key(5), False)
    log.note(key(1), False)
    log.note(key(1), True)
    log.note(key(6, tokens=1), True)
    assert log.take() == (hashes_of_keys([key(4)]), hashes_of_keys([key(2)])), "what came and went leaves nothing"
    assert len(log) == 0


def test_the_log_tells_a_limited_number_at_a_time() -> None:
    count = MAX_PREFIX_HASHES + 10
    log = PrefixLog(len(key(0)), map(key, range(count)))
    first, second = log.take()[0], log.take()[0]
    assert (len(first), len(second)) == (8 * MAX_PREFIX_HASHES, 80)
    assert first + second == hashes_of_keys(map(key, range(count)))


def test_a_pool_tells_its_log_of_every_key_that_comes_and_goes() -> None:
    pool = BlockPool(2)
    pool.log = PrefixLog(len(key(0)), pool.all_keys())
    first = pool.allocate(1)
    assert first is not None
    pool.register(first[0], key(1))
    pool.register(first[0], key(1))
    pool.free(first)
    assert pool.log.take() == (hashes_of_keys([key(1)]), b"")
    assert pool.allocate(2) is not None, "which takes the cached one too"
    assert pool.log.take() == (b"", hashes_of_keys([key(1)]))


# --- matching ---------------------------------------------------------------------------------------


def test_a_match_is_as_long_as_the_chain_holds() -> None:
    index, workers = index_of((1, 2, 3, 4), (1, 2), (2, 3), (1, 3))
    assert depths(index, workers, 1, 2, 3, 4, 5) == [4, 2, 0, 1]
    assert depths(index, workers, 1, 2) == [2, 2, 0, 1]
    assert depths(index, workers, 9, 1, 2) == [0, 0, 0, 0]
    assert index.match(()) == {}


def test_changes_are_taken_in_and_a_life_goes_at_once() -> None:
    index, (a, b) = index_of((1, 2, 3), (1, 2, 3))
    assert index.take(a, news(2, (4,), (3, 3)))
    assert depths(index, [a, b], 1, 2, 3) == [2, 3]
    index.clear(b)
    assert depths(index, [a, b], 1, 2, 3) == [2, 0]
    index.check_integrity([a, b])
    index.close(a)
    index.check_integrity([b])
    assert (index.num_blocks, a.slot) == (0, -1)
    assert index.open(5).slot == 0, "slots are used again"
    index.close(a)
    assert index.take(a, news(1, (1,), reset=True)), "of a life that is over nothing is asked"
    assert index.expect(a, (1,)) == 0
    index.unexpect(a, (1,))
    assert index.num_blocks == 0


def test_news_with_a_gap_void_all_until_everything_is_told() -> None:
    index, (a,) = index_of((1, 2))
    assert not index.take(a, news(3, (3,))), "the second was lost"
    assert depths(index, [a], 1, 2) == [0]
    assert index.take(a, news(4, (3,))), "asked once is enough"
    assert depths(index, [a], 3) == [0]
    assert index.take(a, news(5, (7,), reset=True))
    assert index.take(a, news(6, (8,)))
    assert depths(index, [a], 7, 8) == [2]


def test_before_everything_was_told_nothing_is_believed() -> None:
    index = PrefixIndex()
    worker = index.open(10)
    assert index.take(worker, news(1, (1,))), "it has been asked at its join"
    assert depths(index, [worker], 1) == [0]


# --- expectations -----------------------------------------------------------------------------------


def test_what_was_placed_counts_until_it_has_ended() -> None:
    index, (a, b) = index_of((1,), ())
    assert index.expect(a, (1, 2, 3)) == 1
    assert index.expect(a, (1, 2, 9)) == 2
    assert index.expect(b, (1,)) == 0
    assert depths(index, [a, b], 1, 2, 3) == [3, 1]
    index.unexpect(a, (1, 2, 3))
    assert depths(index, [a, b], 1, 2, 3) == [2, 1], "another one has the second block, too"
    index.unexpect(a, (1, 2, 9))
    index.unexpect(b, (1,))
    assert depths(index, [a, b], 1, 2, 3) == [1, 0]
    index.check_integrity([a, b])


def test_what_was_told_of_meanwhile_stays() -> None:
    index, (a,) = index_of(())
    index.expect(a, (1, 2))
    assert index.take(a, news(2, (1,)))
    index.unexpect(a, (1, 2))
    assert depths(index, [a], 1, 2) == [1]
    index.expect(a, (1,))
    assert index.take(a, news(3, (), (1,)))
    assert depths(index, [a], 1) == [1], "it is on its way again"
    index.unexpect(a, (1,))
    assert depths(index, [a], 1) == [0]
    index.check_integrity([a])


def test_a_life_that_is_cleared_forgets_its_expectations() -> None:
    index, (a,) = index_of(())
    index.expect(a, (1, 2))
    index.clear(a)
    index.unexpect(a, (1, 2))
    index.check_integrity([a])
    assert index.num_blocks == 0


# --- limits -----------------------------------------------------------------------------------------


def test_no_worker_is_known_to_have_more_blocks_than_its_pool() -> None:
    index = PrefixIndex()
    worker = index.open(3)
    assert index.take(worker, news(1, (1, 2, 3, 4, 5), reset=True))
    assert depths(index, [worker], 1, 2, 3, 4) == [3]
    assert index.take(worker, news(2, (6,), (1,)))
    assert len(worker.known) == 3


def test_the_index_is_bounded() -> None:
    index, (a, b) = index_of((1, 2, 3), (), max_blocks=5)
    assert index.expect(b, (1, 2, 3)) == 0
    assert index.num_blocks == 5
    assert depths(index, [a, b], 1, 2, 3) == [3, 2]
    index.unexpect(b, (1, 2, 3))
    index.check_integrity([a, b])
    assert index.num_blocks == 3


HASH = st.integers(0, 7)
HASHES = st.lists(HASH, max_size=6, unique=True).map(tuple)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "reset", "lose", "expect", "unexpect", "clear", "again"]),
            st.integers(0, 2),
            HASHES,
            HASHES,
        ),
        max_size=40,
    )
)
def test_bits_and_workers_agree_whatever_comes(steps: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]) -> None:
    index = PrefixIndex(12)
    workers = [index.open(5) for _ in range(3)]
    numbers, open_prompts = [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
    for what, who, one, other in steps:
        worker = workers[who]
        match what:
            case "take" | "reset":
                numbers[who] += 1
                index.take(worker, news(numbers[who], one, other, reset=what == "reset"))
            case "lose":
                numbers[who] += 1
            case "expect":
                index.expect(worker, one)
                open_prompts[who].append(one)
            case "unexpect" if open_prompts[who]:
                index.unexpect(worker, open_prompts[who].pop())
            case "clear":
                index.clear(worker)
            case "again":
                index.close(worker)
                workers[who], numbers[who], open_prompts[who] = index.open(5), 0, []
        index.check_integrity(workers)
        assert index.num_blocks <= 12
        for worker in workers:
            has = worker.known | worker.expected.keys()
            wanted = next((i for i, h in enumerate(one) if h not in has), len(one))
            assert index.match(one).get(worker.slot, 0) == wanted
