"""Engine and placement told apart, where an experiment has records of more than one engine.

DistServe's simulator gives the two placements it compares two engines; the winner reverses once both get the same.
Pure.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from baton_experiments.comparison import compare, reach_text
from baton_experiments.records import Setting
from baton_experiments.study import Study
from baton_experiments.words import number


def engine_effects(study: Study) -> dict[str, Any]:
    """Records of more than one engine: what the placement does on each, what the engine does under each placement."""
    best = study.best
    by_placement: dict[str, list[Setting]] = {}
    by_engine: dict[str, list[Setting]] = {}
    for setting in best.values():
        by_placement.setdefault(setting.placement, []).append(setting)
        by_engine.setdefault(setting.engine, []).append(setting)
    placement_effects, engine_rows, sentences = [], [], []
    for engine, settings in by_engine.items():
        for a, b in combinations(settings, 2):
            placement_effects.append({"engine": engine} | _effect(study, a, b))
    for placement, settings in by_placement.items():
        for a, b in combinations(settings, 2):
            row = {"placement": placement, "engines": [a.engine, b.engine]} | _effect(study, a, b)
            engine_rows.append(row)
            sentences.append(
                f"The engine alone: {placement} reaches {_short(study, a)} on {a.engine} and {_short(study, b)} on "
                f"{b.engine} ({_range(row)})."
            )
    mixed = []
    for a, b in combinations(best.values(), 2):
        if a.engine != b.engine and a.placement != b.placement:
            row = {"settings": [str(a), str(b)]} | _effect(study, a, b)
            mixed.append(row)
            same = [e for e in placement_effects if set(e["values"]) == {a.placement, b.placement}]
            opposite = [e for e in same if e["better"] and row["better"] and e["better"] != row["better"]]
            if opposite:
                sentences.append(
                    f"{a} against {b} would say that {row['better']} is better; that is the engine's doing: on one "
                    f"engine, {opposite[0]['engine']}, {opposite[0]['better']} is."
                )
    return {"placement": placement_effects, "engine": engine_rows, "mixed": mixed, "sentences": sentences}


def _effect(study: Study, a: Setting, b: Setting) -> dict[str, Any]:
    found = compare(study, "goodput", a, b)
    keys = (a.placement, b.placement) if a.placement != b.placement else (a.engine, b.engine)
    better = None
    if found.better is not None:
        assert found.difference is not None
        better = keys[0] if found.difference > 0 else keys[1]
    return {
        "values": dict(zip(keys, found.values, strict=True)),
        "difference": found.difference,
        "interval": found.interval,
        "better": better,
    }


def _short(study: Study, setting: Setting) -> str:
    found = study.goodput_of(setting)
    return f"{'at least ' if found.at_least else ''}{reach_text(study, setting)}"


def _range(row: dict[str, Any]) -> str:
    if row["interval"] is None:
        return "too few requests for an interval"
    low, high = (number(end, 2) for end in row["interval"])
    word = "" if row["better"] else "; no difference can be told"
    return f"difference {number(row['difference'], 2)}, 95 % interval {low} to {high}{word}"
