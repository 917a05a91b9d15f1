"""Measures what a worker of this machine takes, for `baton profile`: its steps, what is between them, its hand-over.

Steps    As many engines at once as the cluster has workers, each in a process of its own on the cores that a worker
         would have: they share the memory's bandwidth. Sizes of steps are drawn (`step_engine.made_up_steps`).
The rest From a small cluster of one prefill and one decode worker, over whatever transport that would use: a busy
         worker's time between two steps, the hand-over of a prompt's last chunk, a message from router to worker. Its
         steps are a check of the fit, by what no fit has seen.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

from baton.config import ClusterConfig, dump_config, parse_config
from baton.engine.model_spec import load_spec
from baton.engine.weights import resolve_model
from baton.errors import BatonError, ClusterError, ConfigError
from baton.step_log import StepRecord, StepShape
from baton.timeline import Mark, Stage
from baton_cluster.cores import assign_cores
from baton_cluster.latency import LinkModel
from baton_experiments.step_engine import StepEngine, made_up_steps

START_S = 300.0
"""For a process to load the model."""
STEP_S = 300.0
"""A step takes less, or its process hangs."""
WARM_UPS = 4
ALONE_REPEATS = 4
BURST = 4
OUTPUT_TOKENS = 12
MAX_BYTES_PER_S = 1e12
"""A link whose time does not depend on the bytes counts as so fast."""

Told = Callable[[str], None]
"""Told one line of text at each stage."""
Timed = Callable[[float, int], None]
"""Told now and then: seconds since the start, steps so far."""


class Engine(NamedTuple):
    """What was measured, in words and sizes."""

    engine: str
    dtype: str
    device: str
    kv_bytes_per_token: int
    kv_tokens: int


class MeasuredStep(NamedTuple):
    """One step of a `StepEngine`."""

    shape: StepShape
    seconds: float
    cpu_seconds: float
    """Of the thread that computes: less than `seconds` where something else had its core."""


def measure_steps(
    config: ClusterConfig,
    pool: str,
    *,
    workers: int,
    seconds: float,
    max_context: int | None = None,
    seed: int = 0,
    told: Told = lambda text: None,
    timed: Timed = lambda seconds, steps: None,
) -> tuple[Engine, list[MeasuredStep]]:
    """Steps of `workers` engines of `pool` that run at once for about so many seconds.

    Raises what an engine raises (ModelError, ConfigError); ClusterError if a process dies.
    """
    cores, _ = assign_cores([config.pools[pool].cores] * workers, sorted(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    told(f"loading the model in {workers} processes" if workers > 1 else "loading the model")
    try:
        for worker in range(workers):
            ours, theirs = context.Pipe()
            arguments = (dump_config(config), pool, cores[worker], max_context, seed + worker, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # the process has it; so that its end is seen here
            processes.append(process)
            pipes.append(ours)
        engines = [_answer(pipe, START_S) for pipe in pipes]
        told("measuring steps")
        for pipe in pipes:
            pipe.send(None)
        steps = list(_collect(pipes, seconds, timed))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return engines[0], steps


def _collect(pipes: Sequence[Connection], seconds: float, timed: Timed) -> Iterator[MeasuredStep]:
    """Until the time is over. Nobody stops earlier: who is alone has the memory for itself."""
    started = time.monotonic()
    count = 0
    while (passed := time.monotonic() - started) < seconds:
        timed(passed, count)
        ready = wait(pipes, timeout=min(1.0, seconds - passed))
        if not ready and time.monotonic() - started > STEP_S:
            raise ClusterError(f"no step has ended for {STEP_S:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            yield _answer(pipe, 0.0)
            count += 1


def _answer(pipe: Connection, timeout_s: float) -> Any:
    try:
        if not pipe.poll(timeout_s):
            raise ClusterError(f"a process has not loaded the model within {timeout_s:g} s")
        answer = pipe.recv()
    except EOFError:
        raise ClusterError("a process that measures steps has died; it may have lacked memory") from None
    if isinstance(answer, BatonError):
        raise answer
    return answer


def _serve(
    tree: dict[str, Any], pool: str, cores: tuple[int, ...], max_context: int | None, seed: int, pipe: Connection
) -> None:
    """A process's life: load, say what it is, then step after step until it is killed."""
    try:
        engine = StepEngine(parse_config(tree), pool, cores=cores, seed=seed)
        limits = engine.limits
        if max_context is not None:
            limits = limits._replace(max_context=min(limits.max_context, max_context))
        steps = made_up_steps(limits, Random(f"steps/{seed}"))
        for sizes in itertools.islice(steps, WARM_UPS):
            engine.seconds(engine.plan(sizes))
    except BatonError as e:
        pipe.send(e)
        return
    built = engine.built
    token_bytes = built.kv_cache.layout.token_bytes
    kv_tokens = built.kv_cache.num_blocks * built.kv_cache.layout.block_size
    pipe.send(Engine(built.engine, built.dtype, built.device, token_bytes, kv_tokens))
    pipe.recv()
    for sizes in steps:
        plan = engine.plan(sizes)
        pipe.send(MeasuredStep(StepShape.of(plan), *engine.times(plan)))


# --- a small cluster ---------------------------------------------------------------------------------


class ClusterTimes(NamedTuple):
    """Of one prefill and one decode worker that serve few requests."""

    host_s: float | None
    """Between two steps of a busy worker, median."""
    link: LinkModel | None
    message_s: float | None
    """From the router to a worker, placement included, median."""
    client_s: float | None
    """What a client waits beyond what router and workers saw, median."""
    handoffs: list[tuple[int, float]]
    """Bytes that were still to be moved when a prompt was done, and seconds until decode had adopted it."""
    steps: list[StepRecord]


def measure_cluster(config: ClusterConfig, *, told: Told = lambda text: None) -> ClusterTimes:
    """Start one, serve prompts of one chunk each, one at a time and then some at once, and end it."""
    from baton_cluster.launch import launch
    from baton_experiments.placement import with_placement

    vocab = load_spec(resolve_model(config.model.source), config.engine.model_impl).vocab_size
    config = with_placement(config, "split:1+1")
    engine = msgspec.structs.replace(config.engine, record_steps=True, prefix_cache=False)
    config = msgspec.structs.replace(config, engine=engine)
    draw = Random("profile")
    with launch(config, progress=told) as cluster, cluster.client() as client:
        limit = min(config.engine.max_batch_tokens, cluster.status().max_model_len - OUTPUT_TOKENS)
        sizes = sorted({max(1, limit // part) for part in (1, 2, 4, 16)})

        def prompt(tokens: int) -> list[int]:
            return [draw.randrange(vocab) for _ in range(tokens)]

        client.generate(prompt(sizes[-1]), max_tokens=2, ignore_eos=True)  # pays for memory and connections
        cluster.take_steps()
        told("handing prompts over")
        done = [
            client.generate(prompt(tokens), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            for _ in range(ALONE_REPEATS)
            for tokens in sizes
        ]
        told("serving several at once")
        streams = [client.stream(prompt(sizes[0]), max_tokens=4 * OUTPUT_TOKENS, ignore_eos=True) for _ in range(BURST)]
        for stream in streams:
            stream.result()
        steps = cluster.take_steps()
    marks = [c.timeline.marks for c in done]
    handoffs = [(c.kv_bytes, m[Mark.ADOPTED] - m[Mark.FIRST_TOKEN]) for c, m in zip(done, marks, strict=True)]
    return ClusterTimes(
        host_s=host_seconds(steps),
        link=link_of(handoffs),
        message_s=float(np.median([m[Mark.SUBMITTED] - m[Mark.PLACED] for m in marks])),
        client_s=float(np.median([c.residual_s for c in done if c.residual_s is not None])),
        handoffs=handoffs,
        steps=steps,
    )


def host_seconds(steps: Iterable[StepRecord]) -> float | None:
    """Median time between two steps of a worker that had work all the while; None where there are no two such steps.

    Those are steps of decodes alone, of which the second has the same sequences, each a token longer.
    """
    by_worker: dict[str, list[StepRecord]] = defaultdict(list)
    for step in steps:
        by_worker[step.worker].append(step)
    gaps = []
    for found in by_worker.values():
        for one, two in itertools.pairwise(sorted(found, key=lambda step: step.start_s)):
            a, b = one.shape, two.shape
            grown = a.decodes == b.decodes == b.decode_context - a.decode_context
            if grown and not a.chunks and not b.chunks:
                gaps.append(max(0.0, two.start_s - one.start_s - one.seconds))
    return float(np.median(gaps)) if gaps else None


def link_of(handoffs: Sequence[tuple[int, float]]) -> LinkModel | None:
    """`latency_s` and `bytes_per_s` from (bytes, seconds), by least squares of relative errors; None without any."""
    if not handoffs:
        return None
    size, seconds = np.array(handoffs, dtype=np.float64).T
    seconds = np.maximum(seconds, 1e-6)
    unit = max(float(size.max()), 1.0)
    (latency, slope), _ = nnls(np.column_stack([1 / seconds, size / unit / seconds]), np.ones(len(size)))
    rate = unit / slope if slope > 0 else MAX_BYTES_PER_S
    return LinkModel(latency_s=float(latency), bytes_per_s=float(min(rate, MAX_BYTES_PER_S)))


def cpu_share(steps: Sequence[MeasuredStep]) -> float:
    """Of the steps' time, what their threads had a core: below 1 other work ran beside them (or a GPU computed)."""
    return sum(step.cpu_seconds for step in steps) / sum(step.seconds for step in steps)


def require_pool(config: ClusterConfig, pool: str | None) -> str:
    """The pool to be measured: the named one, else the first. Raises ConfigError for a name that is none."""
    if pool is None:
        return next(iter(config.pools))
    if pool not in config.pools:
        raise ConfigError("--pool", "is not in the configuration", value=pool, allowed=", ".join(config.pools))
    return pool


# --- from a result -----------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """What a folder of `baton experiment` knows of its workers."""

    config: ClusterConfig
    steps: list[StepRecord]
    handoffs: list[tuple[int, float]]
    """See `ClusterTimes`; of requests whose hand-over ended well."""
    message_s: float | None
    client_s: float | None
    runs: int


def read_recorded(folder: Path) -> Recorded:
    """Of a real run. Raises ConfigError where it was simulated, has no steps, or is damaged."""
    from baton_experiments.results import read_result

    result = read_result(folder)
    steps = [step for some in result.steps.values() for step in some]
    plan, cluster = result.config.get("plan"), result.config.get("cluster")
    if not isinstance(plan, dict) or not isinstance(cluster, dict):
        raise ConfigError(str(folder / "config.json"), "is not what an experiment writes: it lacks plan or cluster")
    if plan.get("engine") != "real" or not steps:
        raise ConfigError(str(folder), "holds no steps of real workers; run it with --engine real")
    config = parse_config({**cluster, "security": {}, "http": {}})
    good = [record for record in result.records if record.error is None]
    handoffs = []
    for record in good:
        waited = [record.stages_ms.get(str(stage)) for stage in (Stage.HANDOFF_WAIT, Stage.WIRE)]
        if record.kv_bytes and record.attempts == 1 and None not in waited:
            budget = record.chunk_tokens or config.engine.max_batch_tokens
            last = (record.prompt_tokens - 1) % budget + 1
            total = sum(w for w in waited if w is not None)
            handoffs.append((round(record.kv_bytes * last / record.prompt_tokens), total / 1e3))
    placement = [ms / 1e3 for r in good if (ms := r.stages_ms.get(str(Stage.PLACEMENT))) is not None]
    residual = [r.residual_ms / 1e3 for r in good if r.residual_ms is not None]
    return Recorded(
        config,
        steps,
        handoffs,
        float(np.median(placement)) if placement else None,
        float(np.median(residual)) if residual else None,
        len(result.steps),
    )


def describe_engine(config: ClusterConfig, pool: str) -> Engine:
    """What a worker of `pool` is, without loading its weights. `kv_tokens` is 0 where only a started worker knows."""
    from baton.engine.build import resolve_device
    from baton.engine.memory import DEFAULT_KV_MIB
    from baton.engine.model_spec import resolve_dtype

    section = config.pools[pool]
    device = resolve_device(section)
    spec = load_spec(resolve_model(config.model.source), config.engine.model_impl, config.model.max_model_len)
    dtype = resolve_dtype(config.model.dtype, device)
    layout = spec.kv_layout(config.block_size_of(section), dtype)
    if section.kv_blocks is not None:
        blocks = section.kv_blocks
    elif section.memory_mib is None and (device == "cpu" or section.kv_memory_mib is not None):
        blocks = ((section.kv_memory_mib or DEFAULT_KV_MIB) << 20) // layout.block_bytes
    else:
        blocks = 0
    return Engine(spec.architecture, dtype, device, layout.token_bytes, blocks * layout.block_size)
