"""Points on real clusters, through their routers as any client of theirs.

Several settings are up at once, where memory and GPUs are enough: an idle cluster costs next to nothing, and clusters
that take turns share a machine's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import msgspec
import psutil

from baton.config import ClusterConfig
from baton.engine.memory import DEFAULT_KV_MIB
from baton.engine.model_spec import CausalLMSpec
from baton.errors import BatonError
from baton.step_log import StepRecord
from baton.timeline import Mark
from baton_cluster.launch import launch
from baton_cluster.ray_cluster import RayCluster, bundle
from baton_cluster.ray_session import RaySession
from baton_experiments.engine import Label, OnRecord, Say
from baton_experiments.placement import with_placement
from baton_experiments.plan import EngineName
from baton_experiments.records import RequestRecord, Setting
from baton_experiments.workloads import PlannedRequest
from router.client import AsyncRouterClient
from router.completion import Completion

PROCESS_MIB = 700
"""Of a worker beside weights and KV pool, with its share of the router: interpreter, libraries, the largest step."""
MEMORY_SHARE = 0.8
"""Of the memory that is free now, for all clusters together."""


class Running(Protocol):
    """A cluster that is up, as far as an experiment needs it. One with `take_steps()` tells its engine steps too."""

    config: ClusterConfig
    address: str


class RealEngine:
    """Starts clusters on Ray, or as threads of this process where `config.launcher` says so, and ends them.

    `clusters`: settings that are up already; they are used as they are and left running. `session`: the connection to
    Ray, None: one for each group of settings. `model_bytes`: of a worker's weights in memory, as far as is known.
    """

    name: EngineName = "real"

    def __init__(
        self,
        config: ClusterConfig,
        model: CausalLMSpec,
        *,
        model_bytes: int,
        clusters: Mapping[Setting, Running] | None = None,
        session: RaySession | None = None,
    ):
        self.vocab_size = model.vocab_size
        self._config = config
        self._model = model
        self._model_bytes = model_bytes
        self._clusters = dict(clusters or {})
        self._session = session

    def groups(self, settings: Sequence[Setting]) -> list[tuple[Setting, ...]]:
        """As many at once as fit into the memory that is free, and onto the GPUs that there are."""
        memory = psutil.virtual_memory().available * MEMORY_SHARE
        gpus = self._num_gpus()
        groups: list[tuple[Setting, ...]] = []
        needs = (0.0, 0.0)
        for setting in settings:
            need = (0.0, 0.0) if setting in self._clusters else self._needs(setting)
            together = (needs[0] + need[0], needs[1] + need[1])
            if groups and together[0] <= memory and together[1] <= gpus:
                groups[-1] = (*groups[-1], setting)
                needs = together
            else:
                groups.append((setting,))
                needs = need
        return groups

    @contextmanager
    def up(self, settings: Sequence[Setting], say: Say) -> Iterator[RealStage]:
        with ExitStack() as stack:
            running: dict[Setting, Running] = {s: self._clusters[s] for s in settings if s in self._clusters}
            missing = [setting for setting in settings if setting not in running]
            if missing and self._config.launcher == "local":
                for setting in missing:
                    say(f"starting {setting}")
                    running[setting] = stack.enter_context(launch(self._configured(setting), progress=say))
            elif missing:
                configs = {setting: self._configured(setting) for setting in missing}
                session = self._session
                if session is None:
                    cpus = sum(
                        int(bundle(pool)["CPU"]) * pool.workers for c in configs.values() for pool in c.pools.values()
                    )
                    session = stack.enter_context(
                        RaySession(self._config.ray, num_cpus=cpus, namespace=f"baton-{self._config.name}")
                    )
                for setting, config in configs.items():
                    say(f"starting {setting}")
                    running[setting] = stack.enter_context(RayCluster(config, session=session, progress=say))
            stage = RealStage({setting: running[setting] for setting in settings})
            stage.warm_up(self.vocab_size, say)
            yield stage

    def _configured(self, setting: Setting) -> ClusterConfig:
        config = with_placement(self._config, setting.placement, setting.chunk_tokens)
        engine = msgspec.structs.replace(config.engine, record_steps=True)
        return msgspec.structs.replace(config, engine=engine)

    def _needs(self, setting: Setting) -> tuple[float, float]:
        """Bytes of host memory, and GPUs."""
        memory = gpus = 0.0
        for pool in with_placement(self._config, setting.placement, setting.chunk_tokens).pools.values():
            on_gpu = pool.may_use_gpu
            layout = self._model.kv_layout(self._config.block_size_of(pool), "float32")  # at most
            kv = (
                pool.kv_blocks * layout.block_bytes
                if pool.kv_blocks is not None
                else (pool.kv_memory_mib or DEFAULT_KV_MIB) << 20
            )
            worker = (PROCESS_MIB << 20) + (0 if on_gpu else self._model_bytes + kv)
            memory += pool.workers * (pool.memory_mib << 20 if pool.memory_mib and not on_gpu else worker)
            gpus += pool.workers * pool.gpus
        return memory, gpus

    def _num_gpus(self) -> float:
        if self._config.ray.address is not None:
            return math.inf  # Ray knows, and says so where it cannot place them
        if self._config.ray.num_gpus is not None:
            return self._config.ray.num_gpus
        if not any(pool.gpus for pool in self._config.pools.values()):
            return math.inf
        import torch

        return torch.cuda.device_count()


class RealStage:
    """Clusters that are up, by setting."""

    def __init__(self, running: Mapping[Setting, Running]):
        self._running = running
        self._status: dict[Setting, Any] = {}

    @property
    def max_model_len(self) -> int:
        self._ask()
        return int(min(status.max_model_len for status in self._status.values()))

    @property
    def details(self) -> dict[str, Any]:
        self._ask()
        warnings = {str(s): list(found) for s, c in self._running.items() if (found := getattr(c, "warnings", ()))}
        return {
            "model": next(iter(self._status.values())).model,
            "workers": {
                str(setting): [
                    {
                        "worker_id": w.info.worker_id,
                        "role": w.info.role,
                        "node": w.info.node,
                        "device": w.info.device,
                        "cores": list(w.info.cores),
                        "gpu_ids": list(w.info.gpu_ids),
                        "kv_blocks": w.info.num_blocks,
                        "block_size": w.info.layout.block_size,
                        "dtype": w.info.layout.dtype,
                    }
                    for w in status.workers
                ]
                for setting, status in self._status.items()
            },
            "kv_blocks": {
                w.info.worker_id: w.info.num_blocks for status in self._status.values() for w in status.workers
            },
            "warnings": warnings,
        }

    def warm_up(self, vocab_size: int, say: Say) -> None:
        """Not recorded: first steps pay for memory and connections. Twice as many requests at once as workers."""
        self._ask()
        for setting, cluster in self._running.items():
            say(f"warming up {setting}")
            num = 2 * len(self._status[setting].workers)
            tokens = min(64, self._status[setting].max_model_len - 4)
            prompts = [[100 + (7 * i + j) % (vocab_size - 100) for j in range(tokens)] for i in range(num)]
            asyncio.run(_send_together(cluster, prompts))

    def alone(self, setting: Setting, requests: Sequence[PlannedRequest], label: Label) -> list[RequestRecord]:
        return asyncio.run(_one_by_one(self._running[setting], requests, label))

    def play(
        self, setting: Setting, requests: Sequence[PlannedRequest], label: Label, on_record: OnRecord
    ) -> tuple[list[RequestRecord], list[StepRecord]]:
        cluster = self._running[setting]
        take_steps: Callable[[], list[StepRecord]] = getattr(cluster, "take_steps", list)
        take_steps()  # those before this point
        records = asyncio.run(_play(cluster, requests, label, on_record))
        return records, take_steps()

    def _ask(self) -> None:
        if not self._status:
            for setting, cluster in self._running.items():
                self._status[setting] = asyncio.run(_status(cluster))


def _client(cluster: Running) -> AsyncRouterClient:
    return AsyncRouterClient(cluster.address, secret=cluster.config.security.secret)


async def _status(cluster: Running) -> Any:
    async with _client(cluster) as client:
        return await client.status()


async def _send_together(cluster: Running, prompts: list[list[int]]) -> None:
    async with _client(cluster) as client:
        await asyncio.gather(*(client.generate(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts))


async def _one_by_one(cluster: Running, requests: Sequence[PlannedRequest], label: Label) -> list[RequestRecord]:
    async with _client(cluster) as client:
        return [await _ask_for(client, label.record(index, request), request) for index, request in enumerate(requests)]


async def _play(
    cluster: Running, requests: Sequence[PlannedRequest], label: Label, on_record: OnRecord
) -> list[RequestRecord]:
    prompts = [list(request.prompt) for request in requests]  # not while others are timed
    start = time.monotonic()

    async def one(index: int, client: AsyncRouterClient) -> RequestRecord:
        request = requests[index]
        await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
        record = await _ask_for(client, label.record(index, request), request, prompts[index])
        on_record(record)
        return record

    async with _client(cluster) as client:
        return list(await asyncio.gather(*(one(index, client) for index in range(len(requests)))))


async def _ask_for(
    client: AsyncRouterClient, record: RequestRecord, request: PlannedRequest, prompt: list[int] | None = None
) -> RequestRecord:
    tokens = list(request.prompt) if prompt is None else prompt
    try:
        done = await client.generate(tokens, max_tokens=request.max_tokens, ignore_eos=True)
    except BatonError as e:
        record.error = f"{e.code}: {e}"
    else:
        _fill(record, done)
    return record


def _fill(record: RequestRecord, done: Completion) -> None:
    record.output_tokens = len(done.token_ids)
    record.ttft_ms = None if done.ttft_s is None else done.ttft_s * 1e3
    record.latency_ms = done.latency_s * 1e3
    record.tbt_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(done.token_times)]
    record.stages_ms = {str(stage): s * 1e3 for stage, s in done.timeline.stages().items()}
    record.residual_ms = None if done.residual_s is None else done.residual_s * 1e3
    record.prefill_worker, record.decode_worker = done.prefill_worker, done.decode_worker
    record.kv_bytes = done.kv_bytes
    record.received_s = done.timeline.marks.get(Mark.RECEIVED)
    record.attempts = done.attempts
