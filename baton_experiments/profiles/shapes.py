"""The models that published profiles are of: what their KV cache and their matrices depend on. Pure data."""

from __future__ import annotations

import msgspec

from baton.errors import ConfigError


class Decoder(msgspec.Struct, frozen=True):
    """A decoder-only model, its weights and its KV cache in 16 bits."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    parameters: float
    """In all, as its makers count them."""
    gated: bool = True
    """Three matrices in the MLP, not two."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        return int(2 * self.parameters)


DECODERS: dict[str, Decoder] = {
    "facebook/opt-13b": Decoder(40, 5120, 40, 40, 128, 20480, 50272, 12.85e9, gated=False),
    "facebook/opt-66b": Decoder(64, 9216, 72, 72, 128, 36864, 50272, 65.7e9, gated=False),
    "facebook/opt-175b": Decoder(96, 12288, 96, 96, 128, 49152, 50272, 174.6e9, gated=False),
    "llama2-70b": Decoder(80, 8192, 64, 8, 128, 28672, 32000, 68.98e9),
    "bloom-176b": Decoder(70, 14336, 112, 112, 128, 57344, 250880, 176.25e9, gated=False),
    "meta-llama/Llama-3.1-8B": Decoder(32, 4096, 32, 8, 128, 14336, 128256, 8.03e9),
    "Qwen/Qwen3-32B": Decoder(64, 5120, 64, 8, 128, 25600, 151936, 32.76e9),
}
"""By the name that profiles use; dimensions of the models' published configurations."""


def decoder(name: str, source: str) -> Decoder:
    """Raises ConfigError, which says that `source` needs it, for a model that is not in the table."""
    found = DECODERS.get(name)
    if found is None:
        raise ConfigError(
            source,
            f"is of {name}, whose dimensions are not known here; add them to baton_experiments/profiles/shapes.py",
            allowed=", ".join(DECODERS),
        )
    return found
