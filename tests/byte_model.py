"""A tiny random model that speaks bytes: every text has tokens, so its output can be held to a form."""

from __future__ import annotations

from pathlib import Path

from tests.golden.tiny_models import make_tiny_model

EOS = 256
VOCAB = 264
"""256 bytes, the end of text, and a few rows that no token has, as real models have them."""


def make_byte_model(folder: Path) -> Path:
    """Save the model and its tokenizer."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    make_tiny_model(folder, vocab_size=VOCAB, eos_token_id=EOS, bos_token_id=None)
    words = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    assert fast.eos_token_id == EOS
    fast.save_pretrained(folder)
    return folder
