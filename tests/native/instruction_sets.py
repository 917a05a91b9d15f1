"""Which kernels a test computes with: those of one instruction set of this CPU, or emulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.engine.native import library

NATIVE = library.INSTRUCTION_SETS
EMULATED = ("emulated avx512", "emulated avx512bf16")


def use_instruction_set(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """From now on, until `forget_kernels`, all kernels are those of `name`; skips where they cannot be had."""
    emulated = name.startswith("emulated ")
    if emulated:
        path: Path = request.getfixturevalue("emulated_library")
        monkeypatch.setenv("BATON_KERNELS", str(path))
    elif library.library_path() is None:
        pytest.skip("the library was not built")
    monkeypatch.setenv("BATON_INSTRUCTION_SET", name.removeprefix("emulated "))
    library.kernels.cache_clear()
    table = library.kernels()
    if table is None:
        assert not emulated
        forget_kernels(monkeypatch)
        pytest.skip(f"this CPU has no {name}")
    assert table.name.decode() == name.removeprefix("emulated ")
    return table


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual kernels again."""
    monkeypatch.undo()
    library.kernels.cache_clear()
