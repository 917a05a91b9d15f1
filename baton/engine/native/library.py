"""The native library: found, loaded by ctypes, and the kernels for this CPU chosen.

Declares `csrc/api.h` once more. Knows no tensors and no models.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "portable")
"""Fastest first."""
COPY_HASH_SHORTEST = 241
"""Bytes; shorter inputs are hashed in other ways."""


class LinearStruct(Structure):
    """`baton_linear`."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outs", c_int32), ("ins", c_int32)]


LAYER_LINEARS = ("qkv", "out", "gate_up", "down")
LAYER_NORMS = ("attention_norm", "query_norm", "key_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")
"""Fields of `LayerStruct`, named as those of `baton.engine.decoder_weights.Layer`."""


class LayerStruct(Structure):
    """`baton_layer`."""

    _fields_ = [
        *((name, LinearStruct) for name in LAYER_LINEARS),
        *((name, c_void_p) for name in LAYER_NORMS),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class DecoderStruct(Structure):
    """`baton_decoder`."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "dtype",
                "vocab",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_dim",
                "rotary_dim",
                "num_layers",
                "activation",
                "embed_packed",
            )
        ),
        *(
            (name, c_float)
            for name in ("norm_eps", "embed_scale", "attention_scale", "attention_softcap", "logits_softcap")
        ),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("lm_head", LinearStruct),
        ("layers", POINTER(LayerStruct)),
    ]


class SequencesStruct(Structure):
    """`baton_sequences`."""

    _fields_ = [
        ("count", c_int32),
        ("table_width", c_int32),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
    ]


class BatchStruct(Structure):
    """`baton_batch`."""

    _fields_ = [
        ("sequences", SequencesStruct),
        ("rows", c_int32),
        ("num_logits", c_int32),
        ("tokens", c_void_p),
        ("logits_rows", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]


class AttentionStruct(Structure):
    """`baton_attention`."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")),
        ("softcap", c_float),
    ]


_I, _L, _F, _P = c_int32, c_int64, c_float, c_void_p


class KernelsStruct(Structure):
    """`baton_kernels`: one instruction set's functions. Each releases the GIL while it runs."""

    _fields_ = [
        ("name", c_char_p),
        ("panel", c_int32),
        ("packed_bytes", CFUNCTYPE(_L, _I, _I, _I)),
        ("pack", CFUNCTYPE(None, _I, _P, _I, _I, _P)),
        ("workspace_bytes", CFUNCTYPE(_L, POINTER(DecoderStruct), _I, _I)),
        (
            "forward",
            CFUNCTYPE(None, POINTER(DecoderStruct), POINTER(BatchStruct), _P, _I, _P, _P, _P),
        ),
        ("linear", CFUNCTYPE(None, _I, POINTER(LinearStruct), _P, _I, _P)),
        ("rms_norm", CFUNCTYPE(None, _P, _I, _I, _P, _F, _P)),
        ("gated", CFUNCTYPE(None, _I, _P, _I, _I, _P)),
        ("attend", CFUNCTYPE(None, _I, POINTER(AttentionStruct), POINTER(SequencesStruct), _P, _P)),
        ("rotate", CFUNCTYPE(None, _P, _I, _I, _I, _I, _P, _P, _P)),
        ("write_kv", CFUNCTYPE(None, _I, POINTER(AttentionStruct), POINTER(SequencesStruct), _P, _P)),
    ]


def library_path() -> Path | None:
    """The shared library that the package's build made, or None where it could not (no compiler).

    For debugging the environment variable BATON_KERNELS names another one, such as a build with sanitizers.
    """
    other = os.environ.get("BATON_KERNELS")
    path = Path(other) if other else Path(__file__).with_name(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
    return path if path.is_file() else None


@functools.cache
def _library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.baton_kernels_named.argtypes = [c_char_p]
    library.baton_kernels_named.restype = POINTER(KernelsStruct)
    library.baton_team_create.argtypes = [c_int32]
    library.baton_team_create.restype = c_void_p
    library.baton_team_destroy.argtypes = [c_void_p]
    return library


@functools.cache
def copy_hash() -> Any:
    """`baton_copy_hash(source, target, size)`: XXH3 of `size` bytes, copied on the way unless `target` is None.

    For `COPY_HASH_SHORTEST` bytes and more. Releases the GIL. None: the library was not built.
    """
    return _copier("baton_copy_hash", c_uint64)


@functools.cache
def plain_copy() -> Any:
    """`baton_copy(source, target, size)`: a copy around the caches. Releases the GIL. None: it was not built."""
    return _copier("baton_copy", None)


def _copier(name: str, result: Any) -> Any:
    path = library_path()
    function = None if path is None else getattr(_library(path), name, None)
    if function is not None:
        function.argtypes = [c_void_p, c_void_p, c_int64]
        function.restype = result
    return function


@functools.cache
def kernels(instruction_set: str | None = None) -> Any:
    """The kernels of `instruction_set`, by default the fastest that this CPU has: a KernelsStruct, or None.

    None: the library was not built, or this CPU has no such instructions.

    The environment variable BATON_INSTRUCTION_SET takes the place of the default. It and BATON_KERNELS are read at the
    first call, and again after `kernels.cache_clear()`.
    """
    path = library_path()
    if path is None:
        return None
    chosen = instruction_set or os.environ.get("BATON_INSTRUCTION_SET")
    for name in (chosen,) if chosen else INSTRUCTION_SETS:
        table = _library(path).baton_kernels_named(name.encode())
        if table:
            return table.contents
    return None


class Team:
    """Compute threads for `KernelsStruct.forward`; they inherit the CPU affinity of the thread that makes them.

    Raises OSError where the system does not give so many.
    """

    handle: int | None = None
    """The `baton_team`; None once closed."""

    def __init__(self, num_threads: int):
        path = library_path()
        assert path is not None, "there are no kernels to run"
        self.num_threads = num_threads
        self._destroy = _library(path).baton_team_destroy
        self.handle = _library(path).baton_team_create(num_threads)
        if self.handle is None:
            raise OSError(f"{num_threads} compute threads cannot be started: the limit on threads or memory is reached")

    def close(self) -> None:
        """End the threads. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._destroy(handle)

    def __del__(self) -> None:
        self.close()
