"""Models that we do not compute ourselves: transformers' module, with our attention over the paged KV pool.

All rows of a step are one sequence to transformers, with positions of their own; what a row attends to is decided by
our backend, which the layers call through transformers' `AttentionInterface`. Slower than `baton.engine.model`, and
right: every model is compared with transformers' own attention when it is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from baton.engine.attention import AttentionBackend, AttentionBatch, AttentionKind
from baton.engine.batch import Batch
from baton.engine.kv_cache import TORCH_DTYPES, KVCache
from baton.engine.model_spec import CausalLMSpec
from baton.engine.transformers_spec import layer_windows
from baton.errors import ModelError

_NAME = "baton_paged"
_IGNORED = ("dropout", "is_causal", "position_ids", "use_cache", "return_dict", "output_")
"""How options of an attention function begin that change nothing here; `is_causal` is checked."""
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.2}
"""Largest accepted difference from transformers' own attention, relative to the spread of the logits. Rounding stays
far below. (In bfloat16 a mixture of experts may pick other experts, which shows.) A mistake is of the order of 1."""

_Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]], torch.Tensor]
"""A layer's attention: its module, query `[1, heads, rows, head_dim]`, key and value `[1, kv_heads, rows, head_dim]`,
mask, options. Returns `[1, rows, heads, head_dim]`."""

_attend: ContextVar[_Attend] = ContextVar("_attend")
"""Of the forward pass that this thread is in. Not an argument of it: not every model passes those that it does not
know on to its layers."""


class _Refused(Exception):
    """Why a model's attention cannot be computed by ours."""


class TransformersModel:
    """A causal language model of transformers; a `Model`.

    `path`: the model's folder, of which `spec` was read. Raises ModelError if the weights cannot be loaded or our
    attention cannot stand in for the model's own.
    """

    def __init__(self, spec: CausalLMSpec, path: Path, attention: AttentionBackend, *, dtype: str, device: str = "cpu"):
        self.spec = spec
        self.device = torch.device(device)
        self._attention = attention
        self._model = _load(path, TORCH_DTYPES[dtype]).to(self.device).eval()
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        try:
            self._kinds = self._find_kinds()
            self._compare(dtype)
        except _Refused as e:
            raise ModelError(f"{path}: {spec.architecture} cannot be served over a paged KV cache: {e}") from e
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as e:
            raise ModelError(f"{path}: transformers cannot compute packed rows of {spec.architecture}: {e}") from e

    def set_num_threads(self, num_threads: int) -> None:
        """See `Model.set_num_threads`. OpenMP keeps the number per calling thread."""
        torch.set_num_threads(num_threads)

    @property
    def computed_by(self) -> str:
        """See `Model.computed_by`."""
        return "transformers with Baton's attention"

    @property
    def weight_bytes(self) -> int:
        """See `Model.weight_bytes`."""
        return sum(int(parameter.nbytes) for parameter in self._model.parameters())

    def step_bytes(self, rows: int, logits_rows: int) -> int:
        """See `Model.step_bytes`. A guess: modules differ in what they keep."""
        hidden = int(self._model.config.hidden_size)
        element = int(self._model.dtype.itemsize)
        return rows * hidden * 32 * element + 2 * logits_rows * self.spec.vocab_size * 4

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """See `Model.forward`."""
        step = self._attention.prepare(batch.sequences, set(self._kinds), kv_cache)
        dtype = kv_cache.tensor.dtype

        def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
            layer = module.layer_idx
            # Of some models queries and keys are float32 after the rotary embedding.
            q, k, v = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))
            out = self._attention.attend(layer, self._kinds[layer], q, k, v, kv_cache, step)
            return out.view(1, *q.shape).to(value.dtype)

        rows = torch.from_numpy(batch.logits_rows)
        with _calling(attend):
            return self._logits(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), rows)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`[n, vocab]` float32 of `rows`, by the attention that the module is set to."""
        rows = rows.to(self.device)
        wanted = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self._model(
            input_ids=tokens.to(self.device)[None],
            position_ids=positions.to(self.device)[None],
            use_cache=False,
            **wanted,
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_rows else logits[rows]).float()

    @torch.inference_mode()
    def _find_kinds(self) -> list[AttentionKind]:
        """How each layer attends, told by the options with which it calls an attention that computes nothing."""
        found: dict[int, AttentionKind] = {}

        def record(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            options: dict[str, Any],
        ) -> torch.Tensor:
            layer = getattr(module, "layer_idx", None)
            if layer is None or not 0 <= layer < self.spec.num_layers or layer in found:
                raise _Refused("its attention is not once per layer")
            _check_shapes(self.spec, layer, query, key, value)
            found[layer] = _kind(module, query.shape[-1], mask, dict(options))
            return torch.zeros_like(query).transpose(1, 2)

        with _calling(record):
            self._logits(torch.arange(3), torch.arange(3), torch.arange(3))
        if len(found) != self.spec.num_layers:
            raise _Refused(f"{len(found)} of its {self.spec.num_layers} layers have attention")
        kinds = [found[layer] for layer in range(self.spec.num_layers)]
        limit = self.spec.max_position_embeddings
        windows = [kind.window if kind.window and kind.window < limit else None for kind in kinds]
        stated = layer_windows(self._model.config)
        if windows != stated if stated is not None else not any(windows):
            raise _Refused("its layers do not tell attention their sliding windows")
        return kinds

    def _compare(self, dtype: str) -> None:
        """Compute two short sequences packed, in two steps, and compare with transformers' own attention.

        Finds models whose rows meet elsewhere than in attention (convolutions), whose positions are not `position_ids`,
        or whose attention is more than its options tell.
        """
        lengths = (5, 4)
        kv_cache = KVCache(self.spec.kv_layout(4, dtype), 2 * len(lengths), str(self.device))
        tokens = np.arange(1, 1 + sum(lengths)) * 7919 % self.spec.vocab_size
        sequences = np.split(tokens, np.cumsum(lengths)[:-1])
        mine: list[list[torch.Tensor]] = [[] for _ in lengths]
        for start, end in ((0, 2), (2, max(lengths))):
            parts = [sequence[start:end] for sequence in sequences]
            sizes = [len(part) for part in parts]
            blocks = [(2 * i, 2 * i + 1) for i in range(len(parts))]
            batch = Batch(
                AttentionBatch([start] * len(parts), sizes, blocks),
                tokens=np.concatenate(parts),
                logits_rows=np.arange(sum(sizes)),
            )
            for i, logits in enumerate(torch.split(self.forward(batch, kv_cache), sizes)):
                mine[i].append(logits)
        self._model.set_attn_implementation("eager")
        with torch.inference_mode():
            rows = [torch.arange(length) for length in lengths]
            theirs = [self._logits(torch.from_numpy(s), r, r) for s, r in zip(sequences, rows, strict=True)]
        self._model.set_attn_implementation(_NAME)
        a, b = torch.cat([torch.cat(logits) for logits in mine]), torch.cat(theirs)
        off = float((a - b).norm() / (b - b.mean(dim=-1, keepdim=True)).norm().clamp(min=1e-20))
        if not off <= _TOLERANCE[dtype]:
            raise _Refused(f"its logits are {off:.1%} away from those of transformers' own attention")


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _call)
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as e:
        raise ModelError(f"{path}: transformers cannot load the model: {e}") from e
    if missing := sorted(told["missing_keys"]):  # transformers draws random weights for them
        raise ModelError(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    return model


def _call(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; the second result would be attention's weights."""
    return _attend.get()(module, query, key, value, attention_mask, options), None


@contextmanager
def _calling(attend: _Attend) -> Iterator[None]:
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _check_shapes(spec: CausalLMSpec, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    expected = (1, spec.num_kv_heads, query.shape[2], spec.head_dim)
    if not key.shape == value.shape == expected or query.shape[-1] != spec.head_dim:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("query", query), ("key", key), ("value", value)))
        raise _Refused(f"layer {layer} has {shapes}, where keys and values should be {list(expected)}")


def _kind(module: Any, head_dim: int, mask: torch.Tensor | None, options: dict[str, Any]) -> AttentionKind:
    if mask is not None:
        raise _Refused("its attention has a mask of its own")
    if not options.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise _Refused("its attention is not causal")
    scale, window, softcap = (options.pop(name, None) for name in ("scaling", "sliding_window", "softcap"))
    if unknown := sorted(name for name, x in options.items() if not name.startswith(_IGNORED) and x is not None):
        raise _Refused(f"its attention takes {', '.join(unknown)}")
    return AttentionKind(head_dim**-0.5 if scale is None else float(scale), window or None, softcap)
