"""Placement policies, each a small class: what a worker costs for the prefill or the decode of a request."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from baton.config import ClusterConfig
from router.policies.base import Policy
from router.policies.load import LeastLoaded, LeastOutstandingTokens
from router.policies.predicted import KvAware, SloAware
from router.policies.session import Session
from router.policies.turns import PowerOfTwo, Random, RoundRobin


def make_policy(name: str, config: ClusterConfig) -> Policy:
    """The policy of this name (`router.prefill_policy`, `router.decode_policy`)."""
    step_tokens = config.engine.max_batch_tokens
    seed = xxh3_64_intdigest(config.name.encode())
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "power_of_two":
            return PowerOfTwo(seed)
        case "least_outstanding_tokens":
            return LeastOutstandingTokens()
        case "kv_aware":
            return KvAware()
        case "session":
            return Session(step_tokens)
        case "slo_aware":
            return SloAware(config.router.slo_ttft_ms, config.router.slo_tbt_ms)
    assert name == "least_loaded", name
    return LeastLoaded(step_tokens)
