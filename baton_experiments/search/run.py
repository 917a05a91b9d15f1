"""One set-up at one rate on the simulated cluster, and how many requests kept the SLO.

The cluster is `SimulatedCluster`, so scheduling, routing and hand-over are those of a real one. Either the whole of a
placement runs, or one phase of a split:

    prefill     the pool's workers take requests of one output token, so that nothing is handed over
    decode      the pool's workers are fed by prefill workers whose steps take no time, over the link as it is

Of a run at a rate the first and the last requests fill and drain the cluster and are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np

from baton.config import ClusterConfig, PoolConfig
from baton.sampling_params import SamplingParams
from baton_cluster.latency import ConstantLatency, LatencyModel
from baton_cluster.simulated import STUCK_S, SimulatedCluster, SimulatedRequest
from baton_experiments.columns import distribution
from baton_experiments.search.candidate import Candidate, Pool
from baton_experiments.search.study import Study
from baton_experiments.simulated import layout_of
from baton_experiments.workloads import RequestShape, plan

NO_TIME_S = 1e-6
"""Of a step in the phase that is left out: it has to take some, or the clock would not go on."""
SOURCE_KV_TOKENS = 1 << 22
"""Of such a worker: more than is ever on its way."""
NUM_LOOKS = 400
"""At KV pools, during the requests that are judged."""
HORIZON = 4
PILED_UP = 2
"""Requests that a run has in it at a time, in those that it judges: it was too short to tell what the rate leads to."""
VOCAB_SIZE = 32_000
_TOKEN = 1

Phase = Literal["prefill", "decode", "whole"]


class Setup(msgspec.Struct, frozen=True):
    """What is run."""

    candidate: Candidate
    chunk_tokens: int
    """`engine.max_batch_tokens`."""

    @property
    def phase(self) -> Phase:
        if self.candidate.both is not None or (self.candidate.prefill and self.candidate.decode):
            return "whole"
        return "prefill" if self.candidate.prefill else "decode"

    @property
    def name(self) -> str:
        return self.candidate.name


class Outcome(msgspec.Struct, frozen=True):
    """What came out of one run. Shares are of `requests`, those that were to be judged."""

    rate: float
    """Requests per second, of the whole cluster; 0: one request at a time."""
    requests: int
    good: float
    """Share that kept the SLO; of a run that was stopped, the most that it could have become."""
    stopped: bool = False
    """So many had missed it that the rest could not change the answer."""
    missed_ttft: float = 0.0
    missed_tbt: float = 0.0
    missed_by_handoff: float = 0.0
    """Of these the ones that had kept it but for the gap after the first token, in which the KV is handed over."""
    failed: float = 0.0
    ttft_ms: dict[str, float] | None = None
    """p50, p90, p99, max and `promised`: the quantile at the share that is to be in time."""
    tbt_ms: dict[str, float] | None = None
    """Of all gaps between tokens."""
    tpot_ms: dict[str, float] | None = None
    """Of requests' mean gaps."""
    latency_s: float = 0.0
    """p90, of whole requests."""
    busy: dict[str, float] = {}
    """By role: share of the time in which workers were in a step."""
    busy_s_per_request: float = 0.0
    kv_full: float = 0.0
    """Share of the time in which the KV pool of a worker that decodes had no room for one more average request."""
    piled_up: bool = False
    """Requests came so much faster than they were served that only the end of the run kept them from being late."""


class _Stop(Exception):
    """The answer is known."""


class _Judge:
    """Counts who kept the SLO among the requests numbered `first` to `first + count - 1`."""

    def __init__(self, study: Study, first: int, count: int, *, may_stop: bool):
        self._ttft_s, self._tbt_s = study.slo.ttft_ms / 1e3, study.slo.tbt_ms / 1e3
        self._every_token = study.definition == "per_token"
        self._judged = range(first, first + count)
        self._may_miss = int((1 - study.share) * count + 1e-9) if may_stop else count
        self.num_judged = self.num_missed = self.missed_ttft = self.missed_tbt = self.by_handoff = self.failed = 0
        self.stopped = False
        self.ttft: list[float] = []
        self.latency: list[float] = []
        self.tpot: list[float] = []
        self.gaps: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def on_end(self, request: SimulatedRequest) -> None:
        if request.number not in self._judged:
            return
        self.num_judged += 1
        times = request.token_times
        if request.error is not None or not times:
            self.failed += 1
            self.num_missed += 1
        else:
            self._judge(request.submitted_at, times)
        self.stopped = self.num_missed > self._may_miss

    def on_end_of_many(self, request: SimulatedRequest) -> None:
        """The same; raises `_Stop` when no further request changes the answer."""
        self.on_end(request)
        if self.stopped or self.num_judged == len(self._judged):
            raise _Stop

    def _judge(self, start: float, times: Sequence[float]) -> None:
        ttft, num_gaps = times[0] - start, len(times) - 1
        self.ttft.append(ttft)
        self.latency.append(times[-1] - start)
        mean_gap = (times[-1] - times[0]) / num_gaps if num_gaps else 0.0
        if num_gaps:
            self.tpot.append(mean_gap)
            self.gaps.append(np.diff(times))
        missed_ttft = ttft > self._ttft_s + 1e-9
        if self._every_token:
            due = start + self._ttft_s + 1e-9
            missed_tbt = not missed_ttft and any(at > due + i * self._tbt_s for i, at in enumerate(times))
        else:
            missed_tbt = mean_gap > self._tbt_s + 1e-9
        self.missed_ttft += missed_ttft
        self.missed_tbt += missed_tbt
        self.num_missed += missed_ttft or missed_tbt
        if missed_tbt and (num_gaps < 2 or (times[-1] - times[1]) / (num_gaps - 1) <= self._tbt_s):
            self.by_handoff += 1


class _Room:
    """Looks now and then whether the workers that decode have room for one more request."""

    def __init__(self, study: Study, cluster: SimulatedCluster, *, start_s: float, every_s: float):
        self._blocks = study.load.mean_tokens / cluster.config.engine.block_size
        self._pools = [w.core.engine.pool for w in cluster.workers.values() if w.info.role != "prefill"]
        self._clock = cluster.clock
        self._every_s = every_s
        self._looks = self._full = 0
        self._clock.at(start_s, self._look)

    @property
    def share_full(self) -> float:
        return self._full / max(1, self._looks)

    def _look(self) -> None:
        self._looks += len(self._pools)
        self._full += sum(pool.num_free < self._blocks for pool in self._pools)
        self._clock.after(self._every_s, self._look)


def run_at(
    study: Study, setup: Setup, rate: float, *, num_requests: int, warmup_s: float = 0.0, may_stop: bool = True
) -> Outcome:
    """At least `num_requests` judged at `rate`, after those of `warmup_s` and before those of half of it.

    More where they would come within `HORIZON` times that: what builds up only over the time of some requests would not
    be seen. `may_stop`: end as soon as too many have missed the SLO.
    """
    warmup = round(rate * warmup_s)
    judged = max(num_requests, round(rate * warmup_s * HORIZON))
    shapes = islice(study.load.at_rate(rate), warmup + judged + warmup // 2)
    outcome = _run(study, setup, shapes, rate, warmup, judged, may_stop=may_stop)
    return msgspec.structs.replace(outcome, piled_up=_is_piled_up(outcome))


def run_recorded(study: Study, setup: Setup, *, may_stop: bool = False) -> Outcome:
    """All requests, when they came."""
    work = study.load
    return _run(study, setup, work.at_rate(None), work.mean_rate, 0, len(work), may_stop=may_stop)


def run_alone(study: Study, setup: Setup, *, num_requests: int) -> Outcome:
    """The first requests, each when the one before has ended: what no rate can undercut."""
    cluster = _cluster(study, setup, prefix_cache=False)  # each prompt is computed as if it were the first of its kind
    judge = _Judge(study, 0, num_requests, may_stop=False)
    for shape in islice(study.load.at_rate(1.0), num_requests):
        outputs = 1 if setup.phase == "prefill" else shape.output_tokens
        request = cluster.submit(cluster.clock.now, _prompt(shape.prompt_tokens), _sampling(outputs))
        late = cluster.clock.now + STUCK_S
        while request.finish_reason is None and cluster.clock.now < late:
            cluster.clock.step()
        judge.on_end(request)
    return _outcome(study, setup, cluster, judge, 0.0, num_requests)


def _run(
    study: Study,
    setup: Setup,
    shapes: Iterator[RequestShape],
    rate: float,
    first: int,
    count: int,
    *,
    may_stop: bool,
) -> Outcome:
    cluster = _cluster(study, setup, prefix_cache=bool(study.load.blocks))
    judge = _Judge(study, first, count, may_stop=may_stop)
    room = _Room(study, cluster, start_s=first / rate, every_s=count / rate / NUM_LOOKS)
    with suppress(_Stop):
        cluster.play(_requests(study, setup, shapes), judge.on_end_of_many)
    outcome = _outcome(study, setup, cluster, judge, rate, count)
    return msgspec.structs.replace(outcome, kv_full=room.share_full)


def _is_piled_up(outcome: Outcome) -> bool:
    """By the mean number of requests in a system: its rate times the time that they spend there."""
    return outcome.rate * outcome.latency_s > PILED_UP * outcome.requests


def _outcome(study: Study, setup: Setup, cluster: SimulatedCluster, judge: _Judge, rate: float, count: int) -> Outcome:
    promised = study.share * 100
    latency = distribution(judge.latency)
    elapsed = max(cluster.clock.now, 1e-9)
    busy: dict[str, list[float]] = {}
    for worker in cluster.workers.values():
        if worker.info.pool in setup.candidate.pools or setup.phase == "prefill":
            role = "prefill" if setup.phase == "prefill" else worker.info.pool
            busy.setdefault(role, []).append(worker.busy_s / elapsed)
    return Outcome(
        rate=rate,
        requests=count,
        good=1 - judge.num_missed / count,
        stopped=judge.stopped,
        missed_ttft=judge.missed_ttft / count,
        missed_tbt=judge.missed_tbt / count,
        missed_by_handoff=judge.by_handoff / count,
        failed=judge.failed / count,
        ttft_ms=_milliseconds(judge.ttft, promised),
        tbt_ms=_milliseconds(np.concatenate(judge.gaps) if judge.gaps else (), promised),
        tpot_ms=_milliseconds(judge.tpot, promised),
        latency_s=latency["p90"] if latency else 0.0,
        busy={role: min(1.0, sum(shares) / len(shares)) for role, shares in busy.items()},
        busy_s_per_request=sum(map(sum, busy.values())) * elapsed / max(1, judge.num_judged),
    )


def _milliseconds(seconds: Any, promised: float) -> dict[str, float] | None:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    found = distribution(values)
    return None if found is None else {**found, "promised": float(np.percentile(values, promised))}


def _config(study: Study, setup: Setup, *, prefix_cache: bool) -> ClusterConfig:
    config = study.config
    block_size = config.engine.block_size

    def pool(workers: Pool) -> PoolConfig:
        return PoolConfig(workers=workers.workers, kv_blocks=max(1, study.kv_tokens(workers.tp) // block_size))

    pools = {role: pool(workers) for role, workers in setup.candidate.pools.items()}
    if setup.phase == "prefill":
        pools = {"both": pools["prefill"]}
    elif setup.phase == "decode":
        source = PoolConfig(workers=pools["decode"].workers, kv_blocks=SOURCE_KV_TOKENS // block_size)
        pools = {"prefill": source, **pools}
    engine = msgspec.structs.replace(
        config.engine,
        max_batch_tokens=setup.chunk_tokens,
        prefix_cache=prefix_cache and config.engine.prefix_cache,  # where nothing is shared, looking costs time
    )
    transfer = msgspec.structs.replace(config.transfer, transport="auto")
    return msgspec.structs.replace(config, launcher="local", pools=pools, engine=engine, transfer=transfer)


def _cluster(study: Study, setup: Setup, *, prefix_cache: bool) -> SimulatedCluster:
    config = _config(study, setup, prefix_cache=prefix_cache)
    latencies: dict[str, LatencyModel] = {
        role: study.profiles[workers.tp].latency for role, workers in setup.candidate.pools.items()
    }
    if setup.phase == "prefill":
        latencies = {"both": latencies["prefill"]}
    elif setup.phase == "decode":
        latencies["prefill"] = ConstantLatency(NO_TIME_S)
    some = next(iter(setup.candidate.pools.values()))
    return SimulatedCluster(
        config,
        latencies,
        study.link,
        layout=layout_of(study.profiles[some.tp], config.engine.block_size),
        max_model_len=study.load.longest,
        next_token=_TOKEN,
    )


def _requests(
    study: Study, setup: Setup, shapes: Iterator[RequestShape]
) -> Iterator[tuple[float, Sequence[int], SamplingParams]]:
    first_only = setup.phase == "prefill"
    if study.load.blocks:
        for planned in plan(shapes, vocab_size=VOCAB_SIZE, seed=study.load.seed):
            yield planned.at_s, planned.prompt, _sampling(1 if first_only else planned.max_tokens)
    else:
        for shape in shapes:
            yield shape.at_s, _prompt(shape.prompt_tokens), _sampling(1 if first_only else shape.output_tokens)


@cache
def _prompt(num_tokens: int) -> Sequence[int]:
    """All of one length are the same object: what prompts say plays no part where nothing is looked up."""
    return (_TOKEN,) * num_tokens


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
