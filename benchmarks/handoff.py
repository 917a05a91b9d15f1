"""What a hand-over adds between a request's last prefill step and its first decode step.

Two processes, pinned to a core each, with workers that are real but for their engine: a step writes its blocks and
sleeps as long as a model might compute. A prefill worker and an idle decode worker for each of: the prompt in one chunk
or streamed by chunk, checksums on or off. Requests go through a router and a client, one at a time, the kinds in turn.

exposed_ms      from the mark FIRST_TOKEN (the last prefill step's end) to DECODE_START
last_chunk_ms   what moving the last chunk's blocks takes by itself, in the same run
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq

from baton.config import ClusterConfig, dump_config, parse_config
from baton.engine.build import BuiltRunner
from baton.engine.kv_cache import KVCache
from baton.engine.request import StepPlan
from baton.layout import KVLayout
from baton.protocol import ChatMessage
from baton.timeline import Mark
from baton_cluster.build import build_worker
from baton_cluster.specs import worker_specs
from benchmarks.machine import spread
from kv_transfer.registry import resolve_transport, shares_memory
from router.client import RouterClient
from router.server import RouterServer

CHUNK = 512
"""Tokens of a streamed prompt's steps."""
TOKEN_S = 100e-6
"""That a step takes for each of its tokens: longer than their blocks take on the wire."""
VOCAB = 1 << 16
START_S = 60.0


class PacedRunner:
    """A `Runner` that writes what it would compute, all pages of it, and takes its time. Every token is 1."""

    def __init__(self, kv_cache: KVCache):
        self.kv_cache = kv_cache

    def run(self, plan: StepPlan) -> list[int | None]:
        end = time.perf_counter() + TOKEN_S * sum(item.num_tokens for item in plan.items if item.num_tokens > 1)
        size = self.kv_cache.layout.block_size
        for item in plan.items:
            first, last = item.start // size, -(-(item.start + item.num_tokens) // size)
            for block in item.request.blocks[first:last]:
                self.kv_cache.tensor[block] = 1.0 + block
        time.sleep(max(0.0, end - time.perf_counter()))
        return [1 if item.samples else None for item in plan.items]

    def set_num_threads(self, num_threads: int) -> None:
        """Nothing is computed."""


class _Ids:
    """A `Text` for requests that are token ids."""

    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        raise NotImplementedError

    def detokenizer(self) -> _Ids:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def config_of(transport: str, layout: KVLayout, tokens: int, *, streamed: bool, checksums: bool) -> ClusterConfig:
    """One prefill and one decode worker; pools hold two prompts of `tokens` tokens."""
    pool = {"kv_blocks": 2 * layout.num_blocks_for(tokens) + 8, "device": "cpu"}
    return parse_config(
        {
            "launcher": "local",
            "pools": {"prefill": pool, "decode": pool},
            "engine": {
                "max_batch_tokens": CHUNK if streamed else tokens,
                "block_size": layout.block_size,
                "prefix_cache": False,
            },
            "transfer": {"transport": transport, "checksum": "xxh3" if checksums else "none"},
        }
    )


class Job(NamedTuple):
    """A worker to be run."""

    config: dict[str, Any]
    router_address: str
    layout: KVLayout
    max_tokens: int


def serve_workers(role: str, core: int, jobs: list[Job], pipe: Connection) -> None:
    """A process that hosts the `role` worker of each job on one core, until it is told to end."""
    with ExitStack() as stack:
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        for tree, router_address, layout, max_tokens in jobs:
            config = parse_config(tree)
            spec = next(s for s in worker_specs(config) if config.role_of(s.pool) == role)
            url = resolve_transport(config.transfer.transport, one_process=False)
            cache = KVCache(layout, config.pools[spec.pool].kv_blocks or 1, shared=shares_memory(url))
            cache.tensor.fill_(1.0)  # memory that nobody has touched is slow the first time
            built = BuiltRunner(
                runner=PacedRunner(cache),  # type: ignore[arg-type]
                spec=_Spec(),  # type: ignore[arg-type]
                kv_cache=cache,
                memory=None,  # type: ignore[arg-type]
                fingerprint="benchmark",
                engine="paced",
                dtype=layout.dtype,
                device="cpu",
                max_model_len=2 * max_tokens,
            )
            worker = build_worker(
                config, spec, built, router_address=router_address, context=context, transport=url, cores=(core,)
            )
            worker.start(START_S)
            stack.callback(worker.stop)
        pipe.send("ready")
        pipe.recv()


class _Spec:
    eos_token_ids: tuple[int, ...] = ()


@contextmanager
def clusters(configs: list[ClusterConfig], layout: KVLayout, tokens: int) -> Iterator[list[RouterClient]]:
    """A client for each configuration's cluster; all prefill workers in one process, all decode workers in another."""
    with ExitStack() as stack:
        routers = [RouterServer(config, fingerprint="benchmark", text=_Ids()) for config in configs]
        addresses = []
        for router in routers:
            addresses.append(router.start())
            stack.callback(router.stop)
        pipes = []
        for role, core in (("decode", 1), ("prefill", 0)):
            ours, theirs = multiprocessing.Pipe()
            jobs = [
                Job(dump_config(config), back, layout, tokens)
                for config, (_, back) in zip(configs, addresses, strict=True)
            ]
            process = multiprocessing.get_context("spawn").Process(
                target=serve_workers, args=(role, core, jobs, theirs), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, None)
            pipes.append(ours)
        for pipe in pipes:
            if not pipe.poll(START_S):
                raise RuntimeError("the workers of the benchmark did not start")
            pipe.recv()
        for router in routers:
            router.wait_ready(2, START_S)
        yield [stack.enter_context(RouterClient(front)) for front, _ in addresses]


def exposed(client: RouterClient, tokens: int, number: int) -> float:
    """Seconds for one request with a prompt of so many tokens."""
    prompt = [(number * 7919 + i) % VOCAB for i in range(tokens)]
    marks = client.generate(prompt, max_tokens=3, ignore_eos=True, timeout=START_S).timeline.marks
    return marks[Mark.DECODE_START] - marks[Mark.FIRST_TOKEN]


def measure_handoffs(
    transport: str, layout: KVLayout, lengths: list[int], repeats: int, move_s: dict[int, float]
) -> list[dict[str, Any]]:
    """Entries of `handoff` for one transport. `move_s`: seconds that moving the blocks of so many tokens takes."""
    longest = max(lengths)
    kinds = [(streamed, checksums) for streamed in (True, False) for checksums in (True, False)]
    configs = [config_of(transport, layout, longest, streamed=s, checksums=c) for s, c in kinds]
    samples: dict[tuple[int, bool, bool], list[float]] = {}
    with clusters(configs, layout, longest) as clients:
        number = 0
        for repeat in range(-2, repeats):
            for tokens in lengths:
                for (streamed, checksums), client in zip(kinds, clients, strict=True):
                    number += 1
                    seconds = exposed(client, tokens, number)
                    if repeat >= 0:
                        samples.setdefault((tokens, streamed, checksums), []).append(seconds)
    return [
        {
            "transport": transport,
            "tokens": tokens,
            "streamed": streamed,
            "checksums": checksums,
            "bytes": layout.num_blocks_for(tokens) * layout.block_bytes,
            "exposed_ms": spread(seconds)["median_ms"],
            "exposed_p10_ms": spread(seconds)["p10_ms"],
            "exposed_p90_ms": spread(seconds)["p90_ms"],
            "last_chunk_ms": move_s[min(tokens, CHUNK) if streamed else tokens] * 1e3,
            "samples_ms": [s * 1e3 for s in seconds],
        }
        for (tokens, streamed, checksums), seconds in samples.items()
    ]
