"""What a model's config says is read once, and read again when anything that it depends on changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine import spec_cache
from baton.engine.model_spec import CausalLMSpec, load_spec
from baton.engine.spec_cache import cached_spec
from baton.errors import ModelError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders that were read by transformers since the test began, with an empty cache."""
    found: list[Path] = []

    def counted(path: Path, impl: str = "auto", max_model_len: int | None = None) -> CausalLMSpec:
        found.append(path)
        return load_spec(path, impl, max_model_len)

    monkeypatch.setattr(spec_cache, "load_spec", counted)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return found


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's configuration."""
    target = tmp_path / "model"
    target.mkdir()
    for file in tiny_model.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_read_once(reads: list[Path], folder: Path) -> None:
    assert cached_spec(folder) == cached_spec(folder) == load_spec(folder)
    assert reads == [folder]


def test_read_again_after_a_change(reads: list[Path], folder: Path) -> None:
    before = cached_spec(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    assert cached_spec(folder).max_position_embeddings == 77 != before.max_position_embeddings
    assert len(reads) == 2
    cached_spec(folder, "baton", 64)
    assert len(reads) == 3


def test_a_broken_entry_is_replaced(reads: list[Path], folder: Path, tmp_path: Path) -> None:
    cached_spec(folder)
    (entry,) = (tmp_path / "cache" / "specs").iterdir()
    entry.write_bytes(b"not a spec")
    assert cached_spec(folder) == load_spec(folder)
    assert len(reads) == 2
    cached_spec(folder)
    assert len(reads) == 2


def test_an_entry_in_which_one_bit_is_wrong_is_not_used(reads: list[Path], folder: Path, tmp_path: Path) -> None:
    right = cached_spec(folder)
    (entry,) = (tmp_path / "cache" / "specs").iterdir()
    whole = entry.read_bytes()
    for at in range(0, len(whole), 5):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cached_spec(folder) == right
    for end in (0, 5, 16, len(whole) - 1):
        entry.write_bytes(whole[:end])
        assert cached_spec(folder) == right
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_none(
    reads: list[Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file"))
    assert cached_spec(folder) == cached_spec(folder)
    assert len(reads) == 2


def test_errors_are_not_remembered(reads: list[Path], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelError):
            cached_spec(tmp_path)
    assert len(reads) == 2
