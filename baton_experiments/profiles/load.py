"""Profiles by path: what a file or folder holds, and one of it as an `EngineProfile`.

    distserve       JSON: model -> tensor parallel degree -> coefficients
    splitwise       CSV with prompt_size, batch_size, token_size, prompt_time, token_time
    llmservingsim   folder with attention.csv, dense.csv, per_sequence.csv, meta.yaml
    aiconfigurator  folder with tables of context attention, generation attention and gemm
    baton           JSON that `baton profile` wrote

Formats are told by content, not by name. Must not know clusters.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.profiles import aiconfigurator, distserve, fitted, llmservingsim, splitwise
from baton_experiments.profiles.choice import ProfileChoice, choose
from baton_experiments.profiles.memory import TOO_LARGE, USABLE, kv_note, kv_tokens_that_fit, memory_gib
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import DECODERS

BATON = "baton"
CONVENTIONS = {"distserve": distserve.FORMAT, "splitwise": splitwise.FORMAT}
"""By name: the format whose authors have them."""


def list_profiles(path: Path | str) -> list[ProfileChoice]:
    """What can be loaded from here. Raises ConfigError for what is malformed, and for what holds no profile."""
    path = Path(path)
    found = _in_folder(path) if path.is_dir() else _in_file(path)
    if not found:
        raise ConfigError(
            str(path), "holds no profile of a known format", allowed="see `baton_experiments.profiles.load`"
        )
    return sorted(found)


def load_profile(
    path: Path | str,
    *,
    model: str | None = None,
    hardware: str | None = None,
    engine: str | None = None,
    tp: int | None = None,
    conventions: str | None = None,
    gpu_memory_gib: float | None = None,
) -> EngineProfile:
    """The profile of these; what is left out need not be said where there is only one, and `tp` is the smallest.

    A part of a name is enough where no other is that: `opt-13b`.

    `conventions`: with what the simulator of the profile's authors does besides (`CONVENTIONS`). `gpu_memory_gib`: of
    one GPU, where neither profile nor hardware tells. How much KV fits, where the profile does not tell, is what the
    weights of a known model leave of it. Raises ConfigError, which names the choices, or file, place and reason.
    """
    if gpu_memory_gib is not None and not gpu_memory_gib > 0:
        raise ConfigError("gpu_memory_gib", "must be positive", value=gpu_memory_gib, allowed="> 0")
    path = Path(path)
    choice = choose(list_profiles(path), path, tp, model=model, hardware=hardware, engine=engine)
    if conventions is not None:
        of = CONVENTIONS.get(conventions)
        if of is None:
            raise ConfigError("conventions", "are unknown", value=conventions, allowed=", ".join(CONVENTIONS))
        if of != choice.format:
            raise ConfigError(
                "conventions", f"are for profiles of {of}, this one is of {choice.format}", value=conventions
            )
    return _with_kv(_read(choice, conventions, gpu_memory_gib), gpu_memory_gib)


def _read(choice: ProfileChoice, conventions: str | None, gpu_memory_gib: float | None) -> EngineProfile:
    match choice.format:
        case distserve.FORMAT:
            return distserve.read(choice, conventions=conventions)
        case splitwise.FORMAT:
            return splitwise.read(choice, conventions=conventions)
        case llmservingsim.FORMAT:
            return llmservingsim.read(choice, gpu_memory_gib=gpu_memory_gib)
        case aiconfigurator.FORMAT:
            return aiconfigurator.read(choice)
        case _:
            return fitted.profile_of(_json(choice.path), str(choice.path))


def _with_kv(profile: EngineProfile, gib: float | None) -> EngineProfile:
    """`kv_tokens` from model and memory where the profile has none; as it is where these do not tell either."""
    model = DECODERS.get(profile.model)
    if profile.kv_tokens is not None or model is None or profile.gpus < 1:
        return profile
    try:
        gib = memory_gib(profile.hardware) if gib is None else gib
    except ConfigError:
        return profile
    tokens, note = None, f"{TOO_LARGE} in {USABLE:g} of {gib:g} GiB a GPU"
    with suppress(ConfigError):
        tokens, note = kv_tokens_that_fit(model, gib * profile.gpus, profile.kv_bytes_per_token), kv_note(gib)
    return msgspec.structs.replace(profile, kv_tokens=tokens, notes=(*profile.notes, note))


def _in_folder(path: Path) -> list[ProfileChoice]:
    """Its own tables, else those of the files and folders in it."""
    if llmservingsim.is_folder(path):
        return llmservingsim.choices(path)
    found = aiconfigurator.choices(path)
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            found += llmservingsim.choices(entry) if llmservingsim.is_folder(entry) else aiconfigurator.choices(entry)
        elif entry.suffix in (".json", ".csv"):
            found += _in_file(entry, alone=False)
    return found


def _in_file(path: Path, *, alone: bool = True) -> list[ProfileChoice]:
    """`alone`: it was asked for, so that what is no profile is told."""
    if not path.is_file():
        raise ConfigError(str(path), "is no file or folder")
    if path.suffix == ".csv" or splitwise.is_table(path):
        if splitwise.is_table(path):
            return splitwise.choices(path)
        return aiconfigurator.choices(path.parent) if alone and aiconfigurator.is_table(path) else []
    try:
        tree = _json(path)
    except ConfigError:
        if alone:
            raise
        return []
    if isinstance(tree, dict) and tree.get("format") == fitted.FORMAT:
        profile = fitted.profile_of(tree, str(path))
        return [ProfileChoice(BATON, profile.model, profile.hardware, max(1, profile.gpus), BATON, path)]
    return distserve.choices(path, tree) if distserve.is_tree(tree) else []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(str(path), f"cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(str(path), f"is no JSON: {e}") from None
