"""Long names of engines, shortened for people to what tells them apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from baton_experiments.words import enumerated

_LONG = 30
"""Characters that a name may have before it is shortened."""
_AS_IT_IS = ("config", "engine", "environment", "workload")
"""Parts of a summary that say how it was run, with full names."""


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the first and last words that all have; empty where they are short, or one is left nothing."""
    split = {name: name.split() for name in names}
    if len(split) < 2 or max(map(len, split)) <= _LONG:
        return {}
    begin = _common(list(split.values()))
    end = _common([words[begin:][::-1] for words in split.values()])
    short = {name: " ".join(words[begin : len(words) - end]).strip(",;") for name, words in split.items()}
    return short if all(short.values()) and len(set(short.values())) == len(short) else {}


def _common(lists: Sequence[Sequence[str]]) -> int:
    """How many first words all have."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))


def shortened(summary: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A summary for people, with a note that says what the short names mean; and those names by the full ones."""
    short = short_names(dict.fromkeys(point["engine"] for point in summary["points"]))
    if not short:
        return summary, {}
    shown = {key: value if key in _AS_IT_IS else _replaced(value, short) for key, value in summary.items()}
    listed = enumerated(f"“{name}” is {full}" for full, name in short.items())
    shown["notes"] = [f"Engines are named by what tells them apart: {listed}.", *shown.get("notes", ())]
    return shown, short


def _replaced(value: Any, short: Mapping[str, str]) -> Any:
    """In all texts of plain data."""
    if isinstance(value, str):
        for full in sorted(short, key=len, reverse=True):  # one may begin with another
            value = value.replace(full, short[full])
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, short) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, short) for item in value]
    return value
