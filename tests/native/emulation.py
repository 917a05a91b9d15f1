"""The kernels for AVX-512 as a library that runs on any CPU, see `emulated_avx512.h`; slow, for tiny shapes only."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import xxhash
from filelock import FileLock

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "baton/engine/native/csrc"
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-ffp-contract=off", "-DBATON_EMULATED", f"-I{SOURCES}"]
FLAGS += ["-include", str(HERE / "emulated_avx512.h")]
"""Not optimized: the compiler would take minutes over vectors that are arrays."""


def emulated_library_in(folder: Path) -> Path:
    """It, in `folder`: compiled in some seconds, unless `folder` has it from these sources and this compiler already.

    However many processes ask, one compiles. Skips the test where there is no compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60).stdout
    digest = xxhash.xxh3_128(version + repr(FLAGS).encode())
    for source in sorted([*SOURCES.iterdir(), *HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(source.read_bytes())
    library = folder / f"emulated_kernels_{digest.hexdigest()}.so"
    with FileLock(folder / "emulated_kernels.lock", timeout=200):
        if not library.exists():
            for outdated in folder.glob("emulated_kernels_*.so"):
                outdated.unlink()
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                compile_emulated_library(compiler, Path(scratch)).rename(library)
    return library


def compile_emulated_library(compiler: str, folder: Path) -> Path:
    sources = [SOURCES / "isa_avx512.cpp", SOURCES / "isa_avx512bf16.cpp", SOURCES / "team.cpp"]
    sources.append(HERE / "emulated_library.cpp")
    objects = [folder / f"{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen([compiler, *FLAGS, "-c", str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True)
        for source, target in zip(sources, objects, strict=True)
    ]
    for process in compiling:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]
    library = folder / "emulated_kernels.so"
    linked = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)]
    subprocess.run(linked, check=True, capture_output=True, timeout=60)
    return library
