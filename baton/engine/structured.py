"""Structured output: which tokens a JSON schema, regular expression, choice or grammar allows next.

The work is llguidance's (https://github.com/guidance-ai/llguidance), which walks the grammar and the vocabulary
together and gives a bit per token. What is allowed next is a function of the output tokens, so a request that was
preempted, retried or handed over replays them, in microseconds each. Must not know logits or batches.

Once nothing can follow, only the model's end-of-text tokens are allowed, so the request ends there.

The router checks a form before any worker hears of it (`check_structured`, which needs no tokenizer); the workers
follow it. llguidance and the model's tokenizer are loaded when the first request with a form comes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequestError, ModelError
from baton.protocol import RequestKey, StructuredOutput

MAX_MATCHERS = 512
"""Requests whose place in the grammar is remembered; one that is forgotten is found again by its tokens."""
MAX_GRAMMARS = 64
"""Grammars kept ready: all samples of a request, and all requests of an application, share theirs."""

_loading = threading.Lock()


def check_structured(structured: StructuredOutput) -> None:
    """Raises InvalidRequestError, saying what is wrong, for a form that no worker could follow."""
    from llguidance import LLMatcher

    grammar = grammar_of(structured)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise _invalid(structured.kind, "; ".join(messages))


def grammar_of(structured: StructuredOutput) -> str:
    """The form in llguidance's notation. Raises InvalidRequestError where it is incomplete or a schema is no JSON."""
    from llguidance import LLMatcher

    kind, text = structured.kind, structured.text
    needs_text, needs_choices = kind not in ("json_object", "choice"), kind == "choice"
    if bool(text) != needs_text or bool(structured.choices) != needs_choices:
        needs = "choices" if needs_choices else "text" if needs_text else "neither text nor choices"
        raise _invalid(kind, f"it takes {needs}, and nothing else")
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if kind == "json":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise _invalid(kind, f"the schema is not JSON: {e}") from e
        if not isinstance(schema, dict | bool):
            raise _invalid(kind, f"a schema is a JSON object, not {type(schema).__name__}")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choices)
        return LLMatcher.grammar_from_lark(f"start: {quoted}")
    return LLMatcher.grammar_from_lark(text)


def _invalid(kind: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured output by {kind}: {problem}", field="structured")


@lru_cache(maxsize=4)
def _open_tokenizer(model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    if not eos_token_ids:
        raise ModelError(f"{model_path} names no end-of-text token, which structured output must end with")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as e:  # transformers raises whatever its dozens of loaders do
        raise ModelError(f"{model_path} has no tokenizer that structured output can use: {e}") from e


class Grammars:
    """The forms that a worker's requests must have, and where in them each request is. Used by one thread."""

    def __init__(self, model_path: Path | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._starts: OrderedDict[StructuredOutput, Any] = OrderedDict()
        """Matchers that have seen no token, to be copied."""
        self._matchers: OrderedDict[RequestKey, tuple[Any, int]] = OrderedDict()
        """And how many output tokens each has seen."""

    def allowed(self, key: RequestKey, structured: StructuredOutput, outputs: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Shape [vocab]: what may follow these output tokens of the request.

        Raises ModelError if the model has no tokenizer for it, InvalidRequestError if the form cannot be followed
        (too complex, or `outputs` do not have it). The request is forgotten then.
        """
        matcher, seen = self._matchers.pop(key, (None, 0))
        if matcher is None or seen > len(outputs):
            matcher, seen = self._start(structured), 0
        for token in outputs[seen:]:
            if not matcher.consume_token(token):
                problem = matcher.get_error() or "it ended before"
                raise _invalid(structured.kind, f"token {token} of the output does not fit: {problem}")
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _invalid(structured.kind, matcher.get_error())
        self._matchers[key] = (matcher, len(outputs))
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise _invalid(structured.kind, "no token of this model's vocabulary can go on")
        return allowed

    def forget(self, key: RequestKey) -> None:
        """The request has ended. (Those that end elsewhere are forgotten as others come.)"""
        self._matchers.pop(key, None)

    def _start(self, structured: StructuredOutput) -> Any:
        start = self._starts.pop(structured, None)
        if start is None:
            from llguidance import LLMatcher

            if self._model_path is None:
                raise ModelError("there is no model folder here, and so no tokenizer for structured output")
            with _loading:  # workers of one process share it
                tokenizer = _open_tokenizer(self._model_path, self._vocab_size, self._eos_token_ids)
            start = LLMatcher(tokenizer, grammar_of(structured), log_level=0)
            if start.is_error():
                raise _invalid(structured.kind, start.get_error())
        self._starts[structured] = start
        if len(self._starts) > MAX_GRAMMARS:
            self._starts.popitem(last=False)
        return start.deep_copy()
