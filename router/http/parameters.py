"""From a client's fields to the router's: sampling, structured output, and what is refused by name.

Pure but for the tokenizer, which turns bad words into ids. Must not know HTTP, prompts or answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.sampling_params import MAX_CHOICES, MAX_CONSTRAINT, SamplingParams, StructuredOutput
from router.http.errors import invalid
from router.http.schema import Body, ResponseFormat, StructuredOutputs

if TYPE_CHECKING:
    from router.text import Text

NOTHING: tuple[Any, ...] = (None, False, "", [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (),
    "prompt_embeds": (),
    "use_beam_search": (),
    "length_penalty": (1.0,),
    "truncate_prompt_tokens": (),
    "logprob_token_ids": (),
    "logits_processors": (),
    "guided_decoding_backend": ("auto",),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": (),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
}
"""Fields that clients know and this server does not, with the values that ask for nothing (beside `NOTHING`)."""
INSTEAD = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "guided_decoding_backend": "; leave it out",
    "use_beam_search": "; use n",
}


def refuse_unsupported(body: Body) -> None:
    """Raises ApiError naming the first field that asks for what there is not."""
    for name in _UNSUPPORTED_OF[type(body)]:
        value = getattr(body, name)
        if value is not None and value not in NOTHING and value not in UNSUPPORTED[name]:
            raise invalid(f"{name} is not supported{INSTEAD.get(name, '')}", name)


class _UnsupportedOf(dict[type, tuple[str, ...]]):
    def __missing__(self, kind: type) -> tuple[str, ...]:
        names = self[kind] = tuple(name for name in UNSUPPORTED if name in kind.__struct_fields__)  # type: ignore[attr-defined]
        return names


_UNSUPPORTED_OF = _UnsupportedOf()


def sampling_of(
    body: Body,
    text: Text,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutput | None,
) -> SamplingParams:
    """The sampling that the body asks for. Raises ApiError."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=None if body.seed is None else body.seed & _MAX_SEED,
        ignore_eos=body.ignore_eos or False,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_token_ids=_bad_token_ids(body.bad_words, text) if body.bad_words else (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
    )


_MAX_SEED = (1 << 63) - 1
_MAX_BAD_TOKENS = 64


def _bad_token_ids(words: list[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at a text's start and, where that is as many other tokens, after a space (vLLM's rule)."""
    sequences: list[tuple[int, ...]] = []
    for i, word in enumerate(words):
        bare = word.lstrip()
        ids = tuple(text.encode(bare, add_special_tokens=False)) if bare else ()
        if not 0 < len(ids) <= _MAX_BAD_TOKENS:
            raise invalid(
                f"bad_words[{i}] must be 1 to {_MAX_BAD_TOKENS} tokens; {word!r} is {len(ids)}", f"bad_words[{i}]"
            )
        sequences.append(ids)
        spaced = tuple(text.encode(" " + bare, add_special_tokens=False))
        if len(spaced) == len(ids) and spaced[0] != ids[0]:
            sequences.append(spaced)
    return tuple(sequences)


def stop_of(body: Body) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def structured_of(body: Body) -> tuple[StructuredOutput | None, str]:
    """The form that the answer must have, and the name of the field that says so. Raises ApiError if two do."""
    forms: list[tuple[StructuredOutput, str]] = []
    if body.response_format is not None:
        forms += _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        forms += _of_structured_outputs(body.structured_outputs)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            forms.append((_form(name, value, f"guided_{name}"), f"guided_{name}"))
    if len(forms) > 1:
        raise invalid(f"{forms[0][1]} and {forms[1][1]} both say which form the answer must have; set one", forms[1][1])
    return forms[0] if forms else (None, "")


def _of_response_format(response_format: ResponseFormat) -> list[tuple[StructuredOutput, str]]:
    if response_format.type == "text":
        return []
    if response_format.type == "json_object":
        return [(StructuredOutput.json_object(), "response_format")]
    if response_format.json_schema is None:
        raise invalid("response_format.json_schema: this field is required", "response_format.json_schema")
    path = "response_format.json_schema.schema"
    if response_format.json_schema.schema is None:
        raise invalid(f"{path}: this field is required", path)
    return [(_form("json", response_format.json_schema.schema, path), path)]


def _of_structured_outputs(outputs: StructuredOutputs) -> list[tuple[StructuredOutput, str]]:
    if outputs.structural_tag is not None:
        raise invalid("structured_outputs.structural_tag is not supported", "structured_outputs.structural_tag")
    forms: list[tuple[StructuredOutput, str]] = []
    if outputs.json_object:
        forms.append((StructuredOutput.json_object(), "structured_outputs.json_object"))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(outputs, name)
        if value is not None:
            path = f"structured_outputs.{name}"
            forms.append((_form(name, value, path), path))
    if not forms:
        raise invalid(
            "structured_outputs names no form: set json, regex, choice, grammar or json_object", "structured_outputs"
        )
    return forms


def _form(kind: str, value: Any, path: str) -> StructuredOutput:
    if kind == "choice":
        if not 0 < len(value) <= MAX_CHOICES or not all(0 < len(text) <= _MAX_CHOICE for text in value):
            raise invalid(f"{path} must be 1 to {MAX_CHOICES} texts of 1 to {_MAX_CHOICE} characters", path)
        return StructuredOutput.choice(value)
    form: StructuredOutput = getattr(StructuredOutput, kind)(value)
    if not 0 < len(form.text) <= MAX_CONSTRAINT:
        raise invalid(f"{path} must be 1 to {MAX_CONSTRAINT} characters; it is {len(form.text)}", path)
    return form


_MAX_CHOICE = 4096

COMPLETION_NAMES: Mapping[str, str] = {"text": "prompt", "token_ids": "prompt", "bad_token_ids": "bad_words"}
"""What Baton's fields are called in `/v1/completions`."""
CHAT_NAMES: Mapping[str, str] = {
    "text": "messages",
    "prompt": "messages",
    "token_ids": "messages",
    "bad_token_ids": "bad_words",
    "template_options": "chat_template_kwargs",
}
"""And in `/v1/chat/completions`."""
