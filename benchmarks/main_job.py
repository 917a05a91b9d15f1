"""The figures of the main job on this machine, as one JSON document.

python -m benchmarks.main_job --json results/bench.json

core      microseconds per token of the pure scheduler
engine    decode step at batch 1, 8, 32; prefill at 128 and 1024 tokens; one core, one thread
requests  one request at a time on Ray clusters, split and colocated in turn: TTFT, TBT,
          and what the hand-over of a 1024-token prompt adds before its first decode step
machine   what the memory and the arithmetic give in the same run, to read the rest against
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from baton.config import ClusterConfig, parse_config
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import EngineRequest
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from baton.timeline import Stage
from baton_cluster.ray_cluster import RayCluster
from baton_cluster.ray_session import RaySession
from baton_experiments.placement import with_placement
from baton_experiments.report import environment
from benchmarks.core_cost import core_cost
from benchmarks.machine import machine, timed

CONTEXT = 128
DECODE_STEPS = 16
HANDOFF_STAGES = (Stage.HANDOFF_WAIT, Stage.WIRE, Stage.DECODE_QUEUE)

console = Console(stderr=True, highlight=False)


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, p10 and p90 beside all samples."""
    p10, median, p90 = np.percentile(samples, (10, 50, 90))
    return {"median": float(median), "p10": float(p10), "p90": float(p90), "samples": samples}


def engine_figures(built: BuiltRunner, config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Step times of the engine loop (schedule, run, complete), without threads or sockets."""
    decode = [
        {"batch": batch, "context": CONTEXT, "step_ms": spread(_decode_steps(built, config, batch))}
        for batch in (1, 8, 32)
    ]
    prefill = []
    for tokens in (128, 1024):
        samples = [_prefill_ms(built, config, tokens) for _ in range(repeats)]
        figures = spread(samples)
        prefill.append({"tokens": tokens, "ms": figures, "tokens_per_s": tokens / figures["median"] * 1e3})
    return {"dtype": built.dtype, "decode": decode, "prefill": prefill}


def _core(built: BuiltRunner, config: ClusterConfig, budget: int) -> EngineCore:
    return EngineCore(
        num_blocks=built.kv_cache.num_blocks,
        block_size=config.engine.block_size,
        max_batch_tokens=budget,
        max_batch_requests=64,
        max_model_len=built.max_model_len,
        policy=POLICIES["mixed"](),
    )


def _submit(core: EngineCore, name: int, prompt: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens = [100 + (name * 7919 + i * 31) % 40_000 for i in range(prompt)]
    core.submit(EngineRequest(RequestKey(f"{name:032x}", 0), tokens, params), 0.0)


def _step(core: EngineCore, built: BuiltRunner) -> bool:
    plan = core.schedule(0.0)
    if plan is None:
        return False
    core.complete(plan, built.runner.run(plan), 0.0)
    return True


def _decode_steps(built: BuiltRunner, config: ClusterConfig, batch: int) -> list[float]:
    core = _core(built, config, budget=batch * CONTEXT)
    for i in range(batch):
        _submit(core, i, CONTEXT, DECODE_STEPS + 2)
    _step(core, built)
    _step(core, built)  # the first decode step allocates
    return [timed(lambda: _step(core, built)) * 1e3 for _ in range(DECODE_STEPS)]


def _prefill_ms(built: BuiltRunner, config: ClusterConfig, tokens: int) -> float:
    core = _core(built, config, budget=config.engine.max_batch_tokens)
    _submit(core, 0, tokens, 1)
    start = time.perf_counter()
    while _step(core, built):
        pass
    return (time.perf_counter() - start) * 1e3


def request_figures(config: ClusterConfig, repeats: int, progress: Any) -> dict[str, Any]:
    """One request at a time, split and colocated in turn, over real processes and sockets."""
    placements = ("split:1+1", "colocated:2")
    sizes = (128, 1024)
    samples: dict[tuple[str, int], list[dict[str, Any]]] = {(p, s): [] for p in placements for s in sizes}
    with (
        RaySession(config.ray, num_cpus=4, namespace="baton-bench") as session,
        RayCluster(with_placement(config, placements[0]), session=session, progress=progress) as split,
        RayCluster(with_placement(config, placements[1]), session=session, progress=progress) as both,
    ):
        clients = {placements[0]: split.client(), placements[1]: both.client()}
        for repeat in range(-1, repeats):  # the first round warms up and is not kept
            for (placement, size), kept in samples.items():
                progress(f"round {repeat + 1}/{repeats}: {placement}, prompt of {size}")
                # The prompts of no two sizes or rounds begin alike, or the prefix cache would answer.
                prompt = [100 + (repeat * 7919 + size * 13 + i * 31) % 40_000 for i in range(size)]
                done = clients[placement].generate(prompt, max_tokens=16, ignore_eos=True)
                if repeat >= 0:
                    times = done.token_times
                    stages = done.timeline.stages()
                    kept.append(
                        {
                            "ttft_ms": done.ttft_s * 1e3,
                            "first_gap_ms": (times[1] - times[0]) * 1e3,
                            "tbt_ms": [(b - a) * 1e3 for a, b in itertools.pairwise(times[1:])],
                            "handoff_ms": sum(stages.get(stage, 0.0) for stage in HANDOFF_STAGES) * 1e3,
                            "kv_bytes": done.kv_bytes,
                            "residual_ms": None if done.residual_s is None else done.residual_s * 1e3,
                        }
                    )
        for client in clients.values():
            client.close()
    points = []
    for (placement, size), kept in samples.items():
        points.append(
            {
                "placement": placement,
                "prompt_tokens": size,
                "ttft_ms": spread([k["ttft_ms"] for k in kept]),
                "first_gap_ms": spread([k["first_gap_ms"] for k in kept]),
                "tbt_ms": spread([gap for k in kept for gap in k["tbt_ms"]]),
                "handoff_ms": spread([k["handoff_ms"] for k in kept]) if placement.startswith("split") else None,
                "kv_bytes": kept[0]["kv_bytes"],
            }
        )
    return {"points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    config = parse_config(
        {
            "name": "baton-bench",
            "pools": {"prefill": {"kv_memory_mib": 512}, "decode": {"kv_memory_mib": 512}},
            "engine": {"max_batch_tokens": 256},
            "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
        }
    )
    with console.status("measuring") as line:
        line.update("machine and core")
        result: dict[str, Any] = {
            "environment": environment(),
            "machine": machine("float32", torch.get_num_threads()),
            "core": [core_cost(batch) for batch in (1, 8, 32)],
        }
        line.update("loading the model")
        built = build_runner(config, config.pools["decode"], progress=line.update)
        line.update("engine steps")
        result["engine"] = engine_figures(built, config, arguments.repeats)
        del built
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        result["requests"] = request_figures(config, arguments.repeats, line.update)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(_headline(result), indent=1))


def _headline(result: dict[str, Any]) -> dict[str, Any]:
    """The medians, for the terminal; the file has every sample."""
    return {
        "machine": result["machine"],
        "core_us_per_token": {str(c["batch"]): round(c["us_per_token"], 2) for c in result["core"]},
        "decode_step_ms": {str(d["batch"]): round(d["step_ms"]["median"], 1) for d in result["engine"]["decode"]},
        "prefill_tokens_per_s": {str(p["tokens"]): round(p["tokens_per_s"], 1) for p in result["engine"]["prefill"]},
        "requests": [
            {
                "placement": p["placement"],
                "prompt_tokens": p["prompt_tokens"],
                "ttft_ms": round(p["ttft_ms"]["median"], 1),
                "tbt_ms": round(p["tbt_ms"]["median"], 1),
                "handoff_ms": round(p["handoff_ms"]["median"], 2) if p["handoff_ms"] else None,
            }
            for p in result["requests"]["points"]
        ],
    }


if __name__ == "__main__":
    main()
