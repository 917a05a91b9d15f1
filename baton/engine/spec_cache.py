"""Remembers what a model's config says: transformers, which reads it, takes seconds to import at every worker's start.

The key covers the files that are read, the code that reads them, and the version of transformers. A cache that cannot
be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import msgspec
import xxhash

from baton.engine import model_spec, rope
from baton.engine.gguf_convert import cache_root
from baton.engine.model_spec import CausalLMSpec, ModelSpec, load_spec

_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
_READERS = (model_spec, rope)
_SEAL_BYTES = 16


def cached_spec(path: Path, impl: str = "auto", max_model_len: int | None = None) -> CausalLMSpec:
    """`load_spec`, from the cache where it was called before with the same arguments and files. Raises ModelError."""
    entry = cache_root() / "specs" / f"{_key(path, impl, max_model_len)}.msgpack"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = entry.read_bytes()
        if found == _sealed(data := found[_SEAL_BYTES:]):
            return msgspec.msgpack.decode(data, type=ModelSpec)
    spec = load_spec(path, impl, max_model_len)
    if isinstance(spec, ModelSpec):  # others import transformers all the same
        with contextlib.suppress(OSError):
            _write(entry, _sealed(msgspec.msgpack.encode(spec)))
    return spec


def _key(path: Path, impl: str, max_model_len: int | None) -> str:
    digest = xxhash.xxh3_128(f"{impl} {max_model_len} {importlib.metadata.version('transformers')}".encode())
    for name in _FILES:
        file = path / name
        digest.update(b"\0" + name.encode() + (file.read_bytes() if file.is_file() else b""))
    for module in _READERS:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def _sealed(data: bytes) -> bytes:
    """With its digest: a damaged entry may still decode, as another model."""
    return xxhash.xxh3_128_digest(data) + data


def _write(entry: Path, data: bytes) -> None:
    """Whole or not at all, however many workers write it."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=entry.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        os.replace(scratch, entry)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
