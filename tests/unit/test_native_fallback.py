"""Where there are no native kernels the engine computes in torch and says so; who asks for them is told why not."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.attention import attention_backend
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.load import load_model
from baton.engine.model import DecoderModel
from baton.engine.model_spec import load_spec
from baton.engine.native import library
from baton.engine.native.decoder import NativeDecoder
from baton.errors import ConfigError
from tests.native.instruction_sets import EMULATED, NATIVE

AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
FLAGS = {"portable": set(), "avx2": {"avx2", "fma"}, "avx512": AVX512, "avx512bf16": {*AVX512, "avx512_bf16"}}
"""As Linux names them."""


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an installation without a C++ compiler."""
    monkeypatch.setattr(library, "library_path", lambda: None)
    monkeypatch.setattr("baton.engine.native.decoder.library_path", lambda: None)
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def load(config: EngineConfig, model: Path, dtype: str = "float32") -> object:
    return load_model(config, load_spec(model), model, dtype=dtype, device="cpu")


def test_without_a_library_torch_computes(no_library: None, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(EngineConfig(), tiny_model)
    assert isinstance(model, DecoderModel)
    assert isinstance(attention_backend("auto", torch.device("cpu")), TorchAttention)
    (warning,) = caplog.messages
    assert "no C++ compiler" in warning


def test_without_a_library_native_is_an_error(no_library: None, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels.*no C\+\+ compiler.*auto, torch"):
        load(EngineConfig(kernels="native"), tiny_model)
    with pytest.raises(ConfigError, match=r"engine\.attention"):
        attention_backend("native", torch.device("cpu"))


def test_torch_on_demand_warns_of_nothing(no_library: None, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(load(EngineConfig(kernels="torch"), tiny_model), DecoderModel)
    assert not caplog.messages


def test_instructions_that_this_cpu_lacks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.kernels() is None:
        pytest.skip("the native kernels were not built")
    monkeypatch.setenv("BATON_INSTRUCTION_SET", "avx1024")
    library.kernels.cache_clear()
    try:
        with pytest.raises(ConfigError, match="BATON_INSTRUCTION_SET"):
            load(EngineConfig(kernels="native"), tiny_model)
    finally:
        monkeypatch.undo()
        library.kernels.cache_clear()


def test_what_the_kernels_cannot_compute(tiny_model: Path) -> None:
    if library.kernels() is None:
        pytest.skip("the native kernels were not built")
    assert isinstance(load(EngineConfig(), tiny_model), NativeDecoder)
    with pytest.raises(ConfigError, match="no kernels for float16"):
        load(EngineConfig(kernels="native"), tiny_model, dtype="float16")


@pytest.mark.parametrize("name", library.INSTRUCTION_SETS)
def test_the_instruction_sets_of_this_cpu(name: str) -> None:
    """Skipped, once, for each that is missing: the kernels' tests are made for those that there are."""
    if library.kernels() is None:
        pytest.skip("the native kernels were not built")
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    needed = FLAGS[name]
    if name not in NATIVE:
        assert not needed <= flags or not flags, f"this CPU has {needed}"
        assert name != "portable"
        pytest.skip(f"this CPU has no {name}")
    assert needed <= flags or not flags


def test_avx512_can_be_emulated() -> None:
    """Skipped where it cannot: its kernels' tests are missing there."""
    if not EMULATED:
        pytest.skip("needs g++")
    assert {name.removeprefix("emulated ") for name in EMULATED} <= set(library.INSTRUCTION_SETS)


def test_threads_that_the_system_does_not_give() -> None:
    """An error, not the end of the process; those that were started end."""
    if library.kernels() is None:
        pytest.skip("the native kernels were not built")
    ran = subprocess.run([sys.executable, "-c", _TOO_MANY_THREADS], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "1 thread; 1000 compute threads cannot be started\n"), ran.stderr


_TOO_MANY_THREADS = """
import resource
from pathlib import Path
from baton.engine.native.library import Team

def status(name):
    return next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith(name))

Team(2).close()
limit = (int(status("VmSize:")) + (256 << 10)) << 10  # room for a few stacks more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Team(1000)
except OSError as e:
    print(status("Threads:"), "thread;", str(e).partition(":")[0])
"""
