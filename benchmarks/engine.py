"""How fast one worker's engine is, against the limit of its machine.

python -m benchmarks.engine --batch 1,8,32 --context 128,1024 --prefill 128,1024 --json results/engine.json

Requests go through the router to one worker, whose engine thread has a core of its own (with `--threads` several), so
scheduling and sampling are in the figures, and they compare with those of any server:

decode    step = (time of 33 tokens - time of 1) / 32, for `batch` requests at once whose prompts are cached
prefill   time to the only token of a prompt that is not cached
cold      start of a process to its model loaded, on the same cores
host_ms   CPU time that a decode step of the largest batch spends outside of the model
floor_ms  the larger of bytes / bandwidth and operations / matrix rate, both measured in the same run: a step must read
          all weights and the batch's KV cache once, and do two operations per weight and row
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from baton.config import parse_config
from baton.engine.model_spec import ModelSpec, load_model_config
from baton.engine.weights import resolve_model
from baton_cluster.local import LocalCluster
from baton_experiments.report import environment
from benchmarks.machine import machine, spread, timed
from benchmarks.peers import TransformersPeer
from router.client import RouterClient

NEW_TOKENS = 33
WORKER = "both-0"

console = Console(stderr=True, highlight=False)


def numbers(text: str) -> list[int]:
    """`1,8,32` -> [1, 8, 32]."""
    return [int(part) for part in text.split(",") if part]


class Work:
    """Bytes and operations of a model's steps."""

    def __init__(self, spec: ModelSpec, dtype: str, measured: dict[str, Any]):
        self._element = 2 if dtype == "bfloat16" else 4
        self._layout = spec.kv_layout(1, dtype)
        heads = spec.num_heads * spec.head_dim
        keys = spec.num_kv_heads * spec.head_dim
        self._per_layer = spec.hidden_size * (2 * heads + 2 * keys + 3 * spec.intermediate_size)
        self._layers = spec.num_layers
        self._head = spec.vocab_size * spec.hidden_size
        self._attention = 4 * heads  # operations per layer, token and token attended to
        self._bytes_per_ms = measured["read_gb_per_s"] * 1e6
        self._operations_per_ms = measured["gemm_gflops"] * 1e6

    def decode_ms(self, batch: int, context: int) -> float:
        """The floor of one decode step."""
        weights = self._layers * self._per_layer + self._head
        read = weights * self._element + batch * context * self._layout.block_bytes
        operations = batch * (2 * weights + self._layers * self._attention * context)
        return max(read / self._bytes_per_ms, operations / self._operations_per_ms)

    def prefill_ms(self, tokens: int, budget: int) -> float:
        """The floor of a prompt computed in chunks of `budget` tokens, its first token sampled."""
        matrices = self._layers * self._per_layer
        attended = tokens * (tokens + 1) // 2
        operations = 2 * (tokens * matrices + self._head) + self._layers * self._attention * attended
        read = (-(-tokens // budget) * matrices + self._head) * self._element
        return max(read / self._bytes_per_ms, operations / self._operations_per_ms)


class HostClock:
    """Where an engine thread's time goes outside of the model: wraps calls between scheduler, runner and kernels.

    CPU time of the thread: router and client share its process here, and their turns in the interpreter do not count.
    """

    def __init__(self, worker: Any):
        self.seconds = {"schedule": 0.0, "build": 0.0, "sample": 0.0}
        self.steps = 0
        self._model_start = self._model_end = 0.0
        runner, core = worker._runner, worker.core
        kernels = getattr(runner.model, "_kernels", None)
        if kernels is None:
            inner = runner.model
            runner.model = _Proxy(inner, forward=self._around_model(inner.forward))
        else:
            runner.model._kernels = _Proxy(kernels, forward=self._around_model(kernels.forward))
        worker._runner = _Proxy(runner, run=self._around_run(runner.run))
        core.next_step = self._adding("schedule", core.next_step)
        core.finish_step = self._adding("schedule", core.finish_step)

    def per_step_ms(self) -> dict[str, float]:
        return {name: seconds / max(self.steps, 1) * 1e3 for name, seconds in self.seconds.items()}

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.steps = 0

    def _adding(self, name: str, call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            if result is not None:
                self.seconds[name] += time.thread_time() - start
            return result

        return wrapped

    def _around_model(self, call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            self._model_start = time.thread_time()
            result = call(*args)
            self._model_end = time.thread_time()
            return result

        return wrapped

    def _around_run(self, call: Any) -> Any:
        def wrapped(plan: Any) -> Any:
            start = time.thread_time()
            result = call(plan)
            self.seconds["build"] += self._model_start - start
            self.seconds["sample"] += time.thread_time() - self._model_end
            self.steps += 1
            return result

        return wrapped


COLD_START = """
import sys
from baton.config import parse_config
from baton.engine.build import build_runner
config = parse_config({"model": {"source": sys.argv[1], "dtype": sys.argv[2]}, "pools": {"both": {}}})
build_runner(config, config.pools["both"])
"""


def cold_start_s(model: str, dtype: str, repeats: int) -> list[float]:
    """Seconds of new processes that import, load the model and size the KV pool, as a worker does before it joins."""
    command = [sys.executable, "-c", COLD_START, model, dtype]
    return [timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(repeats)]


class _Proxy:
    def __init__(self, inner: Any, **replaced: Any):
        self.__dict__.update(_inner=inner, **replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Token ids; a longer prompt of the same seed begins with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(100, vocab) for _ in range(length)]


def ours_seconds(client: RouterClient, prompts: list[list[int]], max_tokens: int) -> float:
    """Time until the last of `prompts`, sent at once, has `max_tokens` tokens."""
    start = time.perf_counter()
    streams = [client.stream(p, max_tokens=max_tokens, ignore_eos=True) for p in prompts]
    for stream in streams:
        assert stream.result().usage.completion_tokens == max_tokens
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=numbers, default=[128, 1024], help="tokens of each prompt")
    parser.add_argument("--prefill", type=numbers, default=[128, 1024], help="tokens of the prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="cores of the worker")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--against", choices=("transformers",), help="interleave the same work by its `generate`")
    parser.add_argument("--against-limit", type=int, default=1024, help="largest batch * context for the other")
    parser.add_argument("--json", type=Path, default=Path("results/engine.json"), help="where the figures go")
    arguments = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    mine, rest = cores[-arguments.threads :], cores[: -arguments.threads] or cores
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(arguments.threads)
    measured = machine(arguments.dtype, arguments.threads)
    path = resolve_model(arguments.model)
    spec = load_model_config(path)
    work = Work(spec, arguments.dtype, measured)
    cold = cold_start_s(arguments.model, arguments.dtype, 3)
    peer = TransformersPeer(path, arguments.dtype, mine) if arguments.against else None
    os.sched_setaffinity(0, rest)  # the router, the client, and the threads they start

    longest = max([*arguments.context, *arguments.prefill]) + NEW_TOKENS
    blocks = (max(arguments.batch) + 4) * (longest // 16 + 2)
    budget = 512
    config = parse_config(
        {
            "name": "baton-bench-engine",
            "launcher": "local",
            "model": {"source": arguments.model, "dtype": arguments.dtype},
            "pools": {"both": {"kv_blocks": blocks, "cores": arguments.threads}},
            "engine": {
                "max_batch_tokens": budget,
                "max_batch_requests": max(arguments.batch),
                "kernels": arguments.kernels,
            },
            "liveness": {"heartbeat_s": 1.0, "timeout_s": 60.0},
        }
    )
    result: dict[str, Any] = {
        "environment": environment(),
        "machine": measured,
        "kernels": arguments.kernels,
        "cold_start_s": {"median": sorted(cold)[1], "samples": cold},
        "decode": [],
        "prefill": [],
    }
    with (
        LocalCluster(config, cores={WORKER: tuple(mine)}) as cluster,
        cluster.client() as client,
        Progress(console=console, transient=True) as bar,
    ):
        clock = HostClock(cluster.workers[WORKER])
        cells = [(b, c) for c in arguments.context for b in arguments.batch]
        task = bar.add_task("engine", total=(len(cells) + len(arguments.prefill)) * arguments.repeats)
        for tokens in arguments.prefill:
            samples, others = [], []
            for repeat in range(arguments.repeats):
                bar.update(task, description=f"prefill {tokens}", advance=1)
                samples.append(
                    ours_seconds(client, [prompt(10_000 + repeat * 997 + tokens, tokens, spec.vocab_size)], 1)
                )
                if peer is not None and tokens <= arguments.against_limit:
                    others.append(peer.seconds([prompt(repeat, tokens, spec.vocab_size)], 1))
            entry = {"tokens": tokens, **spread(samples), "floor_ms": work.prefill_ms(tokens, budget)}
            entry["tokens_per_s"] = tokens / entry["median_ms"] * 1e3
            result["prefill"].append(_with_peer(entry, others, samples))
        for batch, context in cells:
            prompts = [prompt(i, context, spec.vocab_size) for i in range(batch)]
            bar.update(task, description=f"decode {batch} x {context}")
            ours_seconds(client, prompts, 1)  # fills the prefix cache
            samples, others = [], []
            for repeat in range(arguments.repeats):
                bar.update(task, advance=1)
                one = ours_seconds(client, prompts, 1)
                clock.reset()
                samples.append((ours_seconds(client, prompts, NEW_TOKENS) - one) / (NEW_TOKENS - 1))
                if peer is not None and batch * context <= arguments.against_limit and repeat < 3:
                    one = peer.seconds(prompts, 1)
                    others.append((peer.seconds(prompts, NEW_TOKENS) - one) / (NEW_TOKENS - 1))
            entry = {
                "batch": batch,
                "context": context,
                **spread(samples),
                "floor_ms": work.decode_ms(batch, context),
                "host_ms": clock.per_step_ms(),
            }
            result["decode"].append(_with_peer(entry, others, samples))
    largest = max(result["decode"], key=lambda entry: (entry["batch"], -entry["context"]), default=None)
    result["host_ms"] = largest and largest["host_ms"]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


def _with_peer(entry: dict[str, Any], others: list[float], samples: list[float]) -> dict[str, Any]:
    if others:
        entry["transformers"] = {**spread(others), "ours_of_it": entry["median_ms"] / spread(others)["median_ms"]}
    entry["of_floor"] = entry["median_ms"] / entry["floor_ms"]
    entry["samples_ms"] = [s * 1e3 for s in samples]
    return entry


if __name__ == "__main__":
    main()
