"""`/metrics`: what the router knows, in Prometheus's format, under vLLM's names where vLLM has one.

Reads the core and what was measured when it is scraped, and counts only what no other keeps (`Metrics.on_action`).
A scrape is written in parts, between which the event loop goes on. Must not know HTTP or sockets.

Labels take few values: workers, pools, and words of our own; never what a client made up. `engine` is the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.config import ClusterConfig
from baton.protocol import Replace, Submit, WorkerStatus
from baton.timeline import Mark, RequestTimeline, Stage
from router.actions import RequestDone, RequestFailed, RouterAction, SendWorker
from router.core import RouterCore
from router.latencies import REQUEST_BUCKETS, TOKEN_BUCKETS, Histogram, Latencies
from router.overview import pool_states

PART_S = 0.001
"""So long a scrape holds the loop at a time, or as long as it takes to read one metric of all workers."""
PART_LINES = 64
COUNT_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Of numbers of tokens, 1 to 500,000; vLLM's end at the model's length."""
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
STAGE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0),
)
FINISH_REASONS = ("stop", "length", "abort", "error")
BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}
WORKER_STATES = ("ready", "draining", "lost")

PER_WORKER: tuple[tuple[Callable[..., Any], str, str, Callable[[WorkerStatus], float]], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Requests in the engine's batches.", lambda w: w.load.num_running),
    (GaugeMetricFamily, "num_requests_waiting", "Requests that wait in the engine.", lambda w: w.load.num_waiting),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.", lambda w: _usage(w)),
    (
        *(CounterMetricFamily, "prefix_cache_queries", "Tokens looked for in the prefix cache."),
        lambda w: w.load.cache_queried_tokens,
    ),
    (CounterMetricFamily, "prefix_cache_hits", "Of those, tokens found.", lambda w: w.load.cache_hit_tokens),
    (GaugeMetricFamily, "pending_tokens", "Prompt tokens not computed yet.", lambda w: w.load.num_pending_tokens),
    (GaugeMetricFamily, "outstanding", "Parts of requests that have not ended there.", lambda w: w.num_outstanding),
    (CounterMetricFamily, "num_preemptions", "Requests that gave blocks up.", lambda w: w.load.num_preemptions),
    (CounterMetricFamily, "engine_steps", "Engine steps completed.", lambda w: w.load.num_steps),
    (CounterMetricFamily, "transfer_sent_bytes", "Bytes of KV sent to peers.", lambda w: w.load.bytes_sent),
    (CounterMetricFamily, "transfer_received_bytes", "Bytes of KV received.", lambda w: w.load.bytes_received),
    (GaugeMetricFamily, "decode_step_seconds", "A decode step lately; 0: unknown.", lambda w: w.load.decode_step_s),
    (GaugeMetricFamily, "prefill_token_seconds", "A prompt token lately.", lambda w: w.load.prefill_token_s),
    (GaugeMetricFamily, "kv_blocks_stranded", "KV blocks nobody accounts for.", lambda w: w.load.stranded_blocks),
    (
        *(CounterMetricFamily, "kv_blocks_stranded_seconds", "Their number, summed over time."),
        lambda w: w.load.stranded_block_seconds,
    ),
    (
        *(GaugeMetricFamily, "worker_breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open."),
        lambda w: BREAKER_STATES[w.breaker],
    ),
    (GaugeMetricFamily, "worker_silence_seconds", "Since it was last heard of.", lambda w: w.seen_s_ago),
)


def _usage(worker: WorkerStatus) -> float:
    load = worker.load
    return 1.0 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0


class Metrics(Collector):
    """Of one router; in a registry of its own. `counters`: errors that were survived, by kind."""

    def __init__(
        self, config: ClusterConfig, model_name: str, core: RouterCore, latencies: Latencies, counters: Counter[str]
    ):
        self.registry = CollectorRegistry()
        self.http_answers: Counter[tuple[str, str, int]] = Counter()
        """Answers of the HTTP server by path (of the route, not of the client), method and status."""
        self._config = config
        self._model = model_name
        self._core = core
        self._latencies = latencies
        self._counters = counters
        self._prefix = config.http.metrics_prefix
        self._policies = (str(config.router.prefill_policy), str(config.router.decode_policy))
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._placed: Counter[bool] = Counter()
        """Attempts, by whether nothing is handed over."""
        self._num_retries = 0
        self._num_replaced = 0
        self._kv_bytes = 0
        self._cached_tokens = 0
        self._queue = Histogram(REQUEST_BUCKETS)
        self._prefill = Histogram(REQUEST_BUCKETS)
        self._decode = Histogram(REQUEST_BUCKETS)
        self._inference = Histogram(REQUEST_BUCKETS)
        self._time_per_token = Histogram(TOKEN_BUCKETS)
        self._prompt_tokens = Histogram(COUNT_BUCKETS)
        self._generated_tokens = Histogram(COUNT_BUCKETS)
        self._max_tokens = Histogram(COUNT_BUCKETS)
        self._n = Histogram(N_BUCKETS)
        self._stages = {stage: Histogram(STAGE_BUCKETS) for stage in Stage}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # --- what is counted as it happens --------------------------------------------------------------

    def on_action(self, action: RouterAction, now: float) -> None:
        kind = type(action)
        if kind is SendWorker:
            message = action.message  # type: ignore[union-attr]
            if type(message) is Submit:
                self._on_submit(message)
            elif type(message) is Replace:
                self._num_replaced += 1
        elif kind is RequestDone:
            self._on_done(action)  # type: ignore[arg-type]
        elif kind is RequestFailed:
            self._on_failed(action)  # type: ignore[arg-type]

    def _on_submit(self, message: Submit) -> None:
        self._placed[message.decode is None] += 1
        if message.key.attempt:
            self._num_retries += 1
        if message.key.attempt or message.key.sample:
            return  # the request was seen before
        self._max_tokens.observe(message.sampling.max_tokens)
        request = self._core.request(message.key.request_id)
        if request is not None:
            self._n.observe(len(request.owner.samples))

    def _on_done(self, done: RequestDone) -> None:
        self._ended[done.finish_reason] += 1
        self._kv_bytes += done.kv_bytes
        self._cached_tokens += done.usage.cached_tokens
        if done.finish_reason == "abort":
            return  # its times are those of whoever left
        usage, marks = done.usage, done.marks
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._generated_tokens.observe(usage.completion_tokens)
        for stage, seconds in RequestTimeline(marks=marks).stages().items():
            self._stages[stage].observe(seconds)
        times = [marks.get(mark) for mark in (Mark.RECEIVED, Mark.PREFILL_START, Mark.FIRST_TOKEN, Mark.FINISHED)]
        if any(at is None for at in times):
            return
        received, started, first, last = (float(at) for at in times if at is not None)
        self._queue.observe(started - received)
        self._prefill.observe(first - started)
        self._decode.observe(last - first)
        self._inference.observe(last - started)
        following = usage.completion_tokens / done.n - 1
        if following > 0:
            self._time_per_token.observe((last - first) / following)

    def _on_failed(self, failed: RequestFailed) -> None:
        if self._core.record(failed.request_id) is not None:
            self._ended["error"] += 1
            self._failed[failed.code] += 1
        else:
            self._refused[failed.code] += 1

    # --- scrapes ------------------------------------------------------------------------------------

    async def scrape(self) -> bytes:
        """All metrics in Prometheus's text format. Other work goes on in between."""
        parts, since = [], time.perf_counter()
        for family in self.registry.collect():
            for part in text_of(family):
                parts.append(part)
                if time.perf_counter() - since > PART_S:
                    await asyncio.sleep(0)
                    since = time.perf_counter()
        return "".join(parts).encode()

    def collect(self) -> Iterator[Metric]:
        """For the registry. Each family is as of when it is asked for."""
        self._latencies.settle()
        yield from self._of_workers()
        yield from self._of_requests()
        yield from self._of_router()

    def _of_workers(self) -> Iterator[Metric]:
        workers = self._core.worker_statuses(time.monotonic())
        for kind, name, text, value in PER_WORKER:
            family = self._labelled(kind, name, text, "engine")
            for worker in workers:
                family.add_metric((self._model, worker.info.worker_id), value(worker))
            yield family
        blocks = self._labelled(
            GaugeMetricFamily, "kv_blocks", "KV blocks: held, cached (free, with content) or free.", "engine", "state"
        )
        for worker in workers:
            load = worker.load
            cached = min(load.blocks_cached, load.blocks_free)
            numbers = {
                "held": load.blocks_total - load.blocks_free,
                "cached": cached,
                "free": load.blocks_free - cached,
            }
            for state, num in numbers.items():
                blocks.add_metric((self._model, worker.info.worker_id, state), num)
        yield blocks
        labels = ("engine", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
        cache = self._labelled(GaugeMetricFamily, "cache_config_info", "The KV pool; always 1.", *labels)
        caching = str(self._config.engine.prefix_cache)
        for worker in workers:
            layout, num_blocks = worker.info.layout, str(worker.info.num_blocks)
            values = (worker.info.worker_id, str(layout.block_size), num_blocks, layout.dtype, caching)
            cache.add_metric((self._model, *values), 1)
        yield cache

    def _of_requests(self) -> Iterator[Metric]:
        latencies = self._latencies
        count, histogram = self._count, self._histogram
        yield count("prompt_tokens", "Prompt tokens of requests that got a token.", latencies.prompt_tokens)
        yield count("generation_tokens", "Tokens delivered.", latencies.generated_tokens)
        yield count("prompt_tokens_cached", "Prompt tokens that prefill had cached.", self._cached_tokens)
        success = self._labelled(CounterMetricFamily, "request_success", "Requests that ended.", "finished_reason")
        for reason in FINISH_REASONS:
            success.add_metric((self._model, reason), self._ended[reason])
        yield success
        yield histogram("time_to_first_token_seconds", "Arrival to first token delivered.", latencies.ttft.ever)
        yield histogram("inter_token_latency_seconds", "Between two tokens of a sample, delivered.", latencies.tbt.ever)
        yield histogram("e2e_request_latency_seconds", "Arrival to end.", latencies.e2e.ever)
        yield histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", self._time_per_token
        )
        yield histogram("request_queue_time_seconds", "Arrival to the start of prefill.", self._queue)
        yield histogram("request_prefill_time_seconds", "Start of prefill to the first token.", self._prefill)
        yield histogram("request_decode_time_seconds", "First to last token.", self._decode)
        yield histogram("request_inference_time_seconds", "Start of prefill to the last token.", self._inference)
        yield histogram("request_prompt_tokens", "Prompt tokens of a request.", self._prompt_tokens)
        yield histogram("request_generation_tokens", "Tokens of all of its answers.", self._generated_tokens)
        yield histogram("request_params_n", "Answers asked for.", self._n)
        yield histogram("request_params_max_tokens", "Longest answer asked for, in tokens.", self._max_tokens)
        stages = self._labelled(
            HistogramMetricFamily,
            "request_stage_seconds",
            "Time in each stage of the timeline; wire: from the last block sent to decode's having it.",
            "stage",
        )
        for stage, values in self._stages.items():
            stages.add_metric((self._model, str(stage)), _buckets(values), values.sum)
        yield stages

    def _of_router(self) -> Iterator[Metric]:
        core = self._core
        yield self._value("router_open_requests", "Open requests; each sample counts.", core.num_requests)
        yield self._value("router_queued_requests", "Of those, waiting for a worker to have room.", core.num_queued)
        yield self._value("router_parked_requests", "Of those, waiting for a worker to come.", core.num_parked)
        yield self._value("router_stopping", "1: it takes no new requests.", int(core.stopping))
        yield self._by("router_requests_refused", "Requests refused, by reason.", "code", self._refused)
        yield self._by("router_requests_failed", "Requests that were lost, by reason.", "code", self._failed)
        yield self._count("router_retries", "Further attempts after a failed one.", self._num_retries)
        yield self._count(
            "router_timeouts", "Requests whose time was over before they ended.", core.attempts.num_timeouts
        )
        yield self._count("router_displaced", "Requests that left the queue for others.", core.num_displaced)
        yield self._count("router_breakers_opened", "Times a circuit breaker opened.", core.num_breakers_opened)
        placements = self._labelled(
            CounterMetricFamily,
            "router_placements",
            "Attempts placed; colocated: nothing is handed over.",
            *("prefill_policy", "decode_policy", "colocated"),
        )
        for colocated in (False, True):
            placements.add_metric((self._model, *self._policies, str(colocated).lower()), self._placed[colocated])
        yield placements
        yield self._by("handoffs", "Hand-overs of KV, by what became of them.", "outcome", self._core.attempts.handoffs)
        yield self._count("handoff_blocks", "KV blocks handed over.", self._core.attempts.num_handoff_blocks)
        yield self._count("handoff_bytes", "Bytes handed over, of requests that ended.", self._kv_bytes)
        yield self._count("handoffs_replaced", "Hand-overs offered to another worker.", self._num_replaced)
        pools = GaugeMetricFamily(
            self._prefix + "workers", "Workers by pool and state.", labels=("model_name", "pool", "role", "state")
        )
        for pool in pool_states(self._config, core.worker_statuses(time.monotonic())):
            for state in WORKER_STATES:
                pools.add_metric((self._model, pool["name"], pool["role"], state), pool[state])
        yield pools
        yield from self._of_roles()
        yield self._by("router_errors_survived", "What went wrong and was survived.", "kind", self._counters)
        http = self._labelled(
            CounterMetricFamily, "http_requests", "Answers of the HTTP server.", *("path", "method", "status")
        )
        for (path, method, status), num in list(self.http_answers.items()):
            http.add_metric((self._model, path, method, str(status)), num)
        yield http
        info = self._labelled(GaugeMetricFamily, "cluster_info", "Always 1.", "cluster", "router_incarnation")
        info.add_metric((self._model, self._config.name, core.incarnation), 1)
        yield info

    def _of_roles(self) -> Iterator[Metric]:
        roles = self._core.roles
        changes = self._labelled(CounterMetricFamily, "role_changes", "Workers that changed their role.", "to_role")
        for role in ("prefill", "decode"):
            changes.add_metric((self._model, role), 0 if roles is None else roles.planner.num_changes[role])
        yield changes
        if roles is None:
            return
        yield self._count("role_changes_abandoned", "Changes of role that were given up.", roles.planner.num_abandoned)
        yield self._by(
            *("role_changes_refused", "Looks at which one was wanted and not made.", "reason"),
            roles.planner.num_refused,
        )
        load = self._labelled(GaugeMetricFamily, "phase_load", "Work of a phase by its workers; 1: full.", "phase")
        if roles.loads is not None:
            load.add_metric((self._model, "prefill"), roles.loads.prefill.share)
            load.add_metric((self._model, "decode"), roles.loads.decode.share)
        yield load

    # --- families -----------------------------------------------------------------------------------

    def _labelled(self, kind: Callable[..., Any], name: str, text: str, *labels: str) -> Any:
        return kind(self._prefix + name, text, labels=("model_name", *labels))

    def _by(self, name: str, text: str, label: str, counts: Counter[str]) -> Any:
        family = self._labelled(CounterMetricFamily, name, text, label)
        for key, num in list(counts.items()):
            family.add_metric((self._model, key), num)
        return family

    def _count(self, name: str, text: str, value: float) -> Any:
        family = self._labelled(CounterMetricFamily, name, text)
        family.add_metric((self._model,), value)
        return family

    def _value(self, name: str, text: str, value: float) -> Any:
        family = self._labelled(GaugeMetricFamily, name, text)
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Any:
        family = self._labelled(HistogramMetricFamily, name, text)
        family.add_metric((self._model,), _buckets(values), values.sum)
        return family


def text_of(family: Metric) -> Iterator[str]:
    """In the text format, in parts. The library's `generate_latest` writes the same, three times as slowly."""
    name = family.name + "_total" if family.type == "counter" else family.name
    yield f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"
    for first in range(0, len(family.samples), PART_LINES):
        lines = []
        for sample in family.samples[first : first + PART_LINES]:
            labels = ",".join([f'{key}="{_escaped(value)}"' for key, value in sorted(sample.labels.items())])
            lines.append(
                f"{sample.name}{{{labels}}} {sample.value!r}\n" if labels else f"{sample.name} {sample.value!r}\n"
            )
        yield "".join(lines)


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    """Summed up, as Prometheus has them."""
    buckets, total = [], 0
    for bound, count in zip((*map(repr, values.bounds), "+Inf"), values.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
