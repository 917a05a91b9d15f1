"""The verdict: which placement, by how much with what certainty, why, what would help, and where the answer flips.

Placements are compared at their best chunk size and on one engine only; what an engine does is told apart from that.
A difference is *told* where the 95 % interval of the paired difference excludes zero and it is no trifle;
else the verdict says that none can be told. Order of what decides:

    goodput (90 % of requests, DistServe's definition)
      both keep the SLO at every rate     who is quicker: TTFT and p99 gap, better in one and worse in none
      both miss it at every rate          whose share of requests that keep it is higher at the lowest rate

Must not know files or how tables look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec

from baton_experiments.advice import helps
from baton_experiments.bootstrap import FEWEST_REQUESTS, excludes_zero
from baton_experiments.bottlenecks import Bottleneck
from baton_experiments.comparison import QUANTILES, TRIFLE, Comparison, Objective, compare, is_told, reach_text
from baton_experiments.engine_effects import engine_effects
from baton_experiments.flips import Flip, flips, steady
from baton_experiments.goodput import DEFINITIONS
from baton_experiments.placement import num_workers
from baton_experiments.records import Setting
from baton_experiments.study import MAIN, SHARE, Study
from baton_experiments.words import enumerated, milliseconds, number, per_second, percent, slo_text

_DECIDES: tuple[Objective, ...] = ("tbt_p99", "ttft_p50", "ttft_p99")
"""Where the SLO is kept by all."""


class Decision(msgspec.Struct, frozen=True):
    """On one engine."""

    engine: str
    winner: str | None
    by: str | None
    ranking: tuple[str, ...]
    sentences: tuple[str, ...]


def verdict(study: Study, bottlenecks: Mapping[tuple[Setting, float], Bottleneck]) -> dict[str, Any]:
    """Plain data. `winner`: None where no difference can be told; `sentence` says the answer, `sentences` all of it."""
    engines = list(dict.fromkeys(engine for engine, _ in study.best))
    decisions = [decide(study, engine) for engine in engines]
    compared = [d for d in decisions if len(d.ranking) > 1]
    winners = {d.winner for d in compared}
    winner = winners.pop() if len(winners) == 1 else None
    effects = engine_effects(study) if len(engines) > 1 else None
    chosen = deciding_points(study)
    named = [bottlenecks[point] for point in chosen]
    limits = [_limit(b) for b in named]
    changes = [{"placement": b.placement, "engine": b.engine, "sentence": s} for b in named for s in helps(study, b)]
    turns: list[Flip] = []
    sweeps: list[dict[str, Any]] = []
    flip_sentences = []
    for decision in compared:
        a, b = (study.best[decision.engine, placement] for placement in decision.ranking[:2])
        found, sweep = flips(study, a, b)
        turns += found
        sweeps += sweep
        where = f"On {decision.engine}: " if decision.engine and len(compared) > 1 else ""
        flip_sentences += [where + f.sentence for f in found]
        if not found:
            flip_sentences.append(where + steady(decision.ranking[:2], sweep[0]["rows"]))
    heads = [s for d in (compared or decisions) for s in d.sentences[:1]] or ["No request was measured."]
    if effects:
        heads = [*heads, *effects["sentences"]]
    caveats = list(_caveats(study))
    details = [s for d in compared for s in (*d.sentences[1:], *other_definitions(study, d))]
    return {
        "winner": winner,
        "by": next((d.by for d in compared if d.winner == winner), None) if winner else None,
        "sentence": " ".join(heads),
        "sentences": [*heads, *details, *limits, *(c["sentence"] for c in changes), *flip_sentences, *caveats],
        "bottlenecks": [msgspec.to_builtins(b) for b in named],
        "decisions": [msgspec.to_builtins(d) for d in decisions],
        "comparisons": [msgspec.to_builtins(c) for d in compared for c in _all_comparisons(study, d)],
        "changes": changes,
        "flips": [msgspec.to_builtins(f) for f in turns],
        "slo_sweep": sweeps,
        "engines": effects,
        "caveats": caveats,
        "certainty": {
            "level": 0.95,
            "method": f"bootstrap over {study.bootstrap.method}",
            "seeds": len(study.bootstrap.seeds),
            "units": study.bootstrap.num_units,
        },
    }


# --- who is better --------------------------------------------------------------------------------------


def decide(study: Study, engine: str) -> Decision:
    """Between the placements that ran on `engine`, each at its best."""
    best = [setting for (e, _), setting in study.best.items() if e == engine]
    order = sorted(best, key=lambda s: study.rank(s, best))
    ranking = tuple(s.placement for s in order)
    slo = slo_text(study.slo)
    where = f" on {engine}" if engine and len({e for e, _ in study.best}) > 1 else ""
    if len(order) < 2:
        only = [
            f"{s.placement}{where} keeps the SLO ({slo}) for 90 % of the requests {_reach(study, s)}; there is nothing "
            "to compare it with."
            for s in order
        ]
        return Decision(engine, None, None, ranking, tuple(only))
    top, rest = order[0], order[1:]
    rivals = [s for s in rest if compare(study, "goodput", top, s).better is None]
    if not rivals:
        second = compare(study, "goodput", top, rest[0])
        head = (
            f"{top.placement} is better{where or ' here'}: it keeps the SLO ({slo}) for 90 % of the requests "
            f"{_reach(study, top)}, {enumerated(f'{s.placement} {_reach(study, s)}' for s in rest)} "
            f"({_difference(second, f' {second.unit}', at_least=study.goodput_of(top).at_least)})."
        )
        return Decision(engine, top.placement, "goodput", ranking, (head, *_latency(study, top, rest[0])))
    tied = [top, *rivals]
    names = enumerated(s.placement for s in tied)
    goodputs = [study.goodput_of(s) for s in tied]
    if all(g.at_least for g in goodputs):
        rate = study.common_rates(*tied)[-1] if study.common_rates(*tied) else None
        highest = per_second(min(g.rate for g in goodputs))
        head = f"{_both(tied)} keep the SLO ({slo}) at every rate tried{where}, up to {highest}."
        quickest = _quickest(study, tied, rate) if rate is not None else None
        if quickest:
            other = next(s for s in tied if s is not quickest)
            head = f"{quickest.placement} is better{where or ' here'}, as it is quicker. {head}"
            return Decision(engine, quickest.placement, "latency", ranking, (head, *_latency(study, quickest, other)))
        more = _trade_off(study, tied[0], tied[1], rate) if rate is not None else ()
        return Decision(engine, None, None, ranking, (head + f" {more[0]}" if more else head, *more[1:]))
    if all(g.rate == 0 for g in goodputs):
        common = study.common_rates(*tied)
        none = "Neither" if len(tied) == 2 else "None"
        head = f"{none} of {names} keeps the SLO ({slo}) for 90 % of the requests at any rate tried{where}"
        if not common:
            return Decision(engine, None, None, ranking, (head + ".",))
        shares = {s: study.kept(s, common[0], MAIN) for s in tied}
        first, *others = sorted(tied, key=lambda s: -shares[s])
        found = [compare(study, "attainment", first, s, common[0]) for s in others]
        listed = enumerated(f"{s.placement} keeps it for {percent(shares[s])}" for s in (first, *others))
        told = all(c.better for c in found)
        tail = "" if told else ", and no difference can be told"
        head = f"{head}; at {per_second(common[0])} {listed}{tail}."
        if told:
            head = f"{first.placement} is better{where or ' here'}, though not good enough. {head}"
            return Decision(engine, first.placement, "attainment", ranking, (head, *_latency(study, first, others[0])))
        return Decision(engine, None, None, ranking, (head, *_latency(study, first, others[0])))
    reached = f"the SLO ({slo}) is kept for 90 % of the requests " + enumerated(
        f"{_reach(study, s)} with {s.placement}" for s in tied
    )
    interval = compare(study, "goodput", top, rivals[0])
    head = (
        f"No difference in goodput can be told between {names}{where}: {reached} "
        f"({_difference(interval, f' {interval.unit}')})."
    )
    return Decision(engine, None, None, ranking, (head, *_latency(study, top, rivals[0])))


def other_definitions(study: Study, decision: Decision) -> Iterable[str]:
    """A sentence where a goodput by another definition puts another of the first two placements ahead."""
    a, b = (study.best[decision.engine, placement] for placement in decision.ranking[:2])
    ahead = {}
    for name, definition in DEFINITIONS.items():
        values = study.reach(a, name), study.reach(b, name)
        interval = study.bootstrap.interval(study.goodput_difference(a, b, name))
        if is_told(values[0] - values[1], interval, values):
            first, second = (0, 1) if values[0] > values[1] else (1, 0)
            better = (a, b)[first].placement
            ahead[name] = (
                better,
                f"{definition.label} ({per_second(values[first])} against {per_second(values[second])})",
            )
    main = ahead.pop(MAIN, (None, ""))[0]
    for placement in (a.placement, b.placement):
        others = [text for better, text in ahead.values() if better == placement != main]
        if others:
            where = f" on {decision.engine}" if decision.engine else ""
            yield f"Definitions of goodput disagree{where}: {placement} is ahead under {enumerated(others)}."


def _all_comparisons(study: Study, decision: Decision) -> Iterable[Comparison]:
    best = [study.best[decision.engine, placement] for placement in decision.ranking]
    for a, b in combinations(best, 2):
        yield compare(study, "goodput", a, b)
        for rate in study.common_rates(a, b):
            yield compare(study, "attainment", a, b, rate)
            for objective in QUANTILES:
                yield compare(study, objective, a, b, rate)


def _quickest(study: Study, settings: Sequence[Setting], rate: float) -> Setting | None:
    """Better than each other one in some latency, where differences can be told, and worse in none, told or not."""
    for setting in settings:
        if all(_is_quicker(study, setting, other, rate) for other in settings if other is not setting):
            return setting
    return None


def _is_quicker(study: Study, setting: Setting, other: Setting, rate: float) -> bool:
    found = [compare(study, objective, setting, other, rate) for objective in QUANTILES]
    told = {c.better for c in found} - {None}
    worse = any(c.difference is not None and c.difference > TRIFLE * max(v or 0.0 for v in c.values) for c in found)
    return told == {setting.placement} and not worse


def deciding_points(study: Study) -> list[tuple[Setting, float]]:
    """Of each placement at its best: the first rate at which it misses the SLO for more than 10 %, else the highest."""
    points = []
    for setting in study.best.values():
        rates = study.rates(setting)
        missing = [rate for rate in rates if study.kept(setting, rate, MAIN) < SHARE]
        points.append((setting, missing[0] if missing else rates[-1]))
    return points


# --- sentences ------------------------------------------------------------------------------------------


def operating_rate(study: Study, a: Setting, b: Setting) -> float | None:
    """The highest rate of both at which one of them still keeps the SLO; else the lowest."""
    common = study.common_rates(a, b)
    reach = max(study.goodput_of(a).rate, study.goodput_of(b).rate)
    within = [rate for rate in common if rate <= reach]
    return within[-1] if within else common[0] if common else None


def _latency(study: Study, a: Setting, b: Setting) -> tuple[str, ...]:
    """What `a` and `b` do to those who wait, at one rate."""
    rate = operating_rate(study, a, b)
    if rate is None:
        return ()
    found = {objective: compare(study, objective, a, b, rate) for objective in QUANTILES}
    parts = []
    if None not in found["tbt_p99"].values:
        parts.append(
            f"its p99 gap between tokens is {_against(found['tbt_p99'])}, the longest {_against(found['tbt_max'])}"
        )
    if None not in found["ttft_p50"].values:
        parts.append(f"its median TTFT {_against(found['ttft_p50'])}, at p99 {_against(found['ttft_p99'])}")
    if not parts:
        return ()
    return (f"At {per_second(rate)}, {a.placement} against {b.placement}: {'; '.join(parts)}.",)


def _trade_off(study: Study, a: Setting, b: Setting, rate: float) -> tuple[str, ...]:
    found = [compare(study, objective, a, b, rate) for objective in _DECIDES]
    names = {"tbt_p99": "p99 gap between tokens", "ttft_p50": "median TTFT", "ttft_p99": "p99 TTFT"}
    parts = []
    for setting in (a, b):
        mine = [c for c in found if c.better == setting.placement]
        if mine:
            lead = (
                f"{names[c.objective]} ({_pair(c if c.placements[0] == setting.placement else _turned(c))})"
                for c in mine
            )
            parts.append(f"{setting.placement} has the shorter {enumerated(lead)}")
    if not parts:
        return (
            f"No difference in TTFT or in the gaps between tokens can be told at {per_second(rate)}.",
            *_latency(study, a, b),
        )
    return (
        f"Which is better depends on what counts: at {per_second(rate)} {enumerated(parts)}.",
        *_latency(study, a, b),
    )


def _turned(c: Comparison) -> Comparison:
    return msgspec.structs.replace(c, placements=c.placements[::-1], values=c.values[::-1])


def _pair(c: Comparison) -> str:
    return f"{_ms(c.values[0])} against {_ms(c.values[1])}"


def _against(c: Comparison) -> str:
    text = _pair(c)
    if c.objective == "tbt_max" or c.better is not None:
        return text
    if excludes_zero(c.interval):
        return f"{text} (about the same)"
    return f"{text} (no difference can be told)"


def _difference(c: Comparison, unit: str, *, at_least: bool = False) -> str:
    """`at_least`: the first placement may reach further than what was tried."""
    assert c.difference is not None
    word = "more" if c.difference >= 0 else "less"
    most = "at least " if at_least else ""
    if c.interval is None:
        return f"{most}{number(abs(c.difference), 2)}{unit} {word}; too few requests for an interval"
    low, high = (number(end, 2) for end in c.interval)
    return f"{most}{number(abs(c.difference), 2)}{unit} {word}, 95 % interval {low} to {high}"


def _limit(b: Bottleneck) -> str:
    setting = str(Setting(b.placement, b.chunk_tokens, b.engine))
    if b.limit is None:
        return f"{setting} at {per_second(b.rate)}: {b.sentence}."
    if b.missed > 0:
        return f"{setting} at {per_second(b.rate)} is limited by {b.sentence}."
    return f"{setting} up to {per_second(b.rate)}: {b.sentence}."


def _reach(study: Study, setting: Setting) -> str:
    """`up to 1.4/s`."""
    found = study.goodput_of(setting)
    if found.rate == 0:
        return f"not even at {per_second(study.rates(setting)[0])}"
    return f"up to {'at least ' if found.at_least else ''}{reach_text(study, setting)}"


def _both(settings: Sequence[Setting]) -> str:
    names = enumerated(s.placement for s in settings)
    return f"Both {names}" if len(settings) == 2 else f"All of {names}"


def _ms(value: float | None) -> str:
    return "none" if value is None else milliseconds(value)


def _caveats(study: Study) -> Iterable[str]:
    failed = {
        setting: sum(int((~c.done).sum()) for (s, _), c in study.columns.items() if s == setting)
        for setting in study.best.values()
    }
    if any(failed.values()):
        listed = enumerated(f"{count} with {setting}" for setting, count in failed.items() if count)
        yield f"Requests failed: {listed}; each counts as one that misses the SLO."
    sizes = {s.placement: num_workers(s.placement) for s in study.best.values()}
    if len(set(sizes.values())) > 1:
        listed = enumerated(f"{placement} has {size}" for placement, size in sizes.items())
        yield (
            f"The placements are of unequal size ({listed} workers): goodputs are compared per worker, everything else "
            "at the same total rate, where a larger placement has less to do for each worker."
        )
    if not study.bootstrap.tells:
        yield (
            f"Too few requests for intervals, so no difference is told: {FEWEST_REQUESTS} at each rate are the least, "
            "over all seeds, and a hundred begin to tell something."
        )
    elif len(study.bootstrap.seeds) == 1:
        yield "One seed: the intervals tell how requests of this one run differ, not how other runs would."
    tried = Counter((s.engine, s.placement) for s in study.settings)
    if len(set(tried.values())) > 1:
        yield (
            "The best chunk size was chosen on the requests that placements are compared on, which favours those that "
            "were tried with more of them."
        )
    if any(found.at_least for found in map(study.goodput_of, study.best.values())):
        yield (
            "Where the SLO is kept at every rate tried, goodput is at least the highest of them: higher rates would "
            "tell more."
        )
