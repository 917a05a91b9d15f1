"""Goodput: the rate up to which a system keeps what was promised, under each definition in use.

    distserve   TTFT within its limit, and the mean gap between tokens (TPOT) within its own.
                Zhong et al., DistServe, OSDI 2024.
    vllm        `vllm bench serve --goodput ttft:.. tpot:.. e2el:..`: the limits that are given. Where no end-to-end
                limit is, a request is good exactly when it is for DistServe; vLLM counts good requests a second
                instead of a rate (`good_requests_per_s` of a point).
    splitwise   Nine slowdowns against an uncontended request of the same lengths: TTFT 2, 3, 6 times at p50, p90,
                p99; mean gap and end to end 1.25, 1.5, 5 times. A set keeps them, not a request.
                Patel et al., Splitwise, ISCA 2024.
    per_token   Every token i by ttft + i * tbt: who is early may be late by as much. Its deadlines are those of Etalon
                (Agrawal et al., 2024), whose fluidity-index is 1 for exactly these requests.

Pure arithmetic. Must not know placements or where requests ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from baton_experiments.columns import Bools, Columns, Floats, Ints
from baton_experiments.records import RequestRecord, Slo

SHARES = (0.9, 0.99)
"""Of the requests that must meet the SLO at the rate that is called goodput."""

SLOWDOWNS: dict[str, dict[int, float]] = {
    "ttft": {50: 2.0, 90: 3.0, 99: 6.0},
    "tbt": {50: 1.25, 90: 1.5, 99: 5.0},
    "e2e": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""Splitwise's limits, by percentile."""


class Definition(msgspec.Struct, frozen=True):
    name: str
    label: str
    """For tables and legends."""
    meaning: str
    """A sentence."""
    good: Callable[[Columns, Slo], Bools] | None
    """Which requests meet the SLO; None: that is not a property of a request."""


class Reference(Protocol):
    """What requests take that have the system to themselves. Milliseconds, by lengths in tokens."""

    def ttft(self, prompt_tokens: Ints) -> Floats: ...

    def tbt(self, prompt_tokens: Ints, output_tokens: Ints) -> Floats: ...


class LinearReference(msgspec.Struct, frozen=True):
    """TTFT linear in the prompt's length, gaps of one size."""

    ttft_base_ms: float
    ttft_per_token_ms: float
    tbt_ms: float
    source: str = "given"

    def ttft(self, prompt_tokens: Ints) -> Floats:
        return self.ttft_base_ms + self.ttft_per_token_ms * prompt_tokens.astype(np.float64)

    def tbt(self, prompt_tokens: Ints, output_tokens: Ints) -> Floats:
        return np.full(len(prompt_tokens), self.tbt_ms, dtype=np.float64)

    @classmethod
    def estimated(
        cls, columns: Sequence[Columns], *, quantile: float = 0.05, source: str = "estimated"
    ) -> LinearReference | None:
        """The shape by least squares, the level by a quantile of the requests: 0.5 for requests that ran alone; a low
        one for requests that met others, the fastest of which met fewest (best at low rates).

        Time in queues is left out where stages are known. None without a request that has two tokens.
        """
        prompts, first, gaps = [], [], []
        for c in columns:
            waited = sum((c.stages[s] for s in ("router_queue", "prefill_queue") if s in c.stages), np.zeros(len(c)))
            prompts.append(c.prompt_tokens[c.done])
            first.append((c.ttft - waited)[c.done])
            gaps.append(c.select("tpot")[0])
        x, y, tpot = np.concatenate(prompts).astype(np.float64), np.concatenate(first), np.concatenate(gaps)
        if not tpot.size:
            return None
        slope = float(np.cov(x, y)[0, 1] / np.var(x, ddof=1)) if len(x) > 1 and np.ptp(x) > 0 else 0.0
        base = float(y.mean() - slope * x.mean())
        if slope < 0:
            slope, base = 0.0, float(y.mean())
        elif base < 0:  # longer prompts cost more than in proportion: through the origin
            slope, base = float((x @ y) / (x @ x)), 0.0
        level = float(np.quantile(y / np.maximum(base + slope * x, 1e-9), quantile))
        return cls(base * level, slope * level, float(np.quantile(tpot, quantile)), source)


def _distserve(columns: Columns, slo: Slo) -> Bools:
    return columns.done & (columns.ttft <= slo.ttft_ms) & (columns.tpot <= slo.tbt_ms)


def _vllm(columns: Columns, slo: Slo) -> Bools:
    good = _distserve(columns, slo)
    return good if slo.e2el_ms is None else good & (columns.latency <= slo.e2el_ms)


def _per_token(columns: Columns, slo: Slo) -> Bools:
    late = np.where(columns.done, columns.ttft, np.inf)
    if columns.gaps.size:
        upto = np.cumsum(columns.gaps - slo.tbt_ms)
        has = columns.num_gaps() > 0
        before = np.concatenate([np.zeros(1), upto])[columns.first_gap[has]]
        late[has] += np.maximum(np.maximum.reduceat(upto, columns.first_gap[has]) - before, 0.0)
    return late <= slo.ttft_ms + 1e-9


DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        Definition("distserve", "DistServe", "TTFT and mean gap (TPOT) within their limits", _distserve),
        Definition("vllm", "vLLM bench", "each limit given to --goodput: TTFT, TPOT, end to end", _vllm),
        Definition("splitwise", "Splitwise", "nine slowdowns against a request that runs alone", None),
        Definition("per_token", "per token", "every token i by TTFT + i · TBT", _per_token),
    )
}


def slowdowns(columns: Columns, reference: Reference) -> dict[str, Floats]:
    """Of each request that is done: `ttft` and `e2e`; `tbt` of those with a gap. 1: as if it ran alone.

    Splitwise's TBT is (response - TTFT) / tokens; here it is the mean gap, which differs by one token.
    """
    ok = columns.done
    alone_first = np.maximum(reference.ttft(columns.prompt_tokens), 1e-9)
    alone_gap = np.maximum(reference.tbt(columns.prompt_tokens, columns.output_tokens), 1e-9)
    alone = alone_first + alone_gap * np.maximum(columns.output_tokens - 1, 0)
    has_gap = ok & (columns.num_gaps() > 0)
    return {
        "ttft": (columns.ttft / alone_first)[ok],
        "tbt": (columns.tpot / alone_gap)[has_gap],
        "e2e": (columns.latency / alone)[ok],
    }


def splitwise_slack(columns: Columns, reference: Reference) -> dict[str, float]:
    """Limit over slowdown, for each of the nine (`ttft_p50`, ...); 1 or more: kept. What failed took forever.

    Infinite for the gaps of requests that have none.
    """
    failed = int((~columns.done).sum())
    slack = {}
    for name, values in slowdowns(columns, reference).items():
        values = np.sort(np.concatenate([values, np.full(failed, np.inf)]))
        for percentile, limit in SLOWDOWNS[name].items():
            slack[f"{name}_p{percentile}"] = limit / _percentile(values, percentile) if values.size else np.inf
    return slack


def _percentile(ordered: Floats, percentile: float) -> float:
    """As numpy's, but infinite beside an infinite neighbour instead of NaN."""
    at = (len(ordered) - 1) * percentile / 100
    low, high = float(ordered[int(at)]), float(ordered[min(int(at) + 1, len(ordered) - 1)])
    return low if at == int(at) or low == high else low + (high - low) * (at - int(at))


def attainment(
    records: Sequence[RequestRecord] | Columns, slo: Slo, definition: str, reference: Reference | None = None
) -> float:
    """The share of requests that meet `slo`; for `splitwise` the share of its nine limits that the set keeps.

    NaN for no requests, and for `splitwise` without a reference.
    """
    columns = records if isinstance(records, Columns) else Columns.of(records)
    good = DEFINITIONS[definition].good
    if not len(columns):
        return float("nan")
    if good is not None:
        return float(good(columns, slo).mean())
    if reference is None:
        return float("nan")
    slack = splitwise_slack(columns, reference)
    return sum(s >= 1 for s in slack.values()) / len(slack)


class Goodput(msgspec.Struct, frozen=True):
    """A rate in requests per second."""

    rate: float
    """0: missed at the lowest rate already."""
    at_least: bool
    """Kept at every rate: `rate` is the highest that was tried."""


def goodput(values: dict[float, float], share: float) -> Goodput:
    """Where `values`, by rate, first fall below `share`, on a line between the two rates. 0 for no values."""
    rates = np.array(sorted(values))
    if not rates.size:
        return Goodput(0.0, False)
    found = crossings(rates, np.array([[values[rate] for rate in rates]]), share)[0]
    return Goodput(float(rates[-1]), True) if np.isinf(found) else Goodput(float(found), False)


def crossings(rates: Floats, values: Floats, share: float) -> Floats:
    """`goodput` of each row of `values` [any, rates]; infinite where it never falls below `share`."""
    below = ~(values >= share - 1e-12)  # NaN, nothing measured, counts as missed
    first = below.argmax(axis=1)
    rows = np.arange(len(values))
    left = np.maximum(first - 1, 0)
    high, low = values[rows, left], values[rows, first]
    drop = np.where(np.isnan(low) | (high <= low), 1.0, high - low)
    part = np.where(np.isnan(low), 0.0, np.clip((high - share) / drop, 0.0, 1.0))
    at = rates[left] + part * (rates[first] - rates[left])
    return np.where(below.any(axis=1), np.where(first == 0, 0.0, at), np.inf)
