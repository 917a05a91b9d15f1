"""ProfileChoice: one of the profiles that a file or folder holds, before it is read. Plain data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.errors import ConfigError


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
    def name(self) -> str:
        return f"model {self.model}, hardware {self.hardware}, tp {self.tp}, engine {self.engine} ({self.path.name})"


def choose(choices: list[ProfileChoice], path: Path, tp: int | None, **asked: str | None) -> ProfileChoice:
    """The one that is meant. `asked`: fields by name, in either case; a part of it is enough where no other is that.

    Without `tp` the smallest of what is left. Raises ConfigError, which names the choices.
    """
    left = [choice for choice in choices if tp in (None, choice.tp)]
    for field, value in asked.items():
        left = _meant(left, field, value)
    if tp is None and len({(choice.format, choice.model, choice.hardware, choice.engine) for choice in left}) == 1:
        left = [choice for choice in left if choice.tp == min(left).tp]
    if len(left) == 1:
        return left[0]
    given = [f"{field} {value}" for field, value in {**asked, "tp": tp}.items() if value is not None]
    problem = "holds several profiles" if left else "holds no such profile"
    names = "; ".join(choice.name for choice in (left or choices))
    raise ConfigError(str(path), problem, value=", ".join(given) or None, allowed=names)


def _meant(choices: list[ProfileChoice], field: str, value: str | None) -> list[ProfileChoice]:
    if value is None:
        return choices
    wanted = value.lower()
    names = {choice: str(getattr(choice, field)).lower() for choice in choices}
    exact = [choice for choice in choices if names[choice] == wanted]
    return exact or [choice for choice in choices if wanted in names[choice]]
