"""Fixtures that several test folders share. Keep it small: what one folder needs belongs into that folder."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that starts us in the background has SIGINT ignored, and the processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer of its own: a whole cluster loads it in no time."""
    from tests.golden.tiny_models import make_tiny_model, save_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other: seconds, where other work shares the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for AVX-512 in plain C++: a library that runs on any CPU."""
    from tests.native.emulation import build_emulated_library

    return build_emulated_library(tmp_path_factory.mktemp("emulated"))
