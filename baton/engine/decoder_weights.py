"""The weights of a decoder, as layers of tensors, from the names and shapes in which Hugging Face stores them.

Knows tensor names, shapes and `ModelSpec`. Must not know how a layer is computed. Weights come straight from mapped
safetensors into the tensors they stay in: q, k, v are fused, so are gate and up, and tied embeddings exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from baton.engine.model_spec import ModelSpec
from baton.errors import ModelError

_FUSED_IN_FILE = ("Phi3ForCausalLM",)
"""Architectures whose checkpoints hold one matrix for q, k and v, and one for gate and up."""

_ROTARY_BUFFER = "rotary_emb.inv_freq"
"""Stored by old checkpoints; computed from the config here."""


@dataclass
class Linear:
    """A matrix product's weights. `weight`: `[out, in]`, or what `pack` made of it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    outs: int
    ins: int


@dataclass
class Layer:
    """One decoder layer; `None`: the model has no such part."""

    attention_norm: torch.Tensor
    """`[hidden]`, as all norms of a layer but the two below."""
    qkv: Linear
    """Outputs: all query heads, all key heads, all value heads."""
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    """`[head_dim]` each."""
    out: Linear
    post_attention_norm: torch.Tensor | None
    """Of attention's output, before it is added to the residual."""
    mlp_norm: torch.Tensor
    gate_up: Linear
    """Outputs: all of the gate, all of up."""
    down: Linear
    post_mlp_norm: torch.Tensor | None
    """Of the MLP's output, before it is added to the residual."""


@dataclass
class DecoderWeights:
    """All weights of a decoder. Norms are float32, the model's `norm_offset` added; all else has the model's dtype."""

    embed: torch.Tensor
    """`[vocab, hidden]`; with tied embeddings it is also `lm_head.weight`, packed or not."""
    layers: list[Layer]
    norm: torch.Tensor
    lm_head: Linear

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors; tied ones count once."""
        found = {id(t): t.nbytes for t in (self.embed, self.norm, self.lm_head.weight)}
        for layer in self.layers:
            for part in vars(layer).values():
                tensors = (part.weight, part.bias) if isinstance(part, Linear) else (part,)
                found |= {id(t): t.nbytes for t in tensors if t is not None}
        return sum(found.values())


Pack = Callable[[torch.Tensor], torch.Tensor]
"""Turns a weight `[out, in]` into the order in which a kernel reads it; the plain one is dropped right after."""


def load_decoder(
    spec: ModelSpec,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack | None = None,
) -> DecoderWeights:
    """Read `weights` (Hugging Face's tensor name and tensor, in any order; see `iter_weights`) into place.

    Each matrix is packed as soon as its last part has come, so that hardly more than one exists twice.
    Norms and biases are never packed. Raises ModelError for missing, unknown and wrongly shaped tensors.
    """
    return _Loader(spec, dtype, device, pack).load(weights)


class _Loader:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, pack: Pack | None):
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._pack = pack
        self._slots: dict[str, tuple[Linear | torch.Tensor, slice, str]] = {}
        """Tensor name -> where it goes: a norm or a linear, which of its outputs, `weight` or `bias`."""
        self._missing: dict[int, int] = {}
        """id of a Linear -> parts of its weight that have not come."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> DecoderWeights:
        spec = self._spec
        hidden, vocab = spec.hidden_size, spec.vocab_size
        embed = self._linear(["model.embed_tokens"], [vocab], hidden)
        layers = [self._layer(i) for i in range(spec.num_layers)]
        norm = self._norm("model.norm", hidden)
        lm_head = embed if spec.tie_embeddings else self._linear(["lm_head"], [vocab], hidden)
        if not spec.tie_embeddings:
            del self._missing[id(embed)]  # only looked up: never packed
        missing = set(self._slots)
        for name, tensor in weights:
            if name not in self._slots:
                if name.endswith(_ROTARY_BUFFER) or (name == "lm_head.weight" and spec.tie_embeddings):
                    continue
                raise ModelError(f"the weights hold {name}, which {spec.architecture} does not have")
            self._place(name, tensor)
            missing.discard(name)
        if missing:
            raise ModelError(f"the weights lack {len(missing)} tensors, {min(missing)} among them")
        return DecoderWeights(embed.weight, layers, norm, lm_head)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        target, outs, part = self._slots[name]
        whole = target if isinstance(target, torch.Tensor) else target.weight if part == "weight" else target.bias
        assert whole is not None
        if isinstance(target, Linear) and part == "weight" and not whole.numel():
            # Memory is taken when the first part comes, and given back when the packed one is there.
            target.weight = whole = self._empty(target.outs, target.ins)
        slot = whole[outs]
        if slot.shape != tensor.shape:
            raise ModelError(f"{name} has shape {list(tensor.shape)}; its config.json says {list(slot.shape)}")
        if isinstance(target, torch.Tensor):
            # A stored weight has the model's dtype, as in transformers; the sum with the offset would not fit into it.
            slot.copy_(tensor.to(self._dtype))
            slot.add_(self._spec.norm_offset)
            return
        slot.copy_(tensor)
        if part == "weight" and id(target) in self._missing:
            self._missing[id(target)] -= 1
            if self._pack is not None and not self._missing[id(target)]:
                target.weight = self._pack(target.weight)

    def _layer(self, index: int) -> Layer:
        spec = self._spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        prefix = f"model.layers.{index}"
        hidden = spec.hidden_size

        def linear(modules: Sequence[str], outs: list[int], ins: int, bias: bool) -> Linear:
            if len(modules) < len(outs):
                outs = [sum(outs)]
            return self._linear([f"{prefix}.{m}" for m in modules], outs, ins, bias)

        def norm(module: str, size: int) -> torch.Tensor:
            return self._norm(f"{prefix}.{module}", size)

        qkv, gate_up = ["self_attn.qkv_proj"], ["mlp.gate_up_proj"]
        if spec.architecture not in _FUSED_IN_FILE:
            qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
            gate_up = ["mlp.gate_proj", "mlp.up_proj"]
        # With norms on both sides, `post_attention_layernorm` is what its name says; else it comes before the MLP.
        post = spec.post_norms
        return Layer(
            attention_norm=norm("input_layernorm", hidden),
            qkv=linear(qkv, [queries, keys, keys], hidden, spec.qkv_bias),
            query_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
            key_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
            out=linear(["self_attn.o_proj"], [hidden], queries, spec.out_bias),
            post_attention_norm=norm("post_attention_layernorm", hidden) if post else None,
            mlp_norm=norm("pre_feedforward_layernorm" if post else "post_attention_layernorm", hidden),
            gate_up=linear(gate_up, [spec.intermediate_size] * 2, hidden, spec.mlp_bias),
            down=linear(["mlp.down_proj"], [hidden], spec.intermediate_size, spec.mlp_bias),
            post_mlp_norm=norm("post_feedforward_layernorm", hidden) if post else None,
        )

    def _linear(self, modules: list[str], outs: list[int], ins: int, bias: bool = False) -> Linear:
        total = sum(outs)
        linear = Linear(self._empty(0), self._empty(total) if bias else None, total, ins)
        start = 0
        for module, size in zip(modules, outs, strict=True):
            own = slice(start, start + size)
            start += size
            self._slots[f"{module}.weight"] = (linear, own, "weight")
            if bias:
                self._slots[f"{module}.bias"] = (linear, own, "bias")
        self._missing[id(linear)] = len(modules)
        return linear

    def _norm(self, module: str, size: int) -> torch.Tensor:
        norm = torch.empty(size, dtype=torch.float32, device=self._device)
        self._slots[f"{module}.weight"] = (norm, slice(None), "weight")
        return norm

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
