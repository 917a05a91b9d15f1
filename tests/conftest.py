"""Fixtures that several test folders share. Keep it small: what one folder needs belongs into that folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, converted into the user's cache if it is not there yet."""
    from baton.engine.weights import demo_file, resolve_model
    from baton.errors import ModelError

    try:
        demo_file()
    except ModelError as e:
        pytest.skip(str(e))
    return resolve_model("demo")
