"""A whole split cluster whose pools transports cannot reach gives the tokens of a colocated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import baton_cluster.build
from baton.engine.kv_cache import KVCache
from baton.engine.staging import StagedBlocks
from kv_transfer.links import ZmqPeerLinks
from tests.golden.test_tiny_clusters import SPLIT, answers, corpus

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("transport", ["inproc", "zmq+tcp"])
def test_split_over_staged_pools_equals_colocated(
    tiny_model: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[StagedBlocks] = []

    def staged_links(*, pool: KVCache, **rest: Any) -> ZmqPeerLinks:
        pools.append(StagedBlocks(pool))
        return ZmqPeerLinks(pool=pools[-1], **rest)

    prompts = corpus()[:16]
    colocated = answers(tiny_model, {"both": {"kv_memory_mib": 8}}, "inproc", "mixed", prompts)
    monkeypatch.setattr(baton_cluster.build, "ZmqPeerLinks", staged_links)
    assert answers(tiny_model, SPLIT, transport, "mixed", prompts) == colocated
    assert all(pool.num_slots for pool in pools), "blocks went through host copies on both sides"
