"""Text to tokens and back: the router owns text, workers see token ids only.

Knows tokenizers and chat templates; must not know requests or sockets. transformers is imported when
a model's tokenizer is opened, so that the pure modules and tests stay light.

Streaming out: a token may end inside a character, and how a token reads may depend on the one before
it (a leading space, a byte of a character). So a few settled tokens are kept as context, each push
decodes context plus new tokens, and text is released only up to a point that later tokens cannot
change: not while it ends in U+FFFD, which is how an incomplete character decodes. (The `tokenizers`
package's DecodeStream works so too, but has no flush for what is left at the end, and its window
grows without bound while the output stays undecodable.)

Where each token stands for the same bytes wherever it is (byte-level BPE: GPT-2's, Llama 3's, Qwen's, the demo
model's), a table of those bytes and a UTF-8 decoder say the same, twenty times as fast.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from baton.errors import InvalidRequestError, ModelError
from baton.protocol import ChatMessage
from router.stop import StopMatcher, StopStrings
from router.tool_calls import MARKERS

REPLACEMENT = "�"
LONG_TEXT = 16_384
"""Characters; a longer text takes milliseconds to encode. Ask another thread than the one that serves everybody."""
MAX_HELD_TOKENS = 16
"""An incomplete character takes 3 tokens at most; with more than this held back the output is plainly undecodable."""


class Detokenizer(Protocol):
    """Turns one request's tokens into text, as they come."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle; may be empty."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the request."""
        ...


class Text(Protocol):
    """What the router needs of a tokenizer."""

    vocab_size: int
    """Ids below this are the model's."""
    chat_template: str
    """The model's, which tells how it writes tool calls; empty: none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, tools: str = "", options: str = "", continue_final: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...


class IncrementalDetokenizer:
    """Streams `decode(all tokens)`: the pieces add up to it, and no piece ends inside a character.

    `decode` turns ids into text, special tokens skipped; `special` are the ids it skips. Each token is
    decoded a bounded number of times, however long the output. One exception to adding up: a tokenizer
    with byte fallback may decode a run of bytes differently once an invalid byte follows it; text that
    was streamed by then stays as it was.
    """

    __slots__ = ("_context", "_decode", "_ids", "_special", "_told")

    def __init__(self, decode: Callable[[list[int]], str], special: frozenset[int] = frozenset()):
        self._decode = decode
        self._special = special
        self._ids: list[int] = []
        """Context and then held-back tokens."""
        self._context = 0
        """How many of `_ids` are context: their text was released."""
        self._told = ""
        """Text of the context."""

    def push(self, token_ids: Sequence[int]) -> str:
        if self._special.isdisjoint(token_ids):
            self._ids.extend(token_ids)
        else:
            self._ids.extend(t for t in token_ids if t not in self._special)
        if len(self._ids) == self._context:
            return ""
        text = self._decode(self._ids)
        held = len(self._ids) - self._context
        if text.endswith(REPLACEMENT) or len(text) <= len(self._told):
            return self._force(text) if held > MAX_HELD_TOKENS else ""
        return self._release(text, len(self._ids))

    def flush(self) -> str:
        """Releases what is held back, incomplete characters as U+FFFD. The detokenizer starts anew after it."""
        text = self._decode(self._ids) if len(self._ids) > self._context else self._told
        rest = text[len(self._told) :]
        self._ids, self._context, self._told = [], 0, ""
        return rest

    def _release(self, text: str, upto: int) -> str:
        """`text` is that of the first `upto` ids; what of it was held becomes the next context."""
        fresh = text[len(self._told) :]
        self._ids = self._ids[self._context :]
        self._context = upto - self._context
        self._told = self._decode(self._ids[: self._context])
        return fresh

    def _force(self, text: str) -> str:
        """Let go of output that will not become text: cut where both halves read as they do together."""
        for upto in range(len(self._ids) - 1, len(self._ids) - 5, -1):
            head = self._decode(self._ids[:upto])
            if len(head) >= len(self._told) and head + self._decode(self._ids[upto:]) == text:
                return self._release(head, upto)
        return ""


class TokenBytes:
    """What each token of a byte-level tokenizer stands for, wherever it is in a text.

    `of`: bytes by token id, which may end inside a character. `texts`, and without special tokens `plain_texts`:
    characters by id; None: not whole ones. `plain`: like `of`, nothing for special tokens.
    """

    __slots__ = ("of", "plain", "plain_texts", "texts")

    def __init__(self, of: list[bytes], special: frozenset[int]):
        self.of = of
        self.texts = [_whole(data) for data in of]
        self.plain = [b"" if i in special else data for i, data in enumerate(of)]
        self.plain_texts = ["" if i in special else text for i, text in enumerate(self.texts)]

    @classmethod
    def read(cls, backend: Any, special: frozenset[int]) -> TokenBytes | None:
        """Of a tokenizer of the `tokenizers` package; None if its tokens do not stand for bytes of their own."""
        if type(backend.decoder).__name__ != "ByteLevel":
            return None
        num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        tokens = [backend.id_to_token(i) or "" for i in range(num_ids)]
        of = [_byte_level(token) for token in tokens]
        # What the table says is held against the tokenizer once, on every token in a row.
        if b"".join(of).decode("utf-8", "replace") != backend.decode(list(range(num_ids)), skip_special_tokens=False):
            return None
        return cls(of, special)

    def decode(self, token_ids: Sequence[int], *, plain: bool) -> bytes:
        """Their bytes in a row; ids that the tokenizer does not know stand for nothing."""
        table = self.plain if plain else self.of
        return b"".join([table[i] for i in token_ids if i < len(table)])


def _whole(data: bytes) -> str | None:
    """The characters that these bytes are by themselves; None if they begin or end inside one, or are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _byte_level(token: str) -> bytes:
    """A token's bytes: one per character, or where some character stands for no byte (added tokens) the text itself."""
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable characters of Latin-1 stand for their own byte, those from U+0100 on for all others."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [i for i in range(256) if i not in own]
    return {chr(i): i for i in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class ByteDetokenizer:
    """Streams `decode(all tokens)` of a byte-level tokenizer: the pieces add up to it exactly.

    Held back is only an incomplete character; bytes that can be none read as U+FFFD at once.
    """

    __slots__ = ("_pending", "_plain", "_table", "_texts")

    def __init__(self, table: TokenBytes, *, skip_special_tokens: bool):
        self._table = table
        self._plain = skip_special_tokens
        self._texts = table.plain_texts if skip_special_tokens else table.texts
        self._pending = b""
        """Begins a character that the next tokens may complete."""

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._pending:
            try:
                text = self._texts[token_ids[0]]
            except IndexError:
                return ""  # an id that the model has and the tokenizer has not
            if text is not None:
                return text
        data = self._pending + self._table.decode(token_ids, plain=self._plain)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """Releases what is held back, as U+FFFD. The detokenizer starts anew after it."""
        rest, self._pending = self._pending.decode("utf-8", "replace"), b""
        return rest


class WatchedText:
    """One sample's text while stop strings are looked for: a `TokenWatch` for the core, a `Detokenizer` for the front.

    The core shows it each token, and ends the sample when it says so; the front takes the text that has
    come of them, up to the stop string. `min_tokens`: stop strings that end in the text of the first so many
    tokens are ignored.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens", "_ready")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, *, include: bool, min_tokens: int):
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ready: list[str] = []

    def watch(self, token: int, last: bool) -> bool:
        """See `router.request.TokenWatch.watch`."""
        self._num_tokens += 1
        self._feed(self._detokenizer.push((token,)))
        if last:  # an incomplete character may hold back what completes a stop string
            self._feed(self._detokenizer.flush())
        return self._matcher.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text to show by now; the tokens were watched already."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def flush(self) -> str:
        """The rest of the text, at the end of the sample."""
        if not self._matcher.stopped:
            self._feed(self._detokenizer.flush())
        if not self._matcher.stopped:
            self._ready.append(self._matcher.flush())
        return self.push(())

    def _feed(self, text: str) -> None:
        if text:
            self._ready.append(self._matcher.push(text, may_stop=self._num_tokens > self._min_tokens))


class TokenizerText:
    """The tokenizer and chat template in a model's folder (`baton.engine.weights` makes one of any source).

    Raises ModelError if there is no usable tokenizer.
    """

    def __init__(self, model_path: str | Path):
        path = Path(model_path)
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder; give the folder of a model, which holds its tokenizer")
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as e:  # transformers raises whatever its dozens of loaders do
            raise ModelError(f"{path} has no usable tokenizer: {e}") from e
        self._use(tokenizer)
        self.vocab_size = _model_vocab_size(path) or len(tokenizer)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int | None = None) -> TokenizerText:
        """Wrap an open transformers tokenizer."""
        text = cls.__new__(cls)
        text._use(tokenizer)
        text.vocab_size = vocab_size or len(tokenizer)
        return text

    def _use(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        self._special = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._bytes: TokenBytes | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:  # several times faster than through transformers, same text
            self._special |= frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        kept = frozenset(i for i in self._special if tokenizer.convert_ids_to_tokens(i) in MARKERS)
        self._special -= kept
        if backend is not None:
            self._bytes = TokenBytes.read(backend, self._special)
            self._decode: Callable[[list[int]], str] = backend.decode
            self._decode_all: Callable[[list[int]], str] = partial(backend.decode, skip_special_tokens=False)
        else:
            self._decode = partial(self._decode_slowly, skip_special_tokens=True)
            self._decode_all = partial(self._decode_slowly, skip_special_tokens=False)
        if kept:  # what is special was left out before
            self._decode = self._decode_all
        self.chat_template = _template_of(tokenizer)
        self._encode: Callable[[str, bool], list[int]] = self._encode_slowly
        if backend is not None and type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus:
            # What transformers does before each text, once: it takes as long as the tokens.
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = tokenizer.split_special_tokens
            self._backend = backend
            self._encode = self._encode_fast

    def _encode_fast(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT:  # as a batch it is encoded without the interpreter's lock: other threads go on
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _encode_slowly(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(i) for i in encoded["input_ids"]]

    def _decode_slowly(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens`: with those that the model expects around a plain text."""
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeError, TypeError) as e:  # lone surrogates, which JSON can carry and UTF-8 cannot
            raise InvalidRequestError(f"the prompt is not valid text: {e}", field="text") from e

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, tools: str = "", options: str = "", continue_final: bool = False
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, up to where the assistant answers.

        `tools`, `options`: see `Generate`. `continue_final`: up to the end of the last message's text instead.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "this model has no chat template, so it takes no messages; send the prompt as text", field="messages"
            )
        conversation = [_turn(message) for message in messages]
        shown = _json(tools, "tools", list) if tools else None
        variables = _json(options, "template_options", dict) if options else {}
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=shown,
                tokenize=False,
                **{
                    "add_generation_prompt": not continue_final,
                    "continue_final_message": continue_final,
                    **variables,
                },
            )
            return self._encode(text, False)
        except Exception as e:  # a template is a program of the model's author and may raise anything
            raise InvalidRequestError(f"the model's chat template refuses the messages: {e}", field="messages") from e

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All of it at once."""
        if not skip_special_tokens:
            return self._decode_all(list(token_ids))
        return self._decode([t for t in token_ids if t not in self._special])

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for where it stands alone; tokens may end inside a character."""
        if self._bytes is not None:
            return self._bytes.decode([token_id], plain=False)
        return self._decode_all([token_id]).encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one request's output."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skip_special_tokens=skip_special_tokens)
        if not skip_special_tokens:
            return IncrementalDetokenizer(self._decode_all)
        return IncrementalDetokenizer(self._decode, self._special)


def _template_of(tokenizer: Any) -> str:
    """The chat template; of several by name, the one that shows tools."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def _turn(message: ChatMessage) -> dict[str, Any]:
    """As chat templates expect a message."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _arguments(c.arguments)}}
            for c in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _arguments(text: str) -> Any:
    """Templates print a call's arguments as JSON, so they want the value; what is no JSON stays the model's words."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(text: str, field: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InvalidRequestError(f"{field} is not JSON: {e}", field=field) from None
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{field} must be a JSON {kind.__name__}", field=field)
    return value


def _model_vocab_size(path: Path) -> int | None:
    """Rows of the embedding, which may be more than the tokenizer names; None if the model does not say."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
