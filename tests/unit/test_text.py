"""Text in and out: prompts, chat templates, and streaming that adds up to one-shot decoding."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from baton.errors import InvalidRequestError, ModelError
from baton.protocol import ChatMessage, ToolCall
from router.text import (
    MAX_HELD_TOKENS,
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    IncrementalDetokenizer,
    TokenBytes,
    TokenizerText,
)

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SAMPLE = "Grüße, 世界! 👩‍🚀 naïve €5 \t\n  two  spaces"


def byte_level() -> Any:
    """A byte-level BPE tokenizer: any text encodes, and characters are split into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["hello world, this is a test of the thing"] * 2,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<e>"], initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", bos_token="<s>", chat_template=TEMPLATE)


def byte_fallback() -> Any:
    """Like Llama's: words begin with a mark that reads as a space, unknown characters fall back to bytes."""
    words = ["<unk>", "<e>", *(f"<0x{i:02X}>" for i in range(256)), *"▁helowrd", "▁hello", "▁world"]
    tokenizer = Tokenizer(models.BPE(dict(zip(words, range(len(words)), strict=True)), [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>")


@pytest.fixture(scope="module")
def text() -> TokenizerText:
    return TokenizerText.from_tokenizer(byte_level())


@pytest.fixture(scope="module")
def fallback() -> TokenizerText:
    return TokenizerText.from_tokenizer(byte_fallback())


def in_general(text: TokenizerText) -> IncrementalDetokenizer:
    """The detokenizer for all tokenizers whose tokens stand for no bytes of their own."""
    return IncrementalDetokenizer(text._decode, text._special)


def stream(text: TokenizerText, pieces: Iterable[list[int]], detokenizer: Detokenizer | None = None) -> list[str]:
    detokenizer = detokenizer or text.detokenizer()
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


# --- streaming out ----------------------------------------------------------------------------------


def test_token_by_token_adds_up_and_never_shows_half_a_character(text: TokenizerText) -> None:
    ids = text.encode(SAMPLE)
    assert len(ids) > len(SAMPLE)  # characters are split, or this would test nothing
    for detokenizer in (text.detokenizer(), in_general(text)):
        parts = stream(text, ([i] for i in ids), detokenizer)
        assert "".join(parts) == SAMPLE
        assert not any(REPLACEMENT in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), max_size=6), max_size=30))
def test_any_tokens_in_any_pieces_add_up(pieces: list[list[int]]) -> None:
    text = _shared()
    ids = [i for piece in pieces for i in piece if i < text.vocab_size]
    cut = [[i for i in piece if i < text.vocab_size] for piece in pieces]
    assert type(text.detokenizer()) is ByteDetokenizer
    assert "".join(stream(text, cut)) == text.decode(ids)
    assert "".join(stream(text, cut, in_general(text))) == text.decode(ids)
    shown = text.detokenizer(skip_special_tokens=False)
    assert "".join(stream(text, cut, shown)) == text.decode(ids, skip_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.data())
def test_any_bytes_in_any_pieces_read_as_the_tokenizer_reads_them(data: bytes, draw: st.DataObject) -> None:
    text = _shared()
    of_byte = _byte_ids(text)
    ids = [of_byte[byte] for byte in data]
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    parts = stream(text, pieces)
    assert "".join(parts) == text.decode(ids) == data.decode("utf-8", "replace")
    for i in range(len(parts)):  # only an incomplete character is held back
        told = b"".join(text.token_bytes(token) for piece in pieces[: i + 1] for token in piece)
        held = told.decode("utf-8", "replace").removeprefix("".join(parts[: i + 1]))
        assert held in (REPLACEMENT * n for n in range(4))


@lru_cache
def _byte_ids(text: TokenizerText) -> dict[int, int]:
    ids = ((text.token_bytes(i), i) for i in range(text.vocab_size) if i not in text._special)
    return {data[0]: i for data, i in ids if len(data) == 1}


_TEXT: list[TokenizerText] = []


def _shared() -> TokenizerText:
    if not _TEXT:
        _TEXT.append(TokenizerText.from_tokenizer(byte_level()))
    return _TEXT[0]


def test_an_incomplete_character_is_held_back_and_flushed_at_the_end(text: TokenizerText) -> None:
    ids = text.encode("a€")
    detokenizer = text.detokenizer()
    assert detokenizer.push(ids[:-1]) == "a"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""
    detokenizer = in_general(text)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.flush() == "a" + REPLACEMENT
    assert detokenizer.flush() == ""


def test_a_detokenizer_starts_anew_after_its_flush(text: TokenizerText) -> None:
    detokenizer = text.detokenizer()
    for _ in range(2):
        assert detokenizer.push(text.encode("hello")) + detokenizer.flush() == "hello"


def test_special_tokens_are_not_text(text: TokenizerText) -> None:
    end = text.encode("<e>")
    assert len(end) == 1
    assert "".join(stream(text, [text.encode("hello"), end, text.encode(" world"), end])) == "hello world"


def test_a_special_token_in_a_character_does_not_end_it(text: TokenizerText) -> None:
    [end] = text.encode("<e>")
    first, *rest = text.encode("€")
    assert stream(text, [[first], [end], rest]) == ["", "", "€", ""]
    shown = text.detokenizer(skip_special_tokens=False)
    assert "".join(stream(text, [[first], [end], rest], shown)) == text.decode(
        [first, end, *rest], skip_special_tokens=False
    )


def test_ids_that_the_model_has_and_the_tokenizer_has_not_are_no_text(text: TokenizerText) -> None:
    hello = text.encode("hello")
    for ids in ([[1 << 30], hello, [299, 1 << 30]], [hello, [1 << 30]]):
        flat = [i for piece in ids for i in piece]
        assert "".join(stream(text, ids)) == text.decode(flat)
    assert text.token_bytes(1 << 30) == b""


def test_the_bytes_of_tokens_add_up_to_the_texts(text: TokenizerText) -> None:
    data = [text.token_bytes(i) for i in text.encode(SAMPLE)]
    assert b"".join(data) == SAMPLE.encode()
    assert any(_is_no_text(part) for part in data)


def _is_no_text(data: bytes) -> bool:
    try:
        return not data.decode()
    except UnicodeDecodeError:
        return True


def test_added_tokens_stand_for_their_own_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["a b\u2028", "Ġx"])
    text = TokenizerText.from_tokenizer(tokenizer)
    spaced, marked = (tokenizer.convert_tokens_to_ids(t) for t in ("a b\u2028", "Ġx"))
    assert type(text.detokenizer()) is ByteDetokenizer
    assert text.token_bytes(spaced).decode() == "a b\u2028"
    assert stream(text, [[spaced], [marked]])[:2] == [text.decode([spaced]), text.decode([marked])]


def test_only_tokens_that_stand_for_bytes_are_read_from_a_table(fallback: TokenizerText) -> None:
    assert type(fallback.detokenizer()) is IncrementalDetokenizer
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert type(TokenizerText.from_tokenizer(tokenizer).detokenizer()) is IncrementalDetokenizer


def test_a_table_that_differs_from_its_tokenizer_is_not_used() -> None:
    class Another:
        """Says the bytes of a byte-level tokenizer, and reads them as something else."""

        decoder = decoders.ByteLevel()

        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            return {"a": 0, "b": 1}

        def id_to_token(self, i: int) -> str:
            return "ab"[i]

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join("ab"[i] for i in ids).upper()

    assert TokenBytes.read(Another(), frozenset()) is None


def test_leading_spaces_and_bytes_of_a_fallback_tokenizer(fallback: TokenizerText) -> None:
    hello, world = (fallback._tokenizer.convert_tokens_to_ids(t) for t in ("▁hello", "▁world"))
    euro = [fallback._tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "€".encode()]
    assert stream(fallback, [[hello], [world], *([b] for b in euro * 2), [world]]) == [
        *("hello", " world", "", "", "€", "", "", "€", " world", ""),
    ]


def test_a_special_token_between_two_words_keeps_their_space(fallback: TokenizerText) -> None:
    hello, world, end = (fallback._tokenizer.convert_tokens_to_ids(t) for t in ("▁hello", "▁world", "<e>"))
    assert "".join(stream(fallback, [[hello], [end], [world]])) == "hello world"


class CountingDecode:
    def __init__(self, text: TokenizerText):
        self.text = text
        self.longest = 0

    def __call__(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return self.text.decode(ids)


@pytest.mark.parametrize("what", ["text", "undecodable", "special"])
def test_the_window_stays_short_however_long_the_output(text: TokenizerText, what: str) -> None:
    rng = random.Random(3)
    continuation = text._tokenizer.convert_tokens_to_ids("Ģ")  # a byte 0x80..0xBF alone is no character
    ids = {
        "text": [rng.randrange(50, 299) for _ in range(2000)],
        "undecodable": [continuation] * 2000,
        "special": [0, 1] * 1000,
    }[what]
    decode = CountingDecode(text)
    detokenizer = IncrementalDetokenizer(decode, text._special)
    parts = [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]
    assert "".join(parts) == text.decode(ids)
    assert decode.longest <= 2 * (MAX_HELD_TOKENS + 2)


# --- prompts in ---------------------------------------------------------------------------------------


def test_json_of_any_depth_is_a_clients_mistake_or_the_models_words(text: TokenizerText) -> None:
    deep = "[" * 100_000
    message = ChatMessage("user", "hi")
    for field in ("tools", "options"):
        with pytest.raises(InvalidRequestError, match="is not JSON"):
            text.encode_messages([message], **{field: deep})
    call = ToolCall("c", "f", deep)
    assert text.encode_messages([ChatMessage("assistant", "hi", (call,))])


def test_text_round_trips(text: TokenizerText) -> None:
    assert text.decode(text.encode(SAMPLE)) == SAMPLE
    assert text.encode("") == []
    assert max(text.encode(SAMPLE)) < text.vocab_size


def test_messages_go_through_the_template_up_to_the_answer(text: TokenizerText) -> None:
    ids = text.encode_messages([ChatMessage("user", "hello")])
    assert ids == text.encode("<s>user: hello<e><s>assistant: ")
    assert ids[0] == text._tokenizer.bos_token_id


def test_what_the_template_refuses_is_the_clients_error(text: TokenizerText) -> None:
    with pytest.raises(InvalidRequestError, match="no system here") as e:
        text.encode_messages([ChatMessage("system", "be brief")])
    assert e.value.field == "messages"


def test_a_model_without_a_template_takes_no_messages(fallback: TokenizerText) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        fallback.encode_messages([ChatMessage("user", "hello")])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_encoding_is_what_transformers_does(prompt: str, special: bool) -> None:
    text = _shared()
    try:
        expected = text._encode_slowly(prompt, special)
    except (UnicodeError, TypeError):
        with pytest.raises(InvalidRequestError):
            text.encode(prompt, add_special_tokens=special)
        return
    assert text.encode(prompt, add_special_tokens=special) == expected


def test_truncation_and_padding_that_a_tokenizer_was_saved_with_are_not_applied() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=100)
    text = TokenizerText.from_tokenizer(tokenizer)
    assert text.decode(text.encode("hello hello hello")) == "hello hello hello"


def test_text_that_is_not_unicode_is_the_clients_error(text: TokenizerText) -> None:
    with pytest.raises(InvalidRequestError, match="not valid text"):
        text.encode("\ud800")


# --- opening a model's folder ---------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        TokenizerText(tmp_path / "none")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        TokenizerText(tmp_path)


def test_a_saved_tokenizer_and_the_models_vocabulary(tmp_path: Path, text: TokenizerText) -> None:
    byte_level().save_pretrained(tmp_path)
    assert TokenizerText(tmp_path).vocab_size == text.vocab_size
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "model_type": "llama"}')
    opened = TokenizerText(tmp_path)
    assert opened.vocab_size == 512
    assert opened.encode(SAMPLE) == text.encode(SAMPLE)
    assert opened.encode_messages([ChatMessage("user", "a")]) == text.encode_messages([ChatMessage("user", "a")])


def test_the_demo_model(demo_model: Path) -> None:
    text = TokenizerText(demo_model)
    ids = text.encode(SAMPLE)
    parts = stream(text, ([i] for i in ids))
    assert "".join(parts) == SAMPLE
    assert not any(REPLACEMENT in part for part in parts)
    chat = text.encode_messages([ChatMessage("user", "Hello!")])
    assert text._tokenizer.decode(chat).endswith("<|im_start|>assistant\n")
    assert text.decode(chat).endswith("assistant\n")
    assert max(chat) < text.vocab_size
    assert text.decode(chat, skip_special_tokens=False).encode() == b"".join(text.token_bytes(i) for i in chat)
    assert type(text.detokenizer()) is ByteDetokenizer
    for i in range(0, text.vocab_size, 7):
        assert text.token_bytes(i).decode("utf-8", "replace") == text.decode([i], skip_special_tokens=False)
