"""The fake runner notices what a real model would only answer with wrong tokens."""

from __future__ import annotations

import pytest

from baton.engine.kv_cache import KVCache
from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.layout import KVLayout
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from tests.fakes import StubRunner, made_up_token


def prefilled(runner: StubRunner) -> EngineRequest:
    request = EngineRequest(RequestKey("a", 0), [5, 6, 7, 8, 9], SamplingParams())
    request.blocks = [3, 1]
    token = runner.run(StepPlan([StepItem(request, 5)]))[0]
    assert token == made_up_token(request)
    request.num_computed = 5
    request.tokens.append(token)
    return request


@pytest.fixture
def cache() -> KVCache:
    return KVCache(KVLayout(1, 1, 4, 8, "float32"), 5)


def test_right_kv_passes(cache: KVCache) -> None:
    runner = StubRunner(memory=cache, block_size=4)
    request = prefilled(runner)
    cache.block(4)[:] = cache.block(3)  # handed over to other blocks
    request.blocks = [4, 1]
    assert runner.run(StepPlan([StepItem(request, 1)])) == [made_up_token(request)]


def test_wrong_kv_is_noticed(cache: KVCache) -> None:
    runner = StubRunner(memory=cache, block_size=4)
    request = prefilled(runner)
    request.blocks = [0, 1]
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        runner.run(StepPlan([StepItem(request, 1)]))


def test_a_missing_block_is_noticed() -> None:
    runner = StubRunner(block_size=4)
    request = prefilled(runner)
    request.blocks = [3]
    with pytest.raises(AssertionError, match="no block for position 5"):
        runner.run(StepPlan([StepItem(request, 1)]))
