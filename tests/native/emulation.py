"""The kernels for AVX-512 as a library that runs on any CPU, see `emulated_avx512.h`; slow, for tiny shapes only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "baton/engine/native/csrc"


def build_emulated_library(folder: Path) -> Path:
    """Compile it into `folder`, in a few seconds; skips the test where there is no compiler.

    Not optimized: the compiler would take minutes over vectors that are arrays.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    flags = ["-std=c++20", "-O0", "-fPIC", "-ffp-contract=off", "-DBATON_EMULATED", f"-I{SOURCES}"]
    flags += ["-include", str(HERE / "emulated_avx512.h")]
    sources = [SOURCES / "isa_avx512.cpp", SOURCES / "isa_avx512bf16.cpp", SOURCES / "team.cpp"]
    sources.append(HERE / "emulated_library.cpp")
    objects = [folder / f"{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True)
        for source, target in zip(sources, objects, strict=True)
    ]
    for process in compiling:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]
    library = folder / "emulated_kernels.so"
    linked = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)]
    subprocess.run(linked, check=True, capture_output=True, timeout=60)
    return library
