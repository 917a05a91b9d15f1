"""The prefix cache changes no token: repeated prompts, next turns, samples, on pools that evict and preempt.

A tiny random model: blocks that were shared, copied or found again wrongly give other logits.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import parse_config
from baton_cluster.local import LocalCluster
from router.client import Completion
from tests.golden.tiny_models import VOCAB

B = 16
TURNS = 3
SPLIT = {"prefill": {}, "decode": {}}


def first_prompts() -> list[list[int]]:
    """Lengths around blocks and chunks; some begin alike, some come twice."""
    draw = random.Random(5)
    system = [draw.randrange(1, VOCAB) for _ in range(40)]
    prompts = []
    for length in (1, 2, B - 1, B, B + 1, 2 * B, 3 * B + 5, 64, 65, 100):
        own = [draw.randrange(1, VOCAB) for _ in range(length)]
        prompts += [own, own, system + own]
    return prompts


def conversations(
    model: Path,
    pools: dict[str, Any],
    *,
    prompts: list[list[int]] | None = None,
    turns: int = TURNS,
    blocks: int | None = None,
    options: dict[str, Any] | None = None,
    **sections: Any,
) -> list[Completion]:
    """Each prompt, and then in turn all that was said before and something new. `blocks`: of each pool."""
    size = {"kv_blocks": blocks} if blocks else {"kv_memory_mib": 8}
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": {name: {**pool, **size} for name, pool in pools.items()},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
        **sections,
    }
    done: list[Completion] = []
    with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(8) as pool:

        def ask(prompt: list[int]) -> Completion:
            return client.generate(prompt, max_tokens=12, ignore_eos=True, **(options or {}))

        prompts = prompts or first_prompts()
        for _ in range(turns):
            answers = list(pool.map(ask, prompts))
            done += answers
            prompts = [
                [*prompt, *answer.token_ids, 1 + i % 5, 7, 9]
                for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
    return done


def tokens(done: list[Completion]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in completion.choices] for completion in done]


def engine(prefix_cache: bool = True, **options: Any) -> dict[str, Any]:
    return {"max_batch_tokens": 64, "max_batch_requests": 8, "prefix_cache": prefix_cache, **options}


@pytest.fixture(scope="module")
def without(tiny_model: Path) -> list[list[tuple[int, ...]]]:
    done = conversations(tiny_model, {"both": {}}, engine=engine(prefix_cache=False))
    assert sum(c.usage.cached_tokens for c in done) == 0
    return tokens(done)


@pytest.mark.parametrize(
    ("pools", "blocks", "sections"),
    [
        ({"both": {}}, None, {}),
        ({"both": {}}, 20, {}),
        (SPLIT, None, {"transfer": {"transport": "inproc"}}),
        (SPLIT, None, {"transfer": {"transport": "zmq+tcp"}}),
        (SPLIT, 20, {"transfer": {"transport": "inproc", "expected_growth": 0}}),
        (SPLIT, 14, {"engine": engine(policy="prefill_first"), "transfer": {"expected_growth": 2}}),
    ],
    ids=["colocated", "colocated, evicting", "split", "split over zmq", "split, preempting", "split, crowded"],
)
def test_tokens_are_those_without_the_cache(
    tiny_model: Path,
    without: list[list[tuple[int, ...]]],
    pools: dict[str, Any],
    blocks: int | None,
    sections: dict[str, Any],
) -> None:
    done = conversations(tiny_model, pools, blocks=blocks, **{"engine": engine(), **sections})
    assert tokens(done) == without
    cached = sum(c.usage.cached_tokens for c in done)
    assert cached > 0
    if blocks is None:
        repeated = done[1::3]
        assert any(c.usage.cached_tokens == c.usage.prompt_tokens - 1 > 0 for c in repeated[:10])
        assert cached > sum(c.usage.prompt_tokens for c in done) / 2


@pytest.mark.parametrize("pools", [{"both": {}}, SPLIT], ids=["colocated", "split"])
def test_samples_are_those_without_the_cache(tiny_model: Path, pools: dict[str, Any]) -> None:
    """Few tokens: each that is sampled may lie so close to a border that the rounding of a batch decides."""
    sampled: dict[str, Any] = {"options": {"n": 3, "seed": 3, "temperature": 0.8}, "turns": 1}
    sampled["prompts"] = first_prompts()[::4]
    expected = conversations(tiny_model, {"both": {}}, **sampled, engine=engine(prefix_cache=False))
    done = conversations(tiny_model, pools, **sampled, engine=engine())
    assert tokens(done) == tokens(expected)
    assert any(len(set(choices)) == 3 for choices in tokens(done))


def test_a_conversation_moves_only_what_decode_does_not_hold(tiny_model: Path) -> None:
    moved: dict[bool, list[int]] = {}
    for on in (False, True):
        done = conversations(tiny_model, SPLIT, engine=engine(prefix_cache=on))
        moved[on] = [c.kv_bytes for c in done]
    first = len(moved[True]) // TURNS
    block_bytes = moved[False][0]
    assert (
        sum(moved[True]) < sum(moved[False]) / 2
    )  # about a third; requests that run beside each other may miss a block
    for before, kv_bytes in zip(done, moved[True][first:], strict=False):
        # The prompt's and the answer's full blocks are there; three new tokens and the last partial block are not.
        held = (before.usage.prompt_tokens + before.usage.completion_tokens - 1) // B
        whole = -(-(before.usage.prompt_tokens + before.usage.completion_tokens + 3) // B)
        assert kv_bytes <= (whole - held) * block_bytes
