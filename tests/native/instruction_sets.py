"""Which kernels a test computes with: those of one instruction set of this CPU, or emulated ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.engine.native import library

NATIVE = tuple(name for name in library.INSTRUCTION_SETS if library.kernels(name) is not None)
"""Those of this CPU. `test_native_kernels.test_which_instruction_sets_there_are` tells which ones are missing, once."""
EMULATED = ("emulated avx512", "emulated avx512bf16") if shutil.which("g++") else ()


def use_instruction_set(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """From now on, until `forget_kernels`, all kernels are those of `name`, one of NATIVE or EMULATED."""
    if name in EMULATED:
        path: Path = request.getfixturevalue("emulated_library")
        monkeypatch.setenv("BATON_KERNELS", str(path))
    monkeypatch.setenv("BATON_INSTRUCTION_SET", name.removeprefix("emulated "))
    library.kernels.cache_clear()
    table = library.kernels()
    assert table is not None
    assert table.name.decode() == name.removeprefix("emulated ")
    return table


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual kernels again."""
    monkeypatch.undo()
    library.kernels.cache_clear()
