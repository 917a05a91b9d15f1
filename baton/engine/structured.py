"""Structured output: which tokens a JSON schema, regular expression, choice or grammar allows next.

The work is llguidance's (https://github.com/guidance-ai/llguidance), which walks the grammar and the vocabulary
together and gives a bit per token. What is allowed next is a function of the output tokens, so a request that was
preempted, retried or handed over replays them, in microseconds each. Must not know logits or batches.

Once nothing can follow, only the model's end-of-text tokens are allowed, so the request ends there.

The router checks a form before any worker hears of it (`check_structured`, which needs no tokenizer and asks another
process); the workers follow it. llguidance and the tokenizer are loaded when the first request with a form comes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.form_check import NO_OUTPUT, FormCheck
from baton.errors import InvalidRequestError, ModelError
from baton.protocol import RequestKey
from baton.sampling_params import StructuredOutput

MAX_MATCHERS = 512
"""Requests whose place in their form is remembered; one that is forgotten is found again by its tokens."""
MAX_GRAMMARS = 64
"""Grammars kept ready: all samples of a request, and all requests of an application, share theirs."""

_loading = threading.Lock()


def check_structured(structured: StructuredOutput) -> None:
    """Raises InvalidRequestError, saying what is wrong, for a form that no worker could follow.

    It may take seconds (`baton.engine.form_check`), and no time where the form was among the last ones.
    """
    if problem := _problem_of(structured):
        raise _invalid(structured.kind, problem)


_form_check = FormCheck()


@lru_cache(maxsize=MAX_GRAMMARS)
def _problem_of(structured: StructuredOutput) -> str:
    """All prompts of a request have the same form, and so do an application's requests."""
    return _form_check.problem_of(grammar_of(structured))


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
        # The one control character that JSON does not escape, and that the notation does not take.
        return LLMatcher.grammar_from_lark(f"start: {quoted}".replace("\x7f", "\\u007f"))
    return LLMatcher.grammar_from_lark(text)


def _invalid(kind: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured output by {kind}: {problem}", field="structured")


def _error_of(matcher: Any) -> str:
    """What the client can do something about: llguidance appends the state of its parser."""
    error = str(matcher.get_error()).split("\n<", 1)[0]
    return NO_OUTPUT if error == "NoExtensionBias" else error


@lru_cache(maxsize=4)
def _open_tokenizer(model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise ModelError(f"{model_path} names no end-of-text token, which structured output must end with")
    try:
        return LLTokenizer(_tokenizer_json(model_path), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as e:  # transformers raises whatever its dozens of loaders do
        raise ModelError(f"{model_path} has no tokenizer that structured output can use: {e}") from e


def _tokenizer_json(model_path: Path) -> str:
    """The tokenizer as Hugging Face's `tokenizers` writes it, without padding and truncation."""
    from tokenizers import Tokenizer

    file, settings = model_path / "tokenizer.json", model_path / "tokenizer_config.json"
    added = json.loads(settings.read_bytes()).get("added_tokens_decoder", {}) if settings.is_file() else {}
    # transformers takes seconds to import, in a step that others wait for; it is needed only where a part is elsewhere.
    if file.is_file() and added.keys() <= {str(t["id"]) for t in json.loads(file.read_bytes())["added_tokens"]}:
        tokenizer = Tokenizer.from_file(str(file))
    else:
        from transformers import AutoTokenizer

        tokenizer = copy(AutoTokenizer.from_pretrained(str(model_path), local_files_only=True).backend_tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


class _Form:
    """A form in use. Its matchers share one lexer, which remembers all that any of them met, within limits."""

    __slots__ = ("num_masks", "start")

    def __init__(self, start: Any):
        self.start = start
        """A matcher that has seen no token, to be copied."""
        self.num_masks = 0
        """How often one of its matchers said what is allowed."""


class _Place:
    """Where in its form a request is."""

    __slots__ = ("form", "matcher", "seen")

    def __init__(self, form: _Form):
        self.form = form
        self.matcher = form.start.deep_copy()
        self.seen = 0
        """Output tokens that the matcher was shown."""


class Grammars:
    """The forms that a worker's requests must have, and where in them each request is. Used by one thread."""

    def __init__(self, model_path: Path | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._forms: OrderedDict[StructuredOutput, _Form | str] = OrderedDict()
        """Or why no output can begin in this form, which may take seconds to find out."""
        self._places: OrderedDict[RequestKey, _Place] = OrderedDict()

    def allowed(self, key: RequestKey, structured: StructuredOutput, outputs: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Shape [vocab]: what may follow these output tokens of the request.

        Raises ModelError if the model has no tokenizer for it, InvalidRequestError if the form cannot be followed
        (too complex, or `outputs` do not have it). The request is forgotten then.
        """
        place = self._places.pop(key, None)
        if place is None or place.seen > len(outputs):
            place = _Place(self._form(structured))
        try:
            bits = self._follow(place, structured, outputs)
        except InvalidRequestError as e:
            used = place.form.num_masks > 0
            if self._forms.get(structured) is place.form:
                del self._forms[structured]
            if not used:
                if not outputs:
                    self._remember(structured, str(e))
                raise
            # Perhaps the lexer was only full of what other outputs met, and what is allowed depends on these alone.
            place = _Place(self._form(structured))
            bits = self._follow(place, structured, outputs)
        place.form.num_masks += 1
        self._places[key] = place
        if len(self._places) > MAX_MATCHERS:
            self._places.popitem(last=False)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise _invalid(structured.kind, "no token of this model's vocabulary can go on")
        return allowed

    def forget(self, key: RequestKey) -> None:
        """The request has ended. (Those that end elsewhere are forgotten as others come.)"""
        self._places.pop(key, None)

    def _follow(self, place: _Place, structured: StructuredOutput, outputs: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A bit per token: what may come after `outputs`."""
        matcher = place.matcher
        for token in outputs[place.seen :]:
            if not matcher.consume_token(token):
                problem = _error_of(matcher) or "it ended before"
                raise _invalid(structured.kind, f"token {token} of the output does not fit: {problem}")
        place.seen = len(outputs)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _invalid(structured.kind, _error_of(matcher))
        return bits

    def _form(self, structured: StructuredOutput) -> _Form:
        form = self._forms.pop(structured, None)
        if form is None:
            from llguidance import LLMatcher

            if self._model_path is None:
                raise ModelError("there is no model folder here, and so no tokenizer for structured output")
            with _loading:  # workers of one process share it
                tokenizer = _open_tokenizer(self._model_path, self._vocab_size, self._eos_token_ids)
            start = LLMatcher(tokenizer, grammar_of(structured), log_level=0)
            form = str(_invalid(structured.kind, _error_of(start))) if start.is_error() else _Form(start)
        self._remember(structured, form)
        if isinstance(form, str):
            raise InvalidRequestError(form, field="structured")
        return form

    def _remember(self, structured: StructuredOutput, form: _Form | str) -> None:
        self._forms[structured] = form
        if len(self._forms) > MAX_GRAMMARS:
            self._forms.popitem(last=False)
