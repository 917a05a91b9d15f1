"""Builds the native kernels (baton/engine/native/csrc); everything else is in pyproject.toml.

One shared library with a plain C interface, loaded by ctypes: no Python, torch or numpy headers. Where there is no C++
compiler the build goes on without it and the engine computes in torch.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("baton/engine/native/csrc")

setup(
    ext_modules=[
        Extension(
            "baton.engine.native._kernels",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            language="c++",
            # No contraction: what is fused is written so, and each element is computed the same way everywhere.
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-strict-aliasing",  # keys are transposed as 32-bit words, be they float32 or pairs of bfloat16
                "-Wno-maybe-uninitialized",  # in the compiler's own AVX-512 headers
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
