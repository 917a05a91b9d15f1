"""Rotary position embeddings as frequencies, from transformers' config.

Knows the kinds of rotary embedding that models are configured with. Must not know layers or tensors of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_STATIC = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""Kinds whose frequencies do not change within one model's limit. `dynamic` changes beyond it; `longrope` has two
sets, of which the limit that is served picks one."""


@dataclass(frozen=True)
class Rope:
    """A rotary embedding (Su et al. 2021): pairs are (i, i + rotary_dim / 2) of a head's first `rotary_dim` elements.

    `rotary_dim` is twice the number of frequencies; the rest of the head is not rotated. No frequencies: no rotation.
    """

    inv_freq: tuple[float, ...]
    """Radians per position, for each pair; frequency scaling applied."""
    scaling: float = 1.0
    """Factor on cosine and sine (YaRN's and LongRoPE's attention factor; else 1)."""


NO_ROPE = Rope(())


def read_ropes(config: Any, head_dim: int, max_len: int, *, partial: bool) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The rotary embeddings of `config` and, for each layer, the index of its own.

    `max_len`: tokens that will be served; LongRoPE's frequencies follow it, since the pool holds rotated keys, which
    cannot change as a request grows. `partial`: the architecture may rotate a part of each head.
    Raises ValueError for what is not supported.
    """
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if not set(layer_types) & set(config.rope_parameters):
        rope = _rope(config, config.rope_parameters, None, head_dim, max_len, partial)
        no_rope = [not used for used in getattr(config, "no_rope_layers", None) or ()]
        if not any(no_rope):
            return (rope,), (0,) * config.num_hidden_layers
        return (rope, NO_ROPE), tuple(map(int, no_rope))
    kinds = sorted(set(layer_types))  # the layers of each type have a rotary embedding of their own
    ropes = (_rope(config, config.rope_parameters[kind], kind, head_dim, max_len, partial) for kind in kinds)
    return tuple(ropes), tuple(kinds.index(kind) for kind in layer_types)


def _rope(
    config: Any, parameters: dict[str, Any], layer_type: str | None, head_dim: int, max_len: int, partial: bool
) -> Rope:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters.get("rope_type", "default")
    if kind not in _STATIC:
        raise ValueError(f"rope_type {kind} is not supported; known: {', '.join(_STATIC)}")
    if kind == "default":
        # RoFormer (Su et al. 2021), eq. 15. float32 as in transformers, for equal tokens.
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) if partial else head_dim
        inv_freq = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return Rope(tuple(inv_freq.tolist()))
    seq_len = max_len if kind == "longrope" else None
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len, layer_type=layer_type)
    if len(inv_freq) != head_dim // 2 and not partial:
        raise ValueError("rotary embeddings of a part of each head are not supported here")
    return Rope(tuple(inv_freq.float().tolist()), float(scaling))
