"""ModelShape: what of a model its costs depend on. Pure data and counts."""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True):
    """A causal language model. Counts are numbers of elements, not bytes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    qk_dim: int
    """Of one head: what a query and a key have."""
    v_dim: int
    vocab: int
    max_len: int
    """Prompt plus output, in tokens."""
    parameters: int
    """All that are stored; a matrix that embedding and output share counts once."""
    body: int
    """Of the matrices that every token passes, those of experts left out."""
    head: int
    """Of the output matrix, which only sampled tokens pass."""
    experts_parameters: int = 0
    """Of all experts of all layers together."""
    experts: int = 1
    experts_per_token: int = 1
    kv_per_token: int = 0
    """Numbers that the cache keeps for one token, all layers."""
    kv_windows: tuple[tuple[int, int], ...] = ()
    """(window in tokens, layers): layers that attend to so many tokens only. The cache keeps the others' KV all the
    same where a request's blocks are one list, as they are here."""
    attention_layers: int = 0
    """That attend to all tokens before, or to a window of them; a layer with a recurrent state does not."""
    kv_layers: int | None = None
    """Of those, the ones that keep keys and values; the others attend to theirs. None: all do."""
    dtype: str = "bfloat16"
    """Of the weights, as the model names it. Where they are quantised, that of what is not: embeddings, output matrix,
    norms, and what the cache keeps."""
    quantization: str | None = None
    """By which method, as the model names it; None: the weights are not quantised."""
    body_bits: float | None = None
    """Mean of a number of `body` as it is stored, scales included; None: not known, or not quantised."""
    experts_bits: float | None = None
    """Of `experts_parameters`, likewise."""
    source: str = ""

    @property
    def kv_per_token_multi_head(self) -> int:
        """What the cache would keep if each query head had a key and a value of its own."""
        layers = self.attention_layers if self.kv_layers is None else self.kv_layers
        return layers * self.heads * (self.qk_dim + self.v_dim)

    @property
    def active(self) -> int:
        """Parameters that one sampled token passes."""
        return self.body + self.head + self.experts_parameters * self.experts_per_token // self.experts

    def experts_read(self, tokens: int) -> float:
        """Of the experts' parameters, those that a step of so many tokens reads, if each token's are drawn evenly."""
        if not self.experts_parameters:
            return 0.0
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts_parameters * (1 - missed)

    def attended(self, start: int, tokens: int) -> float:
        """Positions attended to by tokens `start` to `start + tokens`, summed over them, averaged over the layers."""
        every = tokens * start + tokens * (tokens + 1) // 2
        total = float(every) * self.attention_layers
        for window, layers in self.kv_windows:
            total -= (every - _windowed(start, tokens, window)) * layers
        return total / max(1, self.attention_layers)

    def kv_read(self, context: int) -> float:
        """Of a sequence's `context` tokens in the cache, how many a decode reads, averaged over the layers."""
        total = float(context) * self.attention_layers
        for window, layers in self.kv_windows:
            total -= max(0, context - window) * layers
        return total / max(1, self.attention_layers)


def _windowed(start: int, tokens: int, window: int) -> int:
    """`sum(min(p + 1, window))` over positions p from `start` to `start + tokens`."""
    below = min(max(window - start, 0), tokens)  # those that see less than the window
    return below * start + below * (below + 1) // 2 + (tokens - below) * window
