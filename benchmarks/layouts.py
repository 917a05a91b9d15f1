"""KV layouts of known models, for benchmarks that move blocks and compute nothing."""

from __future__ import annotations

import msgspec

from baton.layout import KVLayout

LAYOUTS = {
    "demo": KVLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16"),
    "llama-3.1-8b-layout": KVLayout(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16"),
}
"""SmolLM2-135M: 22.5 KiB a token, 23.6 MB for 1024; Llama 3.1 8B: 128 KiB a token, 1 GiB for 8192."""


def layout_of(model: str, dtype: str) -> KVLayout:
    """The layout of `model`, a key of `LAYOUTS`, in `dtype`."""
    return msgspec.structs.replace(LAYOUTS[model], dtype=dtype)
