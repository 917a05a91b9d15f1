"""Structured output: what is allowed next, as a function of the output, and which forms are refused in what words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import baton.engine.structured as structured_module
from baton.engine.model_spec import load_model_config
from baton.engine.structured import Grammars, check_structured, grammar_of
from baton.errors import InvalidRequestError, ModelError
from baton.protocol import RequestKey
from baton.sampling_params import StructuredOutput
from router.text import TokenizerText
from tests.byte_model import EOS, VOCAB, make_byte_model

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
FORMS: dict[str, tuple[StructuredOutput, str]] = {
    "json": (StructuredOutput("json", json.dumps(SCHEMA)), r'\{\s*"a"\s*:\s*(1|22)\s*\}'),
    "json_object": (StructuredOutput("json_object"), r"\{.*\}"),
    "regex": (StructuredOutput("regex", "[ab]{2,4}c"), "[ab]{2,4}c"),
    "choice": (StructuredOutput("choice", choices=("yes", "no", 'è"\n\x7f\0')), 'yes|no|è"\n\x7f\0'),
    "grammar": (StructuredOutput("grammar", 'start: "x" start "y" | "z"'), "x*zy*"),
}
KEY = RequestKey("0" * 32, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def grammars(folder: Path) -> Grammars:
    spec = load_model_config(folder)
    assert spec.eos_token_ids == (EOS,)
    return Grammars(folder, spec.vocab_size, spec.eos_token_ids)


def walk(grammars: Grammars, form: StructuredOutput, seed: int, key: RequestKey = KEY, limit: int = 60) -> list[int]:
    """Tokens drawn from what is allowed, up to the end; the end as soon as it is allowed after `limit`."""
    random = np.random.default_rng(seed)
    outputs: list[int] = []
    while not outputs or outputs[-1] != EOS:
        allowed = np.flatnonzero(grammars.allowed(key, form, outputs))
        assert allowed.max() <= EOS
        outputs.append(EOS if EOS in allowed and len(outputs) > limit else int(random.choice(allowed)))
        assert len(outputs) < 3000
    return outputs


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "json_object"])
def test_whatever_is_allowed_leads_to_text_of_the_form(grammars: Grammars, folder: Path, kind: str) -> None:
    form, pattern = FORMS[kind]
    text = TokenizerText(folder)
    for seed in range(20):
        out = text.decode(walk(grammars, form, seed, RequestKey(f"{seed:032x}", 0)))
        assert re.fullmatch(pattern, out, re.DOTALL), out
        if kind == "json":
            assert json.loads(out)["a"] in (1, 22)


def test_any_json_object(grammars: Grammars, folder: Path) -> None:
    allowed = grammars.allowed(KEY, FORMS["json_object"][0], [])
    text = TokenizerText(folder)
    (brace,) = text.encode("{")
    assert allowed[brace]
    assert not allowed[text.encode("[")[0]]
    outputs = text.encode('{"x": [1, {"y": null}]}')
    assert np.flatnonzero(grammars.allowed(KEY, FORMS["json_object"][0], outputs)).tolist() == [EOS]


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_allowed_is_a_function_of_the_output(folder: Path, kind: str) -> None:
    """A worker that took the request over, and one that forgot it, allow the same as one that saw every token."""
    spec = load_model_config(folder)
    form = FORMS[kind][0]
    seen, fresh = (Grammars(folder, spec.vocab_size, spec.eos_token_ids) for _ in range(2))
    outputs = walk(seen, form, 1, limit=10)
    for n in range(len(outputs)):
        other = RequestKey(f"{n:032x}", 1)
        assert np.array_equal(seen.allowed(KEY, form, outputs[:n]), fresh.allowed(other, form, outputs[:n]))
    assert np.array_equal(seen.allowed(KEY, form, outputs[:1]), fresh.allowed(KEY, form, outputs[:1]))


def test_many_requests_are_remembered_in_bounded_room(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_module, "MAX_MATCHERS", 4)
    monkeypatch.setattr(structured_module, "MAX_GRAMMARS", 2)
    outputs: dict[int, list[int]] = {i: [] for i in range(9)}
    for _ in range(3):
        for i in outputs:
            form = StructuredOutput("regex", f"[ab]{{{5 + i}}}")
            allowed = np.flatnonzero(grammars.allowed(RequestKey(f"{i:032x}", 0), form, outputs[i]))
            assert len(allowed) == 2
            outputs[i].append(int(allowed[0]))
    assert (len(grammars._places), len(grammars._forms)) == (4, 2)
    grammars.forget(RequestKey(f"{8:032x}", 0))
    grammars.forget(KEY)
    assert len(grammars._places) == 3


def test_what_other_requests_met_does_not_make_a_form_too_complex(
    grammars: Grammars, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matchers of a form share a lexer, with room for so many states; each of these outputs needs new ones."""
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=1600)
    original = llguidance.LLMatcher
    built: list[int] = []

    class Limited:
        grammar_from_regex = staticmethod(original.grammar_from_regex)

        def __new__(cls, tokenizer: Any, grammar: str, **options: Any) -> Any:
            built.append(1)
            return original(tokenizer, grammar, limits=limits, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Limited)
    form = StructuredOutput("regex", "(.*a.{20}){10}")
    letters = TokenizerText(folder).encode("ab")
    random = np.random.default_rng(1)
    for i in range(40):  # two at a time, whose lexer is the same one
        outputs: list[list[int]] = [[], []]
        for _ in range(30):
            for sample, out in enumerate(outputs):
                allowed = np.flatnonzero(grammars.allowed(RequestKey(f"{i:032x}", 0, sample), form, out))
                out.append(int(random.choice(np.intersect1d(allowed, letters))))
    assert 1 < len(built) < 20


def test_a_form_in_which_nothing_can_begin_is_tried_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[StructuredOutput] = []

    def counted(form: StructuredOutput) -> str:
        tried.append(form)
        return grammar_of(form)

    monkeypatch.setattr(structured_module, "grammar_of", counted)
    for form, problem in (
        (StructuredOutput("grammar", "start: <[999999999]>"), "too large"),
        (StructuredOutput("regex", "[a&&b]"), "no output can have this form"),
    ):
        for i in range(3):
            with pytest.raises(InvalidRequestError, match=problem) as caught:
                grammars.allowed(RequestKey(f"{i:032x}", 0), form, [])
            assert caught.value.field == "structured"
            assert "<state>" not in str(caught.value)
        assert tried.count(form) == 1


def test_output_that_does_not_have_the_form_is_an_error_of_this_request(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match="does not fit") as caught:
        grammars.allowed(KEY, FORMS["regex"][0], [1, 2])
    assert "<state>" not in str(caught.value)
    assert grammars.allowed(KEY, FORMS["regex"][0], []).sum() == 2


def test_a_model_without_a_usable_tokenizer_says_so(tmp_path: Path, tiny_model: Path) -> None:
    form = FORMS["regex"][0]
    for model, eos, problem in (
        (None, (1,), "no model folder"),
        (tmp_path, (1,), "no tokenizer that structured output can use"),
        (tiny_model, (1,), "no tokenizer that structured output can use"),
        (tiny_model, (), "no end-of-text token"),
    ):
        with pytest.raises(ModelError, match=problem):
            Grammars(model, VOCAB, eos).allowed(KEY, form, [])


@pytest.mark.parametrize("kind", FORMS)
def test_good_forms_pass_the_check(kind: str) -> None:
    check_structured(FORMS[kind][0])


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (StructuredOutput("json", '{"type": '), "not JSON"),
        (StructuredOutput("json", "[1]"), "a schema is a JSON object"),
        (StructuredOutput("json", '{"type": "nonsense"}'), "nonsense"),
        (StructuredOutput("json", '{"$ref": "http://example.com/x"}'), "example.com"),
        (StructuredOutput("json", "[" * 60_000), "not JSON"),
        (StructuredOutput("json"), "takes text"),
        (StructuredOutput("json_object", "{}"), "neither"),
        (StructuredOutput("regex", "[a"), "regex"),
        (StructuredOutput("regex"), "takes text"),
        (StructuredOutput("choice"), "takes choices"),
        (StructuredOutput("choice", "a", ("b",)), "takes choices"),
        (StructuredOutput("grammar", "start: other"), "other"),
        (StructuredOutput("grammar", "}{"), "grammar"),
    ],
    ids=range(13),
)
def test_bad_forms_are_refused_with_what_is_wrong(form: StructuredOutput, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        check_structured(form)
    assert caught.value.field == "structured"


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"'
REFERENCES = {"$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1400)}, "$ref": "#/$defs/0"}
DOUBLING = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(22)) + '\nA22: "a"'
PATTERNS = {"allOf": [{"type": "string", "pattern": f"{i}"} for i in range(300)]}


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (StructuredOutput.grammar(CHAIN), "too complex"),
        (StructuredOutput.json({**REFERENCES, "$defs": {**REFERENCES["$defs"], "1400": {}}}), "too complex"),
        (StructuredOutput.grammar(DOUBLING), "too complex|takes more than"),
        (StructuredOutput.json(PATTERNS), "too complex|takes more than"),
        (StructuredOutput.regex("a?" * 30_000), "too complex|takes more than"),
        (StructuredOutput.regex(r"[^\x00-\U0010ffff]"), "no output can have this form"),
    ],
    ids=["rules", "references", "doubling", "patterns", "optional", "nothing"],
)
def test_forms_that_would_kill_or_hold_up_a_worker_are_refused(form: StructuredOutput, problem: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=problem):
            check_structured(form)
        check_structured(FORMS["json"][0])


def test_a_form_may_name_special_tokens() -> None:
    check_structured(StructuredOutput.grammar('start: "a" <|im_end|>'))


def test_the_check_needs_neither_torch_nor_a_tokenizer() -> None:
    import subprocess
    import sys

    program: Any = (
        "import sys; from baton.engine.structured import check_structured;"
        "from baton.sampling_params import StructuredOutput;"
        "check_structured(StructuredOutput('regex', 'a')); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_forms_are_made_of_plain_data() -> None:
    schema = {"type": "object", "required": ["a"]}
    assert StructuredOutput.json(schema) == StructuredOutput.json('{"type":"object","required":["a"]}')
    assert StructuredOutput.choice(["yes", "no"]) == StructuredOutput("choice", choices=("yes", "no"))
    assert StructuredOutput.regex("a+").text == "a+" and StructuredOutput.grammar("start: A").kind == "grammar"
    for form in (StructuredOutput.json(schema), StructuredOutput.json_object(), StructuredOutput.choice(["a"])):
        check_structured(form)
