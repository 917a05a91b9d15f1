"""Workloads of experiments: arrivals and lengths apart, traces that others published, and what was changed about them.

arrivals     when requests come: Poisson, bursts, constant, phases
lengths      how long they are: fixed, uniform, lognormal, percentiles, as seen
request      a request without tokens (`RequestShape`), its prompt, prefixes that prompts share
workload     a stream of requests, and the changes to it, each stated
readers      the trace files that people have
presets      chat, code, summarize, reasoning, with their sources
statistics   what a workload is like, in numbers
"""

from baton_experiments.workloads.arrivals import (
    ArrivalProcess,
    Arrivals,
    Constant,
    Gamma,
    Phase,
    Phased,
    Poisson,
    Recorded,
)
from baton_experiments.workloads.lengths import (
    Empirical,
    Fixed,
    LengthDistribution,
    Lengths,
    LogNormal,
    Quantiles,
    TokenLengths,
    Uniform,
    mean_tokens,
)
from baton_experiments.workloads.presets import PRESETS, Preset, preset
from baton_experiments.workloads.readers import FORMATS, TraceError, detect_format, read_trace
from baton_experiments.workloads.request import PlannedRequest, Prompt, RequestShape, plan
from baton_experiments.workloads.statistics import describe
from baton_experiments.workloads.workload import SharedPrefixes, Workload, generate

__all__ = [
    "FORMATS",
    "PRESETS",
    "ArrivalProcess",
    "Arrivals",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "LengthDistribution",
    "Lengths",
    "LogNormal",
    "Phase",
    "Phased",
    "PlannedRequest",
    "Poisson",
    "Preset",
    "Prompt",
    "Quantiles",
    "Recorded",
    "RequestShape",
    "SharedPrefixes",
    "TokenLengths",
    "TraceError",
    "Uniform",
    "Workload",
    "describe",
    "detect_format",
    "generate",
    "mean_tokens",
    "plan",
    "preset",
    "read_trace",
]
