"""What the router adds to a request, and what a streamed token costs it, over HTTP and by the native protocol.

python -m benchmarks.router --json results/router.json [--quick]

The router is a process of its own on a core of its own; workers without an engine that answer at once, and clients that
do no more than they must, share the other cores (`benchmarks.router_ends`, `benchmarks.router_load`). Requests are
conversations of two messages, answers are text of the demo model's vocabulary, so both directions of its tokenizer are
part of it. Every prompt is handed from a prefill to a decode worker.

http, native     at 1, 64, 512 streams, native ones 64 to a connection, and once each with its own. Two kinds of run:
                 paced      the workers make a step each `step_ms`, a token for every stream, as an engine does, and
                            clients wait up to a step before they ask again. CPU time of the router's process, less
                            what it takes when idle, at two lengths of answers: so much for a request, so much for a
                            token. TTFT at the shorter one
                 saturated  no pauses anywhere, 16 tokens an answer: `requests_per_s`
added_ttft_ms    a client's TTFT less the median of `direct`: the same Submit to the same worker, without a router
placement        `benchmarks.placement`
idle_streams     1,000 streams that have had a token and wait for the next
memory           of the router over many requests, half of them over HTTP; new connections every so many
stuck_client     63 streams beside one whose client has long stopped reading, and without it
async_client     CPU time of `AsyncRouterClient`'s own process per token
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from baton.codec import Codec
from baton.engine.weights import resolve_model
from baton.protocol import Join, RequestKey, Submit, Tokens, ToRouterFromWorker, ToWorker
from baton.sampling_params import SamplingParams
from baton_experiments.report import environment
from benchmarks.placement import POLICIES, WORKERS, placement_cost
from benchmarks.router_ends import RouterProcess, StubProcess, cluster
from benchmarks.router_load import (
    MESSAGES,
    Load,
    Run,
    StuckHttpClient,
    StuckNativeClient,
    check_http,
    check_native,
    http_load,
    model_of,
    native_load,
)
from router.async_client import AsyncRouterClient
from router.text import TokenizerText

ANSWER = (
    "In a relay race each runner carries a baton for a part of the way — and hands it over to the next, at full speed, "
    "within twenty metres. A café owner in Zürich once told me: “It is not the runners who win, it is the hand-over.”\n"
) * 4
STEP_MS = {1: 2.0, 64: 20.0, 512: 100.0}
LENGTHS = (16, 256)
"""Tokens of an answer, on average. Far apart, so that a request and a token can be told apart."""
STREAMS_PER_WORKER = 64
"""And per native connection."""
SATURATED_TOKENS = 16
IDLE_STREAMS = 1000
STUCK_TOKENS = 100_000
FLAT_BYTES_PER_REQUEST = 100.0
"""Memory counts as flat below: 5 MB over 50,000 requests."""
BARS = {
    "added_ttft_ms_p50": 3.0,
    "added_ttft_ms_p99": 10.0,
    "http cpu_us_per_token": 60.0,
    "native cpu_us_per_token": 15.0,
    "idle_streams cpu_percent": 5.0,
    "placement 64": 50.0,
    "placement 1000": 1000.0,
}
"""Upper limits; all but the last three at 64 streams."""

console = Console(stderr=True, highlight=False)


class Bench:
    """The machine's parts and what the runs share. `seconds`: how long each of them measures."""

    def __init__(self, seconds: float, *, progress: Callable[[str], None] = lambda what: None):
        self.seconds = seconds
        self.progress = progress
        cores = sorted(os.sched_getaffinity(0))
        self.router_cores, self.other_cores = cores[:1], cores[1:] or cores
        self.model = str(resolve_model("demo"))
        self.text = TokenizerText(self.model)
        self.ids = self.text.encode(ANSWER)
        self.idle_share = 0.0
        """Of a core, that a router without requests takes."""
        self.direct: dict[str, float] = {}

    def cluster(self, streams: int) -> Any:
        workers = max(1, -(-streams // STREAMS_PER_WORKER))
        return cluster(self.router_cores, self.other_cores, model=self.model, ids=self.ids, num_decode=workers)

    def said(self, tokens: int) -> str:
        """The text of an answer of so many tokens; as a stream shows it, so that its end may lack a half character."""
        ids = [self.ids[i % len(self.ids)] for i in range(tokens)]
        return self.text.decode(ids)

    def check(self, router: RouterProcess) -> None:
        """That the answers which are counted are right."""
        for tokens in (1, 2, 100):
            check_native(router.address, tokens, self.said(tokens))
            check_http(router.url, model_of(router.url), tokens, self.said(tokens))

    def load(self, api: str, router: RouterProcess, load: Load, mark: Callable[[], None], every: Any = None) -> Run:
        if api == "http":
            return http_load(router.url, load, mark, every)
        return native_load(router.address, load, mark, every)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(seconds), (50, 99)) * 1e3 if len(seconds) else (float("nan"), float("nan"))
    return {"p50": float(p50), "p99": float(p99)}


# --- without a router -----------------------------------------------------------------------------------


def direct_round_trip(bench: Bench) -> dict[str, Any]:
    """From a Submit sent to a stub to its first token, in milliseconds, one at a time."""
    codec_in: Codec[Any] = Codec(ToRouterFromWorker)
    codec_out: Codec[Any] = Codec(ToWorker)
    prompt = tuple(bench.text.encode(" ".join(content for _, content in MESSAGES)))
    samples: list[float] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as back:
        port = back.bind_to_random_port("tcp://127.0.0.1")
        stub = StubProcess(bench.other_cores, f"tcp://127.0.0.1:{port}", bench.ids, 1)
        try:
            peer = b""
            while not peer:
                sender, data = back.recv_multipart()
                message = codec_in.decode(data)
                peer = sender if type(message) is Join and message.worker.role == "prefill" else b""
            for i in range(int(bench.seconds * 100)):
                submit = codec_out.encode(Submit(RequestKey(f"{i:032x}", 0), prompt, SamplingParams(max_tokens=1)))
                sent_at = time.monotonic()
                back.send_multipart([peer, submit])
                while type(codec_in.decode(back.recv_multipart()[1])) is not Tokens:
                    pass
                samples.append(time.monotonic() - sent_at)
        finally:
            stub.close()
    return percentiles_ms(samples) | {"samples": len(samples)}


# --- http and native ------------------------------------------------------------------------------------


def measure_streams(bench: Bench, api: str, streams: int, connections: int) -> dict[str, Any]:
    """An entry of `http` or `native`."""
    step_s = STEP_MS[streams] / 1e3
    runs: list[dict[str, Any]] = []
    with bench.cluster(streams) as (router, stub):
        bench.check(router)
        for tokens in LENGTHS:
            bench.progress(f"{api}, {streams} streams, answers of {tokens}")
            stub.pace(step_s)
            load = Load(
                streams,
                tokens,
                bench.seconds,
                warm_s=min(1.5 * tokens * step_s + 0.5, bench.seconds),
                think_s=step_s,
                connections=connections,
            )
            runs.append(_paced(bench, api, load, router, stub) | {"tokens": tokens})
        bench.progress(f"{api}, {streams} streams, saturated")
        stub.pace(0.0)
        load = Load(streams, SATURATED_TOKENS, bench.seconds / 2, exact=True, connections=connections)
        saturated = _paced(bench, api, load, router, stub)
    work = np.array([[run["requests"], run["tokens_sent"]] for run in runs], dtype=float)
    cpu_us = np.array([run["cpu_s"] - bench.idle_share * run["seconds"] for run in runs]) * 1e6
    per_request, per_token = np.linalg.solve(work, cpu_us)
    ttft = runs[0]["ttft_ms"]
    return {
        "streams": streams,
        "connections": connections if api == "native" else streams,
        "requests_per_s": saturated["answers"] / saturated["seconds"],
        "saturated_cpu_share": saturated["cpu_s"] / saturated["seconds"],
        "added_ttft_ms_p50": ttft["p50"] - bench.direct["p50"],
        "added_ttft_ms_p99": ttft["p99"] - bench.direct["p50"],
        "cpu_us_per_request": float(per_request),
        "cpu_us_per_token": float(per_token),
        "step_ms": STEP_MS[streams],
        "runs": runs,
        "saturated": saturated,
    }


def _paced(bench: Bench, api: str, load: Load, router: RouterProcess, stub: StubProcess) -> dict[str, Any]:
    """One run, as it was read at the two ends of its measured seconds."""
    seen: list[tuple[float, int, int]] = []

    def mark() -> None:
        cpu_s, _ = router.usage()
        seen.append((cpu_s, *stub.counts()))

    run = bench.load(api, router, load, mark)
    cpu_s, requests, tokens = (after - before for before, after in zip(*seen, strict=True))
    return {
        "seconds": run.seconds,
        "cpu_s": cpu_s,
        "cpu_share": cpu_s / run.seconds,
        "requests": requests,
        "tokens_sent": tokens,
        "answers": run.answers,
        "ttft_ms": percentiles_ms(run.ttft_s) | {"samples": len(run.ttft_s)},
        "gap_ms": percentiles_ms(run.gap_s) | {"samples": len(run.gap_s)},
    }


# --- the rest -------------------------------------------------------------------------------------------


def measure_idle(bench: Bench, streams: int) -> dict[str, Any]:
    """`idle_streams`, and for `Bench.idle_share` the same without any."""
    found: dict[str, Any] = {"streams": streams}
    with bench.cluster(streams) as (router, stub):
        bench.progress("router without requests")
        time.sleep(1.0)
        before, _ = router.usage()
        time.sleep(bench.seconds / 2)
        bench.idle_share = (router.usage()[0] - before) / (bench.seconds / 2)
        found["without_streams_cpu_percent"] = 100 * bench.idle_share
        for api in ("http", "native"):
            bench.progress(f"{streams} idle streams, {api}")
            stub.pace(0.2)
            seen: list[float] = []

            def mark(seen: list[float] = seen) -> None:
                if not seen:
                    stub.pace(None)
                    time.sleep(0.5)  # for the last step's tokens to be through
                seen.append(router.usage()[0])

            connections = -(-streams // STREAMS_PER_WORKER)
            load = Load(streams, 100_000, bench.seconds, exact=True, hold=True, connections=connections)
            run = bench.load(api, router, load, mark)
            found[f"{api}_cpu_percent"] = 100 * (seen[1] - seen[0]) / run.seconds
            found[f"{api}_connections"] = streams if api == "http" else connections
    return found


def measure_memory(bench: Bench, requests: int) -> dict[str, Any]:
    """`memory`: resident bytes after each tenth, and by how much they grow per request after the first two tenths."""
    part = requests // 10
    checkpoints: list[dict[str, int]] = []
    with bench.cluster(64) as (router, stub):
        stub.pace(0.0)
        for i in range(10):
            api = "http" if i % 2 else "native"
            bench.progress(f"memory after {i * part} of {requests} requests")
            load = Load(64, 4, 0.0, warm_s=0.1, exact=True, requests=part)
            bench.load(api, router, load, lambda: None)
            checkpoints.append({"requests": (i + 1) * part, "rss": router.usage()[1]})
    late = checkpoints[2:]
    slope = np.polyfit([c["requests"] for c in late], [c["rss"] for c in late], 1)[0]
    grown = late[-1]["rss"] - late[0]["rss"]
    return {"requests": requests, "checkpoints": checkpoints, "bytes_per_request": float(slope), "grown": grown}


def measure_stuck(bench: Bench, streams: int = 64) -> dict[str, Any]:
    """`stuck_client`: times of all streams but one, without and with that one stuck."""
    found: dict[str, Any] = {"streams": streams - 1}
    step_s = STEP_MS[streams] / 1e3
    for api in ("http", "native"):
        load = Load(streams - 1, 32, bench.seconds, warm_s=1.0, think_s=step_s)
        with bench.cluster(streams) as (router, stub):
            stub.pace(step_s)
            bench.progress(f"{api}: without a stuck client")
            found[f"{api}_without"] = _paced(bench, api, load, router, stub)
            bench.progress(f"{api}: beside a stuck client")
            stub.pace(0.001)
            stuck = (
                StuckHttpClient(router.url, STUCK_TOKENS)
                if api == "http"
                else StuckNativeClient(router.address, STUCK_TOKENS)
            )
            time.sleep(2.0)  # its answer fills what the kernel and the router buffer for it
            stub.pace(step_s)
            found[f"{api}_with"] = _paced(bench, api, load, router, stub)
            stuck.close()
    return found


def measure_async_client(bench: Bench, streams: int = 64) -> dict[str, Any]:
    """`async_client`: tokens of many streams over one connection, each awaited."""
    tokens = int(bench.seconds * 50)
    bench.progress("AsyncRouterClient")

    async def run(address: str) -> float:
        async with AsyncRouterClient(address) as client:
            prompt = [{"role": role, "content": content} for role, content in MESSAGES]
            answers = [client.stream(prompt, max_tokens=tokens) for _ in range(streams)]
            before = time.process_time()
            await asyncio.gather(*(answer.result() for answer in answers))
            return time.process_time() - before

    with bench.cluster(streams) as (router, stub):
        stub.pace(0.01)
        cpu_s = asyncio.run(run(router.address))
    return {"streams": streams, "tokens": tokens, "cpu_us_per_token": cpu_s * 1e6 / (streams * tokens)}


def measure_placement(bench: Bench) -> list[dict[str, Any]]:
    entries = []
    for policy in POLICIES:
        bench.progress(f"placement: {policy}")
        entries += [placement_cost(workers, policy, int(bench.seconds / 2)) for workers in WORKERS]
    return entries


# --- the command ----------------------------------------------------------------------------------------


def measure_all(bench: Bench, requests: int, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The whole document; `keep` gets it after each part. `requests`: for `memory`."""
    result: dict[str, Any] = {
        "environment": environment(),
        "machine": {"router_cores": bench.router_cores, "other_cores": bench.other_cores, "load": os.getloadavg()[0]},
        "seconds": bench.seconds,
        "direct": direct_round_trip(bench),
    }
    bench.direct = result["direct"]
    result["idle_streams"] = measure_idle(bench, IDLE_STREAMS)
    keep(result)
    for api in ("http", "native"):
        result[api] = []
        for streams in STEP_MS:
            connections = -(-streams // STREAMS_PER_WORKER)
            result[api].append(measure_streams(bench, api, streams, connections))
            keep(result)
    result["native"].append(measure_streams(bench, "native", 64, 64))
    result["stuck_client"] = measure_stuck(bench)
    result["async_client"] = measure_async_client(bench)
    keep(result)
    result["placement"] = measure_placement(bench)
    keep(result)
    result["memory"] = measure_memory(bench, requests)
    keep(result)
    return result


NUM_STEPS = 3 * 7 + 1 + 2 + 4 + 1 + len(POLICIES) + 10
"""Times that the progress is told of something new."""


def tables(result: dict[str, Any]) -> list[Table]:
    """For the terminal; figures beyond their bars are red."""

    def shown(value: float, bar: float | None = None, digits: int = 2) -> str:
        text = f"{value:.{digits}f}"
        if bar is None:
            return text
        return f"{text} [green]≤{bar:g}[/]" if value <= bar else f"{text} [red]>{bar:g}[/]"

    streams = Table(title="The router's share, by streams", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = (
        "\nAPI",
        "\nstreams",
        "\nconn.",
        "\nreq./s",
        "added TTFT\np50 ms",
        "\np99 ms",
        "CPU us\n/request",
        "\n/token",
    )
    for name in names:
        streams.add_column(name, justify="right", no_wrap=True)
    for api in ("http", "native"):
        for entry in result[api]:
            barred = entry["streams"] == 64 and (api == "http" or entry["connections"] == 1)
            streams.add_row(
                api,
                str(entry["streams"]),
                str(entry["connections"]),
                f"{entry['requests_per_s']:.0f}",
                shown(entry["added_ttft_ms_p50"], BARS["added_ttft_ms_p50"] if barred else None),
                shown(entry["added_ttft_ms_p99"], BARS["added_ttft_ms_p99"] if barred else None),
                shown(entry["cpu_us_per_request"], None, 0),
                shown(entry["cpu_us_per_token"], BARS[f"{api} cpu_us_per_token"] if barred else None, 1),
            )
    rest = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 2, 0, 0))
    idle, memory, stuck = result["idle_streams"], result["memory"], result["stuck_client"]
    for api in ("http", "native"):
        share = shown(idle[f"{api}_cpu_percent"], BARS["idle_streams cpu_percent"])
        rest.add_row(f"{idle['streams']} idle streams, {api}", f"{share} % of a core")
    for api in ("http", "native"):
        without, beside = (stuck[f"{api}_{which}"] for which in ("without", "with"))
        rest.add_row(
            f"beside a stuck client, {api}",
            f"TTFT p99 {beside['ttft_ms']['p99']:.1f} ms (without {without['ttft_ms']['p99']:.1f}), "
            f"gap p99 {beside['gap_ms']['p99']:.1f} ms ({without['gap_ms']['p99']:.1f})",
        )
    rest.add_row(
        f"memory over {memory['requests']} requests",
        f"{shown(memory['bytes_per_request'], FLAT_BYTES_PER_REQUEST, 0)} bytes per request; "
        f"{memory['checkpoints'][-1]['rss'] / 2**20:.0f} MiB",
    )
    rest.add_row("AsyncRouterClient", f"{result['async_client']['cpu_us_per_token']:.1f} us per token")
    for workers in WORKERS:
        costs = {e["policy"]: e["us_per_decision"] for e in result["placement"] if e["workers"] == workers}
        slowest = max(costs, key=lambda policy: costs[policy])
        figure = shown(costs[slowest], BARS.get(f"placement {workers}"), 1)
        rest.add_row(f"placement among {workers}", f"{figure} us for {slowest}, the slowest policy")
    return [streams, rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--quick", action="store_true", help="short runs; the figures are rough")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))

    def keep(result: dict[str, Any]) -> None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Nothing is drawn but between runs: a thread that redraws would share the clients' core.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=NUM_STEPS)

        def tell(what: str) -> None:
            progress.update(task, description=what, advance=1, refresh=True)

        bench = Bench(2.0 if arguments.quick else 8.0, progress=tell)
        os.sched_setaffinity(0, bench.other_cores)
        result = measure_all(bench, 10_000 if arguments.quick else 50_000, keep)
    for table in tables(result):
        Console().print(table)


if __name__ == "__main__":
    main()
