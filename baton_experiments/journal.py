"""What is done of an experiment, in its folder: one file per finished point, so that it can go on where it stopped.

    config.json             what is run; the same for who goes on
    journal/NAME.msgpack    records and steps of a finished point, or of single requests, written whole or not at all

Must not know clusters or statistics.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.step_log import StepRecord
from baton_experiments.records import RequestRecord

CONFIG = "config.json"
ALONE = "_alone"
"""What the names of single requests end with."""
_REQUIRED = ("plan", "cluster", "profile")
"""What the configuration of every experiment has."""
_IDENTITY = (*_REQUIRED, "link", "trace", "against")
"""What must be equal for points of two runs to be of one experiment; the last three are missing where there is none."""
_JUDGED_BY = ("plan.slo_ttft_ms", "plan.slo_tbt_ms", "plan.slo_e2el_ms")
"""May differ: what was run is the same, whatever it is judged by."""


class Played(msgspec.Struct):
    """What came of one point."""

    records: list[RequestRecord]
    steps: list[StepRecord]
    took_s: float
    """From its start to the end of its last request, on the wall's clock."""


class Journal:
    """Of one folder. Opening it writes `config`, or takes over what a run of an equal one has left there."""

    def __init__(self, folder: Path, config: dict[str, Any], *, anew: bool = False):
        """`anew`: what an experiment left in the folder is removed. ConfigError if it is of another experiment."""
        self.folder = folder
        self._files = folder / "journal"
        config = msgspec.json.decode(msgspec.json.encode(config))
        with writing(folder):
            if anew:
                shutil.rmtree(self._files, ignore_errors=True)
                (folder / CONFIG).unlink(missing_ok=True)
            self._files.mkdir(parents=True, exist_ok=True)
        found = read_config(folder)
        if found is not None:
            for key in _IDENTITY:
                _require_equal(folder, key, found.get(key), config.get(key))
            config = found | {"plan": config["plan"]}
        self.config = config
        self.note()

    @property
    def names(self) -> set[str]:
        """Of what is kept."""
        return {file.stem for file in self._files.glob("*.msgpack")}

    @property
    def has_points(self) -> bool:
        """Whether any is done; single requests alone are none."""
        return any(not name.endswith(ALONE) for name in self.names)

    def note(self, **changes: Any) -> None:
        """Change the configuration that is kept with the points, of what was found out since."""
        self.config |= changes
        self._write(self.folder / CONFIG, json.dumps(self.config, indent=1).encode())

    def keep(self, name: str, played: Played) -> None:
        self._write(self._files / f"{name}.msgpack", msgspec.msgpack.encode(played))

    def read(self, name: str) -> Played:
        """Raises ConfigError for a file that is not what `keep` wrote."""
        file = self._files / f"{name}.msgpack"
        try:
            return msgspec.msgpack.decode(file.read_bytes(), type=Played)
        except (OSError, msgspec.DecodeError) as e:
            raise ConfigError(str(file), f"cannot be read, remove it to run the point again: {e}") from e

    def _write(self, file: Path, data: bytes) -> None:
        """Whole, or not at all."""
        new = file.with_name(file.name + ".new")
        with writing(self.folder):
            new.write_bytes(data)
            os.replace(new, file)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the operating system refuses in here is a ConfigError: a full disk, a folder where a file is to be."""
    try:
        yield
    except OSError as e:
        file = e.filename2 or e.filename  # the former where one takes another's place
        where = f"{file}: " if file and str(file) != str(folder) else ""
        raise ConfigError("--out", f"cannot be written: {where}{e.strerror or e}", value=str(folder)) from e


def read_config(folder: Path) -> dict[str, Any] | None:
    """What was or is run in this folder; None: nothing. Raises ConfigError for a file that is none of ours."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ConfigError(str(file), f"cannot be read: {e}") from e
    if not isinstance(config, dict) or not set(_REQUIRED) <= config.keys():
        raise ConfigError(str(file), "is not of an experiment; take another folder")
    return config


def _require_equal(folder: Path, path: str, found: Any, wanted: Any) -> None:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            _require_equal(folder, f"{path}.{key}", found.get(key), wanted.get(key))
    elif found != wanted and path not in _JUDGED_BY:
        raise ConfigError(
            "--out",
            f"{folder} holds another experiment: its {path} is {found!r}, not {wanted!r}; take another folder, or the "
            "same options to go on with that one",
        )
