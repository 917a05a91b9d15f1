"""Points on simulated clusters: the same scheduling, hand-over and routing code under a virtual clock.

What a step takes comes from an `EngineProfile`; tokens are made up. Each point has a cluster of its own, which is idle
when it begins, so points depend on nothing but the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from baton.config import ClusterConfig, dump_config, parse_config
from baton.errors import ConfigError
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton.step_log import StepRecord
from baton.timeline import Mark
from baton_cluster.latency import LinkModel
from baton_cluster.simulated import SimulatedCluster, SimulatedRequest
from baton_cluster.specs import worker_specs
from baton_experiments.engine import Label, OnRecord, Say
from baton_experiments.placement import with_placement
from baton_experiments.plan import EngineName
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import RequestRecord, Setting
from baton_experiments.workloads import PlannedRequest

VOCAB_SIZE = 32_000
_LARGEST_EXTENT = 1 << 16


class Simulation(msgspec.Struct, frozen=True):
    """All that a simulated cluster is made from."""

    config: ClusterConfig
    profile: EngineProfile
    layout: KVLayout
    link: LinkModel

    def cluster(self, steps: list[StepRecord] | None = None) -> SimulatedCluster:
        """A new one; its steps are added to `steps`."""
        return SimulatedCluster(
            self.config,
            self.profile.latency,
            self.link,
            layout=self.layout,
            max_model_len=self.config.model.max_model_len or _kv_tokens(self.config),
            next_token=1,
            on_step=None if steps is None else steps.append,
        )


def simulation(
    config: ClusterConfig, profile: EngineProfile, setting: Setting, link: LinkModel | None = None
) -> Simulation:
    """`config` in this setting, on workers as the profile says.

    The settings of the profile's conventions hold, and its size of KV pools where pools have no `kv_blocks`; the
    chunk size is the setting's, if it has one. `link`: between two workers; None: the profile's. Raises ConfigError
    where nobody says how large pools are.
    """
    placed = with_placement(with_settings_of(config, profile), setting.placement, setting.chunk_tokens)
    layout = layout_of(profile, placed.engine.block_size)
    return Simulation(with_kv_of(placed, profile), profile, layout, link or profile.link or LinkModel())


class SimulatedEngine:
    """Of workers as `profiles` say: settings name one of them where there are more. `link`: see `simulation`."""

    name: EngineName = "simulated"

    def __init__(
        self,
        config: ClusterConfig,
        profiles: Sequence[EngineProfile],
        *,
        link: LinkModel | None = None,
        vocab_size: int = VOCAB_SIZE,
    ):
        self.vocab_size = vocab_size
        self._config = config
        self._profiles = {profile.name: profile for profile in profiles}
        self._link = link

    def groups(self, settings: Sequence[Setting]) -> list[tuple[Setting, ...]]:
        return [tuple(settings)]

    @contextmanager
    def up(self, settings: Sequence[Setting], say: Say) -> Iterator[SimulatedStage]:
        yield SimulatedStage({setting: self.simulation(setting) for setting in settings})

    def simulation(self, setting: Setting) -> Simulation:
        profile = self._profiles[setting.engine] if setting.engine else next(iter(self._profiles.values()))
        return simulation(self._config, profile, setting, self._link)


class SimulatedStage:
    """A new cluster per call."""

    def __init__(self, simulations: dict[Setting, Simulation]):
        self._simulations = simulations

    @property
    def max_model_len(self) -> int:
        return min(simulation.cluster().router.max_model_len for simulation in self._simulations.values())

    @property
    def details(self) -> dict[str, Any]:
        engines = {simulation.profile.name: simulation for simulation in self._simulations.values()}
        blocks = {
            worker.worker_id: simulation.config.pools[worker.pool].kv_blocks
            for simulation in self._simulations.values()
            for worker in worker_specs(simulation.config)
        }
        described = {name: _described(simulation) for name, simulation in engines.items()}
        return {"profiles": described, "kv_blocks": blocks if len(engines) == 1 else {}}

    def alone(self, setting: Setting, requests: Sequence[PlannedRequest], label: Label) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        cluster = self._simulations[setting].cluster()
        extra = self._simulations[setting].profile.extra_output_tokens
        for request in requests:
            now = msgspec.structs.replace(request, at_s=cluster.clock.now)
            cluster.play([_arrival(now, extra)], _recorder(label, requests, records.append))
        return records

    def play(
        self, setting: Setting, requests: Sequence[PlannedRequest], label: Label, on_record: OnRecord
    ) -> tuple[list[RequestRecord], list[StepRecord]]:
        records: list[RequestRecord] = []
        steps: list[StepRecord] = []

        def keep(record: RequestRecord) -> None:
            records.append(record)
            on_record(record)

        simulation = self._simulations[setting]
        arrivals = (_arrival(request, simulation.profile.extra_output_tokens) for request in requests)
        simulation.cluster(steps).play(arrivals, _recorder(label, requests, keep))
        return sorted(records, key=lambda record: record.index), steps


def _arrival(request: PlannedRequest, extra_tokens: int) -> tuple[float, Sequence[int], SamplingParams]:
    sampling = SamplingParams(max_tokens=request.max_tokens + extra_tokens, ignore_eos=True)
    return request.at_s, request.prompt, sampling


def _recorder(
    label: Label, requests: Sequence[PlannedRequest], on_record: OnRecord
) -> Callable[[SimulatedRequest], None]:
    def on_end(ended: SimulatedRequest) -> None:
        record = label.record(ended.number, requests[ended.number])
        _fill(record, ended)
        on_record(record)

    return on_end


def layout_of(profile: EngineProfile, block_size: int) -> KVLayout:
    """A layout whose blocks are as large as the profile's. How they look inside plays no part in a simulation."""
    pairs = -(-profile.kv_bytes_per_token // 4)  # of a key and a value, of two bytes each
    layers = next(n for n in itertools.count(-(-pairs // _LARGEST_EXTENT) or 1) if pairs % n == 0 or n > 128)
    return KVLayout(layers, 1, block_size, -(-pairs // layers), "bfloat16")


def with_settings_of(config: ClusterConfig, profile: EngineProfile) -> ClusterConfig:
    """`config` with the profile's settings: whoever asks for conventions means all of them, whatever cluster file lies
    about. ConfigError for a setting that there is not."""
    tree = dump_config(config, with_secret=True)
    for dotted, value in profile.config.items():
        *path, key = dotted.split(".")
        section = tree
        try:
            for name in path:
                section = section[name]
            if key not in section:
                raise KeyError(key)
            section[key] = value
        except (KeyError, TypeError):
            raise ConfigError(dotted, f"of the profile {profile.name} is no setting", value=value) from None
    return parse_config(tree)


def with_kv_of(config: ClusterConfig, profile: EngineProfile) -> ClusterConfig:
    """`config` whose pools hold what the profile says, unless they say `kv_blocks` themselves. Raises ConfigError."""
    tree = dump_config(config, with_secret=True)
    for name, pool in tree["pools"].items():
        if pool["kv_blocks"] is None:
            if profile.kv_tokens is None:
                raise ConfigError(
                    f"pools.{name}.kv_blocks",
                    f"is needed: the profile {profile.name} does not tell how much KV fits; in an experiment every "
                    "worker is like those of the cluster file's first pool, so that one's `kv_blocks` is to be set",
                )
            block_size = pool["block_size"] or config.engine.block_size
            pool |= {"kv_blocks": max(1, profile.kv_tokens // block_size), "kv_memory_mib": None, "memory_mib": None}
    return parse_config(tree)


def _described(simulation: Simulation) -> dict[str, Any]:
    profile, link = simulation.profile, simulation.link
    notes = list(profile.notes)
    if profile.link is None:
        notes.append(f"the profile has no link between workers: {link.bytes_per_s / 1e9:g} GB/s are taken")
    return {
        "model": profile.model,
        "hardware": profile.hardware,
        "source": profile.source,
        "gpus": profile.gpus,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "kv_tokens": _kv_tokens(simulation.config),
        "link": msgspec.to_builtins(link),
        "notes": notes,
    }


def _kv_tokens(config: ClusterConfig) -> int:
    return max((pool.kv_blocks or 0) * config.block_size_of(pool) for pool in config.pools.values())


def _fill(record: RequestRecord, ended: SimulatedRequest) -> None:
    record.output_tokens = len(ended.tokens)
    record.attempts = ended.attempts
    if ended.error is not None:
        record.error = ": ".join(ended.error)
        return
    times = ended.token_times
    record.ttft_ms = None if ended.ttft_s is None else ended.ttft_s * 1e3
    record.latency_ms = None if ended.latency_s is None else ended.latency_s * 1e3
    record.tbt_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    record.stages_ms = {str(stage): s * 1e3 for stage, s in ended.timeline.stages().items()}
    residual = ended.timeline.residual(times[-1] - ended.submitted_at) if times else None
    record.residual_ms = None if residual is None else residual * 1e3
    record.prefill_worker, record.decode_worker = ended.prefill_worker, ended.decode_worker
    record.kv_bytes = ended.kv_bytes
    record.received_s = ended.timeline.marks.get(Mark.RECEIVED)
