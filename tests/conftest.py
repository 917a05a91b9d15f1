"""Fixtures that several test folders share. Keep it small: what one folder needs belongs into that folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell that starts us in the background has SIGINT ignored, and the processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, converted into the user's cache if it is not there yet."""
    from baton.engine.weights import demo_file, resolve_model
    from baton.errors import ModelError

    try:
        demo_file()
    except ModelError as e:
        pytest.skip(str(e))
    return resolve_model("demo")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer of its own: a whole cluster loads it in no time."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from tests.golden.tiny_models import VOCAB, make_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")
    tokenizer.save_pretrained(folder)
    return folder
