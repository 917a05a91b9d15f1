"""ProfileChoice: one of the profiles that a file or folder holds, before it is read; and how a user names one.

Plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError

UNKNOWN = "unknown"
"""Hardware of a file that does not tell it."""
KEYS: dict[str, Callable[[str], Any]] = {
    "model": str,
    "hardware": str,
    "engine": str,
    "tp": int,
    "conventions": str,
    "gpu_memory_gib": float,
}
"""What `load_profile` takes beside the path, as options say it."""


def parse_reference(text: str) -> tuple[str, dict[str, Any]]:
    """`PATH` or `PATH,KEY=VALUE,...`: the path, and the rest as arguments of `load_profile`. Raises ConfigError."""
    if Path(text).exists():  # a comma may be part of a name
        return text, {}
    path, *parts = text.split(",")
    chosen: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError("--profile", "is not PATH,KEY=VALUE,...", value=text, allowed=f"keys {', '.join(KEYS)}")
        try:
            chosen[key] = KEYS[key](value)
        except ValueError:
            raise ConfigError("--profile", f"has no number for {key}", value=value) from None
    return path, chosen


class ProfileChoice(msgspec.Struct, frozen=True, order=True):
    """What tells it from the others: give as much of it to `load_profile` as is needed."""

    format: str
    model: str
    hardware: str
    tp: int
    engine: str
    """What ran the model."""
    path: Path
    """The file or folder that holds it."""

    @property
    def but_tp(self) -> tuple[str, ...]:
        """The same of profiles that differ in their tensor parallel degree only."""
        return self.format, self.model, self.hardware, self.engine

    @property
    def name(self) -> str:
        return f"model {self.model}, hardware {self.hardware}, tp {self.tp}, engine {self.engine} ({self.path.name})"


def choose(choices: list[ProfileChoice], path: Path, tp: int | None, **asked: str | None) -> ProfileChoice:
    """The one that is meant. `asked`: fields by name, in either case; a part of it is enough where no other is that.

    Without `tp` the smallest of what is left. Raises ConfigError, which names the choices.
    """
    left = narrowed([choice for choice in choices if tp in (None, choice.tp)], **asked)
    if tp is None and len({choice.but_tp for choice in left}) == 1:
        left = [choice for choice in left if choice.tp == min(left).tp]
    if len(left) == 1:
        return left[0]
    given = [f"{field} {value}" for field, value in {**asked, "tp": tp}.items() if value is not None]
    problem = "holds several profiles" if left else "holds no such profile"
    names = "; ".join(choice.name for choice in (left or choices))
    raise ConfigError(str(path), problem, value=", ".join(given) or None, allowed=names)


def narrowed(choices: list[ProfileChoice], **asked: str | None) -> list[ProfileChoice]:
    """Those that may be meant, as in `choose`."""
    for field, value in asked.items():
        choices = _meant(choices, field, value)
    return choices


def _meant(choices: list[ProfileChoice], field: str, value: str | None) -> list[ProfileChoice]:
    if value is None:
        return choices
    wanted = value.lower()
    names = {choice: str(getattr(choice, field)).lower() for choice in choices}
    exact = [choice for choice in choices if names[choice] == wanted]
    return exact or [choice for choice in choices if wanted in names[choice]]
