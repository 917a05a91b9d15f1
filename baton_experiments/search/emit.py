"""A candidate as `cluster.yaml`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from baton.config import ClusterConfig, EngineConfig, RouterConfig, TransferConfig, parse_config
from baton_experiments.search.candidate import Candidate

EMITTED = "Found by `baton plan`"
"""How the first comment begins, by which a file is known as one that nobody wrote by hand."""
NO_TENSOR_PARALLELISM = (
    "the engine has no tensor parallelism yet: Ray will reserve all GPUs of such a worker, and only one is "
    "used; plan with --tp 1 what is to run today"
)


def is_emitted(text: str) -> bool:
    """Whether `cluster_yaml` wrote it."""
    return text.startswith(f"# {EMITTED}")


def cluster_yaml(
    candidate: Candidate,
    *,
    config: ClusterConfig,
    model: str,
    chunk_tokens: int,
    found: str,
    comments: Sequence[str] = (),
    kv_tokens: Mapping[int, int] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
) -> str:
    """A cluster file that `baton up` reads: the candidate's pools, and its simulation's settings that are not default.

    `found`: for what, in words. `kv_tokens`: what a worker's KV cache holds, by tensor parallel degree; None: what its
    memory does. Raises ConfigError if it would not be valid.
    """
    engine = _changed(config.engine, EngineConfig()) | {"max_batch_tokens": chunk_tokens}
    pools: dict[str, Any] = {}
    for role, pool in candidate.pools.items():
        pools[role] = {"workers": pool.workers} | ({"gpus": pool.tp} if device == "cuda" else {}) | {"device": device}
        if kv_tokens is not None:
            pools[role]["kv_blocks"] = max(1, kv_tokens[pool.tp] // config.engine.block_size)
    tree: dict[str, Any] = {
        "name": config.name,
        "model": {"source": model},
        "pools": pools,
        "engine": engine,
        "transfer": _changed(config.transfer, TransferConfig()),
        "router": _changed(config.router, RouterConfig()),
    }
    if config.model.max_model_len is not None:
        tree["model"]["max_model_len"] = config.model.max_model_len
    tree = {key: value for key, value in tree.items() if value}
    parse_config(tree)
    notes = [f"{EMITTED} {found}:", *comments]
    if any(pool.tp > 1 for pool in candidate.pools.values()):
        notes.append(f"Note: {NO_TENSOR_PARALLELISM}.")
    lines = [f"# {line}" for note in notes for line in textwrap.wrap(note, 110)]
    return "\n".join([*lines, yaml.safe_dump(tree, sort_keys=False)])


def _changed(section: Any, defaults: Any) -> dict[str, Any]:
    """What differs from the defaults."""
    return {
        name: getattr(section, name)
        for name in section.__struct_fields__
        if getattr(section, name) != getattr(defaults, name)
    }
