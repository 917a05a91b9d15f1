"""Fixtures that several test folders share. Keep it small: what one folder needs belongs into that folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.certificates import Certificate

# A shell that starts us in the background has SIGINT ignored, and the processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes is the machine's affair, which other work shares; `timeout` ends what hangs.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray come first. They take longest, and mostly wait: the other process of `-n 2` has the cores meanwhile.

    It takes over tests from the end only, so Ray clusters of different tests are not beside each other.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.fixture(scope="session", autouse=True)
def cores_are_shared() -> None:
    """With `-n` torch computes with this process' part of the cores: threads that wait for each other spin."""
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """For HTTPS on this machine."""
    from tests.certificates import make_certificate

    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other: seconds, where other work shares the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulated_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for AVX-512 in plain C++: a library that runs on any CPU, kept for further runs."""
    from tests.native.emulation import emulated_library_in

    cache = getattr(request.config, "cache", None)
    return emulated_library_in(tmp_path_factory.mktemp("emulated") if cache is None else cache.mkdir("emulated"))
