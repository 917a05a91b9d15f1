"""Runs of a study, one after the other in this process or several at a time in processes of their own.

What is to be run next often depends on what came out, so work comes as *chains*: generators that yield a task and are
sent its curve. Chains go on independently of each other, and what one finds does not depend on how many run at a time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from threading import Thread
from typing import Literal, NamedTuple

from baton.errors import ConfigError
from baton_experiments.search.phases import Curve
from baton_experiments.search.rates import highest_rate
from baton_experiments.search.run import Outcome, Setup, run_alone, run_at, run_recorded
from baton_experiments.search.study import Study

ALONE_REQUESTS = 200
"""That run one at a time, to tell what no rate can undercut."""
IN_DOUBT = 4
"""So many times as many where these do not tell on which side of the share that is wanted the others are."""
COARSE_TOLERANCE = 0.2
COARSE_STEP = 2.0
START = {"prefill": 0.7, "decode": 16.0, "whole": 4.0}
"""First rate that is tried, in requests that run one after another: steps take many requests at a time."""
UNLIKELY = 0.2
"""In the same: the only rate that is tried where requests that run alone miss the SLO, if by little."""
LOWEST = 0.02
"""Where they keep it. In requests one after another, each as long as nine of ten are alone: the lowest rate that is
run, at which hardly any two meet. Few of those alone may be late by themselves, and queueing then has little room."""
WARM_UP = 1.5
"""In p90 latencies of requests that run alone; under load they take longer."""
SURE = 3.0
"""In standard errors of a share: one that is missed by more, among the requests that run alone, is not so by chance."""
PHASE_TOLERANCE = 2.0
"""Of a phase by itself, in those of the whole: it leads to estimates only."""
FAR = 8.0
"""Lower rates than a guess are run down to so much less at least, though `LOWEST` be higher."""
KNEE = 0.85
"""Of the goodput: one more rate, where attainment begins to fall."""


class Task(NamedTuple):
    """One set-up whose goodput is wanted, or in a replay its attainment."""

    setup: Setup
    kind: Literal["search", "coarse", "recorded"]
    guess: float | None = None
    """A rate that the goodput is expected near; None: nothing is known."""
    warmup_s: float | None = None
    """None: from requests that run alone."""
    with_knee: bool = False
    may_stop: bool = True
    """In a replay: a share that cannot become enough any more is not counted to its end."""


Chain = Generator[Task, Curve, None]
Execute = Callable[[Task], Curve]


def perform(study: Study, task: Task) -> Curve:
    """Do it."""
    if task.kind == "recorded":
        outcome = run_recorded(study, task.setup, may_stop=task.may_stop)
        return Curve(task.setup, outcome.rate if keeps(study, outcome) else 0.0, (outcome,))
    num_requests = study.num_requests
    outcomes: dict[float, Outcome] = {}
    guess, warmup_s = task.guess, task.warmup_s
    tolerance = study.tolerance * (1 if task.setup.phase == "whole" else PHASE_TOLERANCE)
    workers = sum(pool.workers for pool in task.setup.candidate.pools.values())
    if guess is None or warmup_s is None:
        alone = _alone(study, task.setup)
        warmup_s = WARM_UP * alone.latency_s
        outcomes[0.0] = alone
        if alone.good < study.share - _by_chance(study, alone.requests):
            return Curve(task.setup, 0.0, (alone,), warmup_s)
        coarse: dict[float, Outcome] = {}
        one_by_one = workers / alone.busy_s_per_request
        few = max(ALONE_REQUESTS, alone.requests, num_requests // 8)
        keeps_coarsely = _keeper(study, task.setup, coarse, few, warmup_s)
        start = lowest = UNLIKELY * one_by_one
        if keeps(study, alone):
            start, lowest = START[task.setup.phase] * one_by_one, min(lowest, _lowest(workers, warmup_s))
        found, _ = highest_rate(keeps_coarsely, start, tolerance=COARSE_TOLERANCE, step=COARSE_STEP, lowest=lowest)
        outcomes |= {rate: o for rate, o in coarse.items() if rate < found * KNEE}
        if task.kind == "coarse" or not found:
            every = {0.0: alone} | coarse
            return Curve(task.setup, found, tuple(every[rate] for rate in sorted(every)), warmup_s)
        guess = found
    keeps_it = _keeper(study, task.setup, outcomes, num_requests, warmup_s)
    lowest = min(guess / FAR, _lowest(workers, warmup_s))
    goodput, _ = highest_rate(keeps_it, guess, tolerance=tolerance, step=1 + 2 * tolerance, lowest=lowest)
    if task.with_knee and goodput and not any(KNEE * 0.9 < o / goodput < 0.97 for o in outcomes):
        keeps_it(KNEE * goodput)
    return Curve(task.setup, goodput, tuple(outcomes[rate] for rate in sorted(outcomes)), warmup_s)


def _alone(study: Study, setup: Setup) -> Outcome:
    """Of some requests; of more where chance in who they are could decide whether the share is kept."""
    few = min(ALONE_REQUESTS, study.num_requests)
    alone = run_alone(study, setup, num_requests=few)
    if study.num_requests > few and abs(alone.good - study.share) < _by_chance(study, few):
        alone = run_alone(study, setup, num_requests=min(IN_DOUBT * few, study.num_requests))
    if not alone.busy_s_per_request:  # none of these has a second token
        alone = run_alone(study, setup, num_requests=len(study.load))
    return alone


def _by_chance(study: Study, count: int) -> float:
    """How far a share among so many requests may be off that of all."""
    return SURE * math.sqrt(study.share * (1 - study.share) / count)


def _lowest(workers: int, warmup_s: float) -> float:
    return LOWEST * workers * WARM_UP / warmup_s


def keeps(study: Study, outcome: Outcome) -> bool:
    """A rate at which work piles up is not kept, however long the SLO lets requests wait."""
    return not outcome.stopped and not outcome.piled_up and outcome.good >= study.share - 1e-9


def _keeper(
    study: Study, setup: Setup, outcomes: dict[float, Outcome], num_requests: int, warmup_s: float
) -> Callable[[float], bool]:
    def keeps_at(rate: float) -> bool:
        outcomes[rate] = run_at(study, setup, rate, num_requests=num_requests, warmup_s=warmup_s)
        return keeps(study, outcomes[rate])

    return keeps_at


def drive(chains: Sequence[Chain], runner: Runner) -> Iterator[tuple[Task, Curve]]:
    """Run chains to their ends, and yield every task with its curve as it comes."""
    waiting = list(reversed(chains))
    running: dict[int, tuple[Chain, Task]] = {}
    number = 0

    def start(chain: Chain, curve: Curve | None) -> None:
        nonlocal number
        try:
            task = chain.send(curve) if curve is not None else next(chain)
        except StopIteration:
            return
        running[number] = (chain, task)
        runner.start(number, task)
        number += 1

    while waiting or running:
        while waiting and len(running) < runner.jobs:
            start(waiting.pop(), None)
        if not running:
            continue
        done, curve = runner.next_done()
        chain, task = running.pop(done)
        yield task, curve
        start(chain, curve)


class Runner:
    """Runs tasks in this process, one at a time."""

    jobs = 1

    def __init__(self, study: Study):
        self._study = study
        self._task: tuple[int, Task] | None = None

    def start(self, number: int, task: Task) -> None:
        self._task = number, task

    def next_done(self) -> tuple[int, Curve]:
        assert self._task is not None
        number, task = self._task
        return number, perform(self._study, task)


class PoolRunner(Runner):
    """Runs `jobs` tasks at a time, each in a process."""

    def __init__(self, study: Study, jobs: int, pool: ProcessPoolExecutor):
        super().__init__(study)
        self.jobs = jobs
        self._pool = pool
        self._done: queue.SimpleQueue[tuple[int, Future[Curve]]] = queue.SimpleQueue()

    def start(self, number: int, task: Task) -> None:
        self._pool.submit(_perform_here, task).add_done_callback(lambda future: self._done.put((number, future)))

    def next_done(self) -> tuple[int, Curve]:
        number, future = self._done.get()
        return number, future.result()


@contextmanager
def runner_of(study: Study, jobs: int) -> Iterator[Runner]:
    """`jobs` above 1 starts processes; they are ended with the context, whatever they are doing.

    Within it ConfigError is raised when one of them dies.
    """
    if jobs == 1:
        yield Runner(study)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare, (study,))
    try:
        yield PoolRunner(study, jobs, pool)
    except BrokenProcessPool:
        problem = "one of the processes was killed, as the kernel does where memory runs out"
        raise ConfigError("--jobs", problem, value=jobs, allowed="fewer, which need less memory") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(
            wait=True
        )  # its own thread reaps them; two that wait for one process would miss each other's news


_study: Study | None = None


def _prepare(study: Study) -> None:
    global _study
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends them
    Thread(target=_end_with_parent, daemon=True).start()
    _study = study


def _end_with_parent() -> None:
    """Whoever kills the parent does not mean its children to compute on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _perform_here(task: Task) -> Curve:
    assert _study is not None
    return perform(_study, task)
