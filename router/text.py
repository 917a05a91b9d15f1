"""Text to tokens and back: the router owns text, workers see token ids only.

Knows tokenizers and chat templates; must not know requests or sockets. transformers is imported when
a model's tokenizer is opened, so that the pure modules and tests stay light.

Streaming out: a token may end inside a character, and how a token reads may depend on the one before
it (a leading space, a byte of a character). So a few settled tokens are kept as context, each push
decodes context plus new tokens, and text is released only up to a point that later tokens cannot
change: not while it ends in U+FFFD, which is how an incomplete character decodes. (The `tokenizers`
package's DecodeStream works so too, but has no flush for what is left at the end, and its window
grows without bound while the output stays undecodable.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from baton.errors import InvalidRequestError, ModelError
from baton.protocol import ChatMessage
from router.stop import StopMatcher, StopStrings

REPLACEMENT = "�"
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
        self._tokenizer = tokenizer
        self._special = frozenset(int(i) for i in tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:  # several times faster than through transformers, same text
            self._special |= frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
            self._decode: Callable[[list[int]], str] = backend.decode
            self._decode_all: Callable[[list[int]], str] = partial(backend.decode, skip_special_tokens=False)
        else:
            self._decode = partial(self._decode_slowly, skip_special_tokens=True)
            self._decode_all = partial(self._decode_slowly, skip_special_tokens=False)

    def _decode_slowly(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens`: with those that the model expects around a plain text."""
        try:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return [int(i) for i in encoded["input_ids"]]
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
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        except Exception as e:  # a template is a program of the model's author and may raise anything
            raise InvalidRequestError(f"the model's chat template refuses the messages: {e}", field="messages") from e

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All of it at once."""
        if not skip_special_tokens:
            return self._decode_all(list(token_ids))
        return self._decode([t for t in token_ids if t not in self._special])

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for where it stands alone; tokens may end inside a character."""
        return self._decode_all([token_id]).encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """For one request's output."""
        if not skip_special_tokens:
            return IncrementalDetokenizer(self._decode_all)
        return IncrementalDetokenizer(self._decode, self._special)


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
    except ValueError:
        return text


def _json(text: str, field: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as e:
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
