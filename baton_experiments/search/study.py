"""What all runs of one search have in common: profiles by tensor parallel degree, the work, the SLO, engine settings.

Plain data that other processes are sent. Must not know what is searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import msgspec

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.choice import UNKNOWN
from baton_experiments.profiles.memory import TOO_LARGE
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import Slo
from baton_experiments.workloads import RequestShape

MIN_REQUESTS = 50
DEFINITIONS = ("distserve", "per_token")
"""Of `baton_experiments.goodput`, those that can be told of a request by itself."""


class Load(msgspec.Struct, frozen=True):
    """Requests in order, `times` at a mean rate of 1 per second, or as they were recorded. Goes round at its end."""

    times: tuple[float, ...]
    prompts: tuple[int, ...]
    """Lengths in tokens."""
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    """Of each prompt, where prompts share some; see `RequestShape`."""
    block_size: int = 0
    seed: int = 0

    @classmethod
    def of(cls, shapes: Sequence[RequestShape], *, seed: int = 0) -> Load:
        """Raises ConfigError if there are too few to tell shares of."""
        if len(shapes) < MIN_REQUESTS:
            raise ConfigError("workload", f"has {len(shapes)} requests, too few", allowed=f"at least {MIN_REQUESTS}")
        sizes = {shape.block_size for shape in shapes if shape.blocks}
        if len(sizes) > 1:
            raise ConfigError("workload", "has blocks of several sizes", value=sorted(sizes))
        return cls(
            tuple(shape.at_s for shape in shapes),
            tuple(shape.prompt_tokens for shape in shapes),
            tuple(shape.output_tokens for shape in shapes),
            tuple(shape.blocks for shape in shapes) if sizes else (),
            sizes.pop() if sizes else 0,
            seed,
        )

    @property
    def decodes(self) -> bool:
        """Whether any request has a second output token; the first one comes of prefill."""
        return max(self.outputs) > 1

    def __len__(self) -> int:
        return len(self.times)

    @property
    def longest(self) -> int:
        """Prompt and output of one request."""
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))

    @property
    def mean_tokens(self) -> float:
        """The same on average."""
        return (sum(self.prompts) + sum(self.outputs)) / len(self)

    @property
    def span_s(self) -> float:
        """From the first arrival to the first one of the next round: one mean gap after the last."""
        first, last = self.times[0], self.times[-1]
        return (last - first) * len(self) / max(1, len(self) - 1) if last > first else 1.0

    @property
    def mean_rate(self) -> float:
        return len(self) / self.span_s

    def at_rate(self, rate: float | None) -> Iterator[RequestShape]:
        """Without end: the same requests at each rate, their times stretched. None: as they are, once."""
        if rate is None:
            for i, at_s in enumerate(self.times):
                yield self._shape(i, at_s - self.times[0])
            return
        stretch, span, first = self.mean_rate / rate, self.span_s, self.times[0]
        for round_ in count():
            for i, at_s in enumerate(self.times):
                yield self._shape(i, (at_s - first + round_ * span) * stretch)

    def _shape(self, index: int, at_s: float) -> RequestShape:
        blocks = self.blocks[index] if self.blocks else ()
        return RequestShape(at_s, self.prompts[index], self.outputs[index], blocks, self.block_size if blocks else 0)


class Study(msgspec.Struct, frozen=True):
    """One search."""

    profiles: dict[int, EngineProfile]
    """By tensor parallel degree; each holds the longest request."""
    load: Load
    slo: Slo
    config: ClusterConfig
    """Engine, transfer and router settings; its pools play no part."""
    link: LinkModel
    share: float = 0.9
    """Of the requests that must meet the SLO."""
    definition: str = "distserve"
    num_requests: int = 2000
    """Judged at each rate."""
    tolerance: float = 0.05
    """Goodput is a rate that was run and kept the SLO; one so much higher missed it."""
    chunk_tokens: tuple[int, ...] = (512, 2048)
    """Step budgets to choose from, for each tensor parallel degree."""

    def __post_init__(self) -> None:
        check_question(self.share, self.definition, self.num_requests, self.chunk_tokens)
        if not self.chunk_tokens:
            raise ConfigError("--chunk-tokens", "are needed")
        if not 0 < self.tolerance < 1:
            raise ConfigError("tolerance", "is no share", value=self.tolerance, allowed="between 0 and 1")

    def kv_tokens(self, tp: int) -> int:
        tokens = self.profiles[tp].kv_tokens
        assert tokens is not None, "profiles without are refused"
        return tokens


def check_question(share: float, definition: str, num_requests: int, chunk_tokens: Sequence[int]) -> None:
    """What can be told without profiles and work. Raises ConfigError."""
    if definition not in DEFINITIONS:
        raise ConfigError("--definition", "is unknown", value=definition, allowed=", ".join(DEFINITIONS))
    if not 0 < share < 1:
        raise ConfigError("--attainment", "is no share", value=share, allowed="between 0 and 1, such as 0.9")
    if num_requests < MIN_REQUESTS:
        raise ConfigError("--requests", "are too few", value=num_requests, allowed=f">= {MIN_REQUESTS}")
    if any(tokens < 1 for tokens in chunk_tokens):
        raise ConfigError("--chunk-tokens", "must be positive", value=list(chunk_tokens), allowed=">= 1")


def usable_profiles(
    profiles: dict[int, EngineProfile], longest: int, kv_tokens_per_gpu: int | None = None
) -> tuple[dict[int, EngineProfile], list[str]]:
    """Those whose KV cache holds a request of `longest` tokens, and why others are left out.

    `kv_tokens_per_gpu` in place of what profiles say. Raises ConfigError if none is left.
    """
    usable = {}
    reasons: dict[str, list[str]] = {}
    for tp, profile in sorted(profiles.items()):
        if kv_tokens_per_gpu is not None:
            profile = msgspec.structs.replace(profile, kv_tokens=kv_tokens_per_gpu * tp)
        if profile.kv_tokens is None:
            reasons.setdefault(_why_unknown(profile), []).append(str(tp))
        elif profile.kv_tokens < longest:
            reason = f"its KV cache holds {profile.kv_tokens:,} tokens, the longest request {longest:,}"
            reasons.setdefault(reason, []).append(str(tp))
        else:
            usable[tp] = profile
    notes = [f"TP {', '.join(tps)} left out: {reason}" for reason, tps in reasons.items()]
    if not usable:
        raise ConfigError(
            "--profile",
            f"has nothing that can serve this work: {'; '.join(notes)}",
            allowed="--max-model-len to cut long requests; where the profile does not tell, --kv-tokens-per-gpu, or "
            "--profile FILE,gpu_memory_gib=80 for a model whose size is known here",
        )
    return usable, notes


def _why_unknown(profile: EngineProfile) -> str:
    """How much KV cache it holds."""
    if large := next((note for note in profile.notes if note.startswith(TOO_LARGE)), None):
        return large
    nor = ", nor its file's name (as profiler-a100-80g.vllm.json does) on what hardware"
    return f"the profile does not say how much KV cache a worker holds{nor if profile.hardware == UNKNOWN else ''}"
