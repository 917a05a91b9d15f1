"""The work of an experiment, as its user names it: where requests come from, when, and what is changed about them.

`Work` is plain data, so it is part of a plan and of a result; `of(...)` makes the `Workload` of one seed at one rate.
The same seed is the same requests at every rate and in every placement, and the arrivals of one rate are those of
another, scaled in time. Must not know placements or clusters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.workloads import (
    PRESETS,
    Arrivals,
    Constant,
    Gamma,
    Lengths,
    PlannedRequest,
    Poisson,
    TokenLengths,
    Workload,
    describe,
    generate,
    preset,
    read_trace,
)
from baton_experiments.workloads.workload import Counts, Shapes

ARRIVALS = "poisson, gamma:CV, constant, or of a file with times trace"


class Work(msgspec.Struct, frozen=True):
    """What requests are like, at any rate."""

    source: str | None = None
    """A preset (`chat`, `code/8`), else a trace file; None: uniform `lengths`."""
    format: str | None = None
    """Of the file; None: told from its header."""
    skip_malformed: bool = False
    """Leave out the file's malformed rows, and count them."""
    lengths: Lengths = Lengths()
    arrivals: str = "poisson"
    scale_prompt: float = 1.0
    scale_output: float = 1.0
    max_total_tokens: int | None = None
    """A file's requests whose prompt and output together are longer are left out, before any scaling."""

    def check(self, num_requests: int, seeds: Sequence[int]) -> None:
        """Raises ConfigError (a TraceError for a file's rows) if some seed has not `num_requests` requests.

        Reads a trace file once.
        """
        _arrivals(self.arrivals, 1.0)
        for option, factor in (("--scale-prompt", self.scale_prompt), ("--scale-output", self.scale_output)):
            if not (factor > 0 and math.isfinite(factor)):
                raise ConfigError(option, "must be positive", value=factor, allowed="> 0")
        if not self.is_trace:
            for option, given in (
                ("--format", self.format),
                ("--skip-malformed", self.skip_malformed),
                ("--max-total-tokens", self.max_total_tokens),
            ):
                if given:
                    raise ConfigError(option, "is for trace files only", value=given)
            if self.arrivals == "trace":
                raise ConfigError("--arrivals", "of a trace need a trace file as --workload", value=self.arrivals)
            self._lengths()
            return
        trace = self._trace()
        if self.arrivals == "trace" and not trace.has_times:
            raise ConfigError("--arrivals", f"cannot be those of {self.source}, which has no times", value="trace")
        rows = self._scan()[0]
        num_parts = rows // num_requests
        if not num_parts:
            raise ConfigError(
                "--workload", f"has {rows} requests, a point takes {num_requests} with its ramps", value=self.source
            )
        if len({seed % num_parts for seed in seeds}) < len(seeds):
            raise ConfigError(
                "--seed",
                f"takes part seed % {num_parts} of the {num_parts} parts of {num_requests} requests in {self.source}, "
                "and two seeds take the same",
                value=list(seeds),
                allowed="seeds of different parts, or fewer --requests",
            )
        if self.arrivals == "trace":
            for seed in seeds:
                self._part(seed, num_requests).mean_rate()

    @property
    def is_trace(self) -> bool:
        return self.source is not None and self.source.partition("/")[0] not in PRESETS

    def digest(self) -> dict[str, Any] | None:
        """Tells another file of the same name apart; None: the work is not from a file. Raises ConfigError."""
        if not self.is_trace:
            return None
        assert self.source is not None, "only where there is a file"
        try:
            with open(self.source, "rb") as file:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
                return {"bytes": file.tell(), "blake2b": found.hexdigest()}
        except OSError as e:
            raise ConfigError("--workload", f"cannot be read: {e.strerror or e}", value=self.source) from e

    def of(self, *, rate: float, seed: int, num_requests: int, max_model_len: int) -> Workload:
        """The work of one seed at `rate` requests per second; requests beyond `max_model_len` tokens are cut."""
        arrivals = _arrivals(self.arrivals, rate)
        if not self.is_trace:
            assert arrivals is not None, "checked"
            work = generate(arrivals, self._lengths(), seed=seed, num_requests=num_requests)
        else:
            work = self._part(seed, num_requests)
            work = work.at_rate(rate) if arrivals is None else work.with_arrivals(arrivals, seed=seed)
        if (self.scale_prompt, self.scale_output) != (1.0, 1.0):
            work = work.scale_lengths(prompt=self.scale_prompt, output=self.scale_output)
        return work.clip(max_model_len)

    def requests(
        self, *, rate: float, seed: int, num_requests: int, max_model_len: int, vocab_size: int
    ) -> list[PlannedRequest]:
        """The same with prompts, whose tokens are made when they are looked at.

        Only the prompts' first tokens differ between rates: no run is to find the KV of another in a prefix cache.
        """
        work = self.of(rate=rate, seed=seed, num_requests=num_requests, max_model_len=max_model_len)
        return list(work.plan(vocab_size=vocab_size, seed=seed, salt=f"{float(rate)}"))

    def described(self, *, rate: float, seed: int, num_requests: int, max_model_len: int) -> dict[str, Any]:
        """For a result: where it comes from, what was changed, and what that made of it."""
        work = self.of(rate=rate, seed=seed, num_requests=num_requests, max_model_len=max_model_len)
        statistics = describe(work)
        named = {} if self.source is None or self.is_trace else {"preset": preset(self.source).description}
        return {"seed": seed, "rate": rate, **named, **work.description, "statistics": statistics}

    def _lengths(self) -> TokenLengths:
        return self.lengths.distributions() if self.source is None else preset(self.source).lengths

    def _trace(self) -> Workload:
        assert self.source is not None, "only where there is a file"
        if not Path(self.source).is_file():
            raise ConfigError(
                "--workload", "is neither a preset nor a file", value=self.source, allowed=f"{', '.join(PRESETS)}, FILE"
            )
        trace = read_trace(self.source, self.format, skip_malformed=self.skip_malformed)
        return trace if self.max_total_tokens is None else trace.keep(max_total_tokens=self.max_total_tokens)

    def _scan(self) -> tuple[int, dict[str, Any]]:
        """Requests of the file, and its description after a whole pass."""
        assert self.source is not None, "only where there is a file"
        stat = Path(self.source).stat()
        return _scanned(self, stat.st_mtime_ns, stat.st_size)

    def _part(self, seed: int, num_requests: int) -> Workload:
        """Part `seed` of the trace's consecutive parts of so many requests, counted from 0, round and round."""
        trace = self._trace()
        rows, described = self._scan()
        first = seed % (rows // num_requests) * num_requests

        def source(counts: Counts) -> Shapes:
            start = None
            for shape in islice(trace, first, first + num_requests):
                start = shape.at_s if start is None else start
                yield msgspec.structs.replace(shape, at_s=shape.at_s - start)

        part = {"first": first, "requests": num_requests}
        return Workload(source, {**described, "part": part}, has_times=trace.has_times)


@lru_cache(maxsize=8)
def _scanned(work: Work, changed_ns: int, size: int) -> tuple[int, dict[str, Any]]:
    """Of the file as it was then: read once, however many parts of it are taken."""
    trace = work._trace()
    rows = sum(1 for _ in trace)
    described = trace.description["source"]
    described["file_counts"] = described.pop("counts")
    if work.max_total_tokens is not None:
        described["left_out"] = {
            "max_total_tokens": work.max_total_tokens,
            "requests": described["file_counts"]["requests"] - rows,
        }
    return rows, described


def _arrivals(text: str, rate: float) -> Arrivals | None:
    """None: those of the trace."""
    kind, colon, parameter = text.partition(":")
    if kind == "gamma" and colon:
        try:
            return Gamma(rate, float(parameter))
        except ValueError:
            pass
    elif not colon and kind in ("poisson", "constant"):
        return Poisson(rate) if kind == "poisson" else Constant(rate)
    elif text == "trace":
        return None
    raise ConfigError("--arrivals", "is unknown", value=text, allowed=ARRIVALS)
