"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["invariants.md", "scenarios.md", "architecture.md", "contributing.md"])
def test_tests_and_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    for path in re.findall(
        r"`((?:tests|docs|baton\w*|router|kv_transfer|prefill_worker|decode_worker)/[\w./*-]+)", text
    ):
        assert list(ROOT.glob(path.rstrip("/"))), f"{page} names {path}"
    for name in re.findall(r"\b(test_\w+)\b(?!\.py|/)", text):
        if not any(path.stem == name for path in sources):
            assert any(f"def {name}(" in source for source in sources.values()), f"{page} names {name}"
