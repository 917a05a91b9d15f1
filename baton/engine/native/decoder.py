"""The decoder on native kernels: a whole step of the model is one call, which releases the GIL.

Weights are packed at load, each matrix in place of its plain form. The residual stream, norms and softmax are float32,
matrix products take weights in the model's dtype and accumulate in float32; the KV cache has the model's dtype.
Each row is computed by the same instructions in the same order whatever stands beside it (see `csrc/attention.h`), so
logits do not depend on the batch, the chunks, the block table or the number of threads, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import torch

from baton.engine.attention import AttentionBatch
from baton.engine.batch import Batch
from baton.engine.decoder_weights import DecoderWeights, Linear, load_decoder
from baton.engine.kv_cache import TORCH_DTYPES, KVCache
from baton.engine.model_spec import ModelSpec
from baton.engine.native import ops
from baton.engine.native.library import (
    LAYER_LINEARS,
    LAYER_NORMS,
    BatchStruct,
    DecoderStruct,
    LayerStruct,
    LinearStruct,
    SequencesStruct,
    Team,
    kernels,
    library_path,
)
from baton.engine.native.tables import block_tables

DTYPES = {"float32": 0, "bfloat16": 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def unsupported(spec: ModelSpec, dtype: str, device: str) -> str | None:
    """Why the native decoder cannot compute this model here, or None if it can."""
    if device != "cpu":
        return f"it computes on the CPU, not on {device}"
    if library_path() is None:
        return "its library was not built: there was no C++ compiler at installation that can (g++ 11 or later)"
    if kernels() is None:
        return "this CPU does not have what BATON_INSTRUCTION_SET asks for"
    if dtype not in DTYPES:
        return f"it has no kernels for {dtype}"
    if spec.activation not in ACTIVATIONS:
        return f"it has no activation {spec.activation}"
    sizes = (spec.hidden_size, spec.intermediate_size, spec.head_dim)
    if any(size % 2 for size in sizes):
        return "the model has odd sizes"
    if len({len(rope.inv_freq) for rope in spec.ropes} - {0}) > 1:
        return "the model's rotary embeddings differ in size"
    return None


class _PerThread(threading.local):
    """What a forward needs for itself, one for each thread that calls: engine threads of one process share the model.

    Given back when the thread ends, or the decoder goes.
    """

    def __init__(self) -> None:
        self.team: Team | None = None
        """None: the calling thread computes alone."""
        self._workspace = torch.empty(0, dtype=torch.uint8)

    @property
    def num_threads(self) -> int:
        return 1 if self.team is None else self.team.num_threads

    def set_num_threads(self, num_threads: int) -> None:
        if num_threads == self.num_threads:
            return
        if self.team is not None:
            self.team.close()
            self.team = None
        if num_threads > 1:
            self.team = Team(num_threads)

    def room_for(self, size: int) -> int:
        """The address of at least `size` bytes, as they were left or uninitialized."""
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8)
        return self._workspace.data_ptr()


class NativeDecoder:
    """The decoder as native kernels; a `baton.engine.model.Model` for CPUs.

    `weights`: as for `DecoderModel`. `instruction_set`: see `library.INSTRUCTION_SETS`; None: the fastest there is.
    Raises ModelError for missing, unknown and wrongly shaped tensors. See `unsupported` for what it cannot do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: str,
        instruction_set: str | None = None,
    ):
        reason = unsupported(spec, dtype, "cpu")
        if reason is not None:
            raise ValueError(f"the native decoder cannot be used: {reason}")
        self.spec = spec
        self.device = torch.device("cpu")
        self._kernels = kernels(instruction_set)
        assert self._kernels is not None, f"this CPU has no {instruction_set}"
        self.instruction_set = self._kernels.name.decode()
        self._dtype = DTYPES[dtype]
        self._kept: list[Any] = []
        """What the structs point to."""
        loaded = load_decoder(spec, weights, dtype=TORCH_DTYPES[dtype], device=self.device, pack=self._pack)
        self._weight_bytes = loaded.num_bytes
        self._model = self._struct(loaded, TORCH_DTYPES[dtype])
        self._rotary_half = max(len(rope.inv_freq) for rope in spec.ropes)
        self._ropes = [(np.array(rope.inv_freq, dtype=np.float32), np.float32(rope.scaling)) for rope in spec.ropes]
        self._own = _PerThread()

    def set_num_threads(self, num_threads: int) -> None:
        """See `Model.set_num_threads`. The threads run on the calling thread's cores."""
        torch.set_num_threads(num_threads)  # the sampler's
        self._own.set_num_threads(num_threads)

    @property
    def computed_by(self) -> str:
        """See `Model.computed_by`."""
        return f"native kernels ({self.instruction_set})"

    @property
    def weight_bytes(self) -> int:
        """See `Model.weight_bytes`."""
        return self._weight_bytes

    def step_bytes(self, rows: int, logits_rows: int) -> int:
        """See `Model.step_bytes`."""
        workspace: int = self._kernels.workspace_bytes(byref(self._model), rows, 1)
        return workspace + 2 * logits_rows * self.spec.vocab_size * 4

    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """See `Model.forward`."""
        rows, own = len(batch.tokens), self._own
        sequences, kept = sequences_struct(batch.sequences)
        self._check(batch, kept[1], kv_cache)
        cos, sin = self._rotations(batch)
        tokens, logits_rows = np.ascontiguousarray(batch.tokens), np.ascontiguousarray(batch.logits_rows)
        logits = torch.empty(len(logits_rows), self.spec.vocab_size)
        struct = BatchStruct(
            sequences,
            rows,
            len(logits_rows),
            tokens.ctypes.data,
            logits_rows.ctypes.data,
            cos.ctypes.data,
            sin.ctypes.data,
        )
        needed = self._kernels.workspace_bytes(byref(self._model), rows, own.num_threads)
        self._kernels.forward(
            byref(self._model),
            byref(struct),
            kv_cache.tensor.data_ptr(),
            kv_cache.layout.block_size,
            logits.data_ptr(),
            own.room_for(needed),
            None if own.team is None else own.team.handle,
        )
        del kept  # until here the call reads it
        return logits

    def _check(self, batch: Batch, tables: np.ndarray, kv_cache: KVCache) -> None:
        """Raises IndexError, as torch does, for what would be read or written beyond weights, rows and pool."""
        sequences, rows = batch.sequences, len(batch.tokens)
        for name, ids, limit in (
            ("token", batch.tokens, self.spec.vocab_size),
            ("row of logits", batch.logits_rows, rows),
            ("block", tables, kv_cache.num_blocks),
        ):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
                raise IndexError(f"{name} {ids.min()} or {ids.max()} is not one of {limit}")
        size = kv_cache.layout.block_size
        if sum(sequences.lengths) != rows or len(batch.logits_rows) > rows:
            raise IndexError(
                f"{rows} rows for sequences of {sum(sequences.lengths)}, {len(batch.logits_rows)} of logits"
            )
        for start, length, blocks in zip(sequences.starts, sequences.lengths, sequences.blocks, strict=True):
            if start + length > len(blocks) * size:
                raise IndexError(f"{start} + {length} tokens do not fit into {len(blocks)} blocks")

    def _rotations(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine `[ropes, rows, rotary_dim / 2]`, float32; a rope without frequencies rotates by nothing."""
        positions = batch.positions.astype(np.float32)[:, None]
        cos = np.ones((len(self._ropes), len(positions), self._rotary_half), dtype=np.float32)
        sin = np.zeros_like(cos)
        for i, (inv_freq, scaling) in enumerate(self._ropes):
            if len(inv_freq):
                angles = positions * inv_freq
                np.multiply(np.cos(angles), scaling, out=cos[i])
                np.multiply(np.sin(angles), scaling, out=sin[i])
        return cos, sin

    # --- weights -----------------------------------------------------------------------------------

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        return ops.pack(weight, self._kernels)

    def _struct(self, loaded: DecoderWeights, dtype: torch.dtype) -> DecoderStruct:
        spec = self.spec
        layers = (LayerStruct * spec.num_layers)()
        for i, layer in enumerate(loaded.layers):
            for name in LAYER_LINEARS:
                setattr(layers[i], name, self._linear(getattr(layer, name)))
            for name in LAYER_NORMS:
                setattr(layers[i], name, self._floats(getattr(layer, name)))
            layers[i].window = spec.layer_windows[i] or 0
            layers[i].rope = spec.layer_ropes[i]
        self._kept += [layers, loaded.embed]
        return DecoderStruct(
            dtype=self._dtype,
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=2 * max(len(rope.inv_freq) for rope in spec.ropes),
            num_layers=spec.num_layers,
            activation=ACTIVATIONS[spec.activation],
            embed_packed=int(spec.tie_embeddings),
            norm_eps=spec.rms_norm_eps,
            embed_scale=torch.tensor(spec.embed_scale).to(dtype).item(),
            attention_scale=spec.attention_scale,
            attention_softcap=spec.attention_softcap or 0.0,
            logits_softcap=spec.logits_softcap or 0.0,
            embed=loaded.embed.data_ptr(),
            norm=self._floats(loaded.norm),
            lm_head=self._linear(loaded.lm_head),
            layers=layers,
        )

    def _linear(self, linear: Linear) -> LinearStruct:
        self._kept.append(linear.weight)
        return LinearStruct(linear.weight.data_ptr(), self._floats(linear.bias), linear.outs, linear.ins)

    def _floats(self, tensor: torch.Tensor | None) -> c_void_p | None:
        if tensor is None:
            return None
        tensor = tensor.float().contiguous()
        self._kept.append(tensor)
        return c_void_p(tensor.data_ptr())


def sequences_struct(batch: AttentionBatch) -> tuple[SequencesStruct, Any]:
    """The batch's `baton_sequences`, and what must be kept alive for as long as it is used."""
    counts = np.array([batch.starts, batch.lengths], dtype=np.int32)
    tables = block_tables(batch)
    struct = SequencesStruct(*tables.shape, counts[0].ctypes.data, counts[1].ctypes.data, tables.ctypes.data)
    return struct, (counts, tables)
