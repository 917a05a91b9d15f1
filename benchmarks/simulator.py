"""What the simulator costs: a trace of real conversations on one prefill and one decode worker, played in virtual time.

python -m benchmarks.simulator ../shared/workloads/traces/azure2023_conv.csv --json results/simulator.json

Everything is in it: the router's core, both workers' cores, the hand-over of every block, the clients. Step times are
DistServe's published ones for OPT-13B on an A100 with 80 GB (tensor parallel 1), whose KV cache holds 66,144 tokens.
The trace's times are stretched so that it asks for `SHARE` of what the pair can serve, which is measured first, by
giving it everything at once. Without a prefix cache prompts' tokens do not matter, so they are slices of one tuple.

A longer run repeats the trace. Memory is the peak of a process of its own for each length.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton.config import parse_config
from baton.engine.request import StepPlan
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton.step_log import StepShape
from baton_cluster.latency import LinkModel
from baton_cluster.simulated import Arrival, SimulatedCluster, SimulatedRequest
from baton_experiments.report import environment
from baton_experiments.workloads.readers import read_trace

SHARE = 0.6
"""Of the pair's capacity."""
LENGTHS = (5_000, 20_000, 80_000)
LAYOUT = KVLayout(num_layers=40, num_kv_heads=40, block_size=16, head_dim=128, dtype="float16")
KV_TOKENS = 66_144
LINK = LinkModel(latency_s=50e-6, bytes_per_s=25e9)
MAX_MODEL_LEN = 1 << 14
WORDS = tuple(range(MAX_MODEL_LEN))
CALIBRATION = 2_000
"""Requests by which the capacity is measured."""

console = Console(stderr=True, highlight=False)


class Opt13B(msgspec.Struct, frozen=True):
    """DistServe's model of its engine: milliseconds of prefills by tokens, of decodes by context and batch."""

    def step_s(self, plan: StepPlan) -> float:
        """A step of both takes what the two would take."""
        shape, ms = StepShape.of(plan), 0.0
        if shape.chunks:
            # Of a chunk the square of its end less that of its start, so that chunks add up to their prompt.
            squares = 2 * shape.chunk_attended - shape.chunk_tokens
            ms += 18.1 + 0.1019 * shape.chunk_tokens + 7.12e-6 * squares
        if shape.decodes > 95:
            ms += 7.166 + 0.00058 * shape.decode_context + 0.1583 * shape.decodes
        elif shape.decodes:
            ms += 19.9347 + 0.000627 * shape.decode_context + 0.0385 * shape.decodes
        return ms / 1e3


class Work:
    """The trace's rows again and again, each time later by its whole length."""

    def __init__(self, path: Path):
        self.rows = [(shape.at_s, shape.prompt_tokens, shape.output_tokens) for shape in read_trace(path)]
        self.span_s = self.rows[-1][0] + self.rows[-1][0] / len(self.rows)
        self.rate = len(self.rows) / self.span_s

    def arrivals(self, count: int, stretch: float) -> Iterator[Arrival]:
        """The first so many requests, times multiplied by `stretch`."""
        for at_s, prompt, output in islice(self._rows(), count):
            yield at_s * stretch, WORDS[:prompt], SamplingParams(max_tokens=output, ignore_eos=True)

    def all_at_once(self, count: int) -> Iterator[Arrival]:
        """About so many requests, from all over the trace."""
        for _, prompt, output in self.rows[:: max(1, len(self.rows) // count)]:
            yield 0.0, WORDS[:prompt], SamplingParams(max_tokens=output, ignore_eos=True)

    def _rows(self) -> Iterator[tuple[float, int, int]]:
        start_s = 0.0
        while True:
            for at_s, prompt, output in self.rows:
                yield start_s + at_s, prompt, output
            start_s += self.span_s


def make_cluster() -> SimulatedCluster:
    pool = {"kv_blocks": KV_TOKENS // LAYOUT.block_size}
    tree = {
        "pools": {"prefill": pool, "decode": pool},
        "engine": {"max_batch_tokens": 2048, "max_batch_requests": 256, "prefix_cache": False},
        "router": {"max_requests": 1 << 20},
    }
    return SimulatedCluster(
        parse_config(tree), Opt13B(), LINK, layout=LAYOUT, max_model_len=MAX_MODEL_LEN, next_token=1
    )


def capacity(work: Work) -> float:
    """Requests per second that the pair ends while there is always more to do."""
    ends: list[float] = []

    def on_end(request: SimulatedRequest) -> None:
        ends.append(request.ended_at or 0.0)

    make_cluster().play(work.all_at_once(CALIBRATION), on_end)
    first, last = len(ends) // 4, len(ends) * 3 // 4
    return (last - first) / (ends[last] - ends[first])


def play(work: Work, count: int, stretch: float) -> dict[str, Any]:
    """An entry of `runs`."""
    cluster = make_cluster()
    num_tokens, ttft_s = 0, list[float]()

    def on_end(request: SimulatedRequest) -> None:
        nonlocal num_tokens
        assert request.finish_reason == "length", request
        num_tokens += len(request.token_times)
        ttft_s.append(request.ttft_s or 0.0)

    start, cpu = time.perf_counter(), time.process_time()
    cluster.play(work.arrivals(count, stretch), on_end)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert len(ttft_s) == count
    decode = cluster.workers["decode-0"].core.engine
    return {
        "requests": count,
        "events": cluster.clock.num_events,
        "tokens": num_tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "requests_per_minute": count / cpu * 60,
        "us_per_token": cpu / num_tokens * 1e6,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "simulated_s": cluster.clock.now,
        "tokens_per_decode_step": num_tokens / decode.num_steps,
        "preemptions": decode.num_preemptions,
        "median_ttft_s": sorted(ttft_s)[count // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="in the Azure format, such as azure2023_conv.csv")
    parser.add_argument("--json", type=Path, default=Path("results/simulator.json"), help="where the figures go")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="requests of each run")
    parser.add_argument("--stretch", type=float, help="one run, printed, with the trace's times multiplied by this")
    arguments = parser.parse_args()
    work = Work(arguments.trace)
    if arguments.stretch is not None:
        print(json.dumps(play(work, arguments.lengths[0], arguments.stretch)))
        return
    most = capacity(work)
    stretch = work.rate / (SHARE * most)
    runs = []
    for length in arguments.lengths:
        with console.status(f"{length:,} requests"):
            command = [sys.executable, "-m", "benchmarks.simulator", str(arguments.trace)]
            command += ["--lengths", str(length), "--stretch", repr(stretch)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout))
        console.print(
            f"{length:,} requests: {runs[-1]['requests_per_minute']:,.0f} a minute of one core, "
            f"{runs[-1]['us_per_token']:.2f} us a token, {runs[-1]['peak_rss_mib']:.0f} MiB"
        )
    result = {
        "environment": environment(),
        "load": list(os.getloadavg()),
        "capacity_per_s": most,
        "rate_per_s": SHARE * most,
        "share_of_capacity": SHARE,
        "stretch": stretch,
        "runs": runs,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
