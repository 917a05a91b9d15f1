"""These tests need a GPU that torch sees; without one they are skipped. CI has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no GPU here")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
