"""Each logit processor against a plain reference, their order, and what would leave no token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.logit_processors import process
from baton.engine.sampler import Row
from baton.sampling_params import SamplingParams

VOCAB = 12
NONE = -np.inf


def processed(
    logits: list[float],
    tokens: list[int] | None = None,
    num_prompt: int = 0,
    *,
    forbidden: Collection[int] = (),
    form: list[int] | None = None,
    **sampling: Any,
) -> list[float]:
    row = np.array(logits, dtype=np.float32)
    mask = None if form is None else np.isin(np.arange(len(row)), form)
    process(row, SamplingParams(**sampling), tokens or [], num_prompt, forbidden=forbidden, form=mask)
    plain: list[float] = row.tolist()
    return plain


def reference(logits: Row, p: SamplingParams, tokens: list[int], num_prompt: int, forbidden: set[int]) -> list[float]:
    """Straight from the definitions, token by token. No rule in it leaves nothing."""
    prompt_and_output, output = set(tokens), tokens[num_prompt:]
    result = []
    for token, logit in enumerate(logits.tolist()):
        score = np.float32(logit)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            score = np.float32(NONE)
        for *start, last in p.bad_token_ids:
            if last == token and len(start) <= len(output) and output[len(output) - len(start) :] == start:
                score = np.float32(NONE)
        if token in forbidden:
            score = np.float32(NONE)
        score += np.float32(p.logit_bias.get(token, 0))
        if token in prompt_and_output:
            factor = float(p.repetition_penalty)
            score = np.float32(score / factor if score > 0 else score * factor)
        score -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
        if token in output:
            score -= np.float32(p.presence_penalty)
        result.append(float(score))
    return result


TOKENS = st.integers(0, VOCAB - 1)
PENALTIES = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    st.lists(TOKENS, max_size=8),
    st.integers(0, 8),
    PENALTIES,
    PENALTIES,
    st.sampled_from([0.5, 1.0, 1.3]),
    st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
    st.none() | st.lists(TOKENS, min_size=6).map(lambda ids: (*ids, 0, 1, 2, 3)),
    st.lists(st.lists(TOKENS.filter(lambda t: t > 1), min_size=1, max_size=3), max_size=4),
    st.sets(TOKENS.filter(lambda t: t > 1), max_size=2),
)
def test_all_of_them_together_are_what_the_definitions_say(
    logits: list[float],
    tokens: list[int],
    num_prompt: int,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    allowed: tuple[int, ...] | None,
    bad: list[list[int]],
    forbidden: set[int],
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_token_ids=tuple(tuple(ids) for ids in bad),
    )
    num_prompt = min(num_prompt, len(tokens))
    row = np.array(logits, dtype=np.float32)
    expected = reference(row, params, tokens, num_prompt, forbidden)
    process(row, params, tokens, num_prompt, forbidden=forbidden)
    np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-5)


def test_nothing_asked_changes_nothing() -> None:
    assert processed([1.0, -2.0, 3.0], [0, 1], 1) == [1.0, -2.0, 3.0]


def test_presence_counts_once_frequency_each_time_and_neither_the_prompt() -> None:
    assert processed([5.0, 5, 5], [0, 1, 1, 1], 1, presence_penalty=1) == [5, 4, 5]
    assert processed([5.0, 5, 5], [0, 1, 1, 1], 1, frequency_penalty=1) == [5, 2, 5]
    assert processed([5.0, 5, 5], [0, 1], 2, frequency_penalty=1, presence_penalty=1) == [5, 5, 5]


def test_repetition_counts_prompt_and_output_and_makes_both_signs_less_probable() -> None:
    assert processed([4.0, -4, 4, -4], [0, 1], 1, repetition_penalty=2) == [2, -8, 4, -4]
    assert processed([4.0, -4, 4, -4], [0, 1], 2, repetition_penalty=0.5) == [8, -2, 4, -4]


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1000])
def test_an_extreme_repetition_penalty_stays_finite(penalty: float) -> None:
    logits = processed([30.0, -30, 1, 3e38, -np.inf], [0, 1, 3, 4], 0, repetition_penalty=penalty)
    assert np.isfinite(logits).tolist() == [True] * 4 + [False]
    assert logits[4] == -np.inf


def test_bias_comes_before_penalties() -> None:
    assert processed([1.0, 0], [0], 0, logit_bias={0: 3}, repetition_penalty=2) == [2, 0]


def test_a_bias_of_all_tokens_forbids_none() -> None:
    """It shifts: the least that it does leaves the order as it was."""
    row = processed([1.0, 3, 2], logit_bias={0: -100, 1: -100, 2: -100})
    assert row == [-99, -97, -98]


def test_bad_sequences_forbid_their_last_id_after_the_others_in_the_output_alone() -> None:
    assert processed([1.0] * 4, [], 0, bad_token_ids=((2,),)) == [1, 1, NONE, 1]
    sequence = ((0, 1, 2),)
    assert processed([1.0] * 4, [3, 0, 1], 1, bad_token_ids=sequence) == [1, 1, NONE, 1]
    assert processed([1.0] * 4, [3, 0, 1], 2, bad_token_ids=sequence) == [1, 1, 1, 1], "0 is in the prompt"
    assert processed([1.0] * 4, [0, 1, 3], 0, bad_token_ids=sequence) == [1, 1, 1, 1]
    assert processed([1.0] * 4, [1], 0, bad_token_ids=sequence) == [1, 1, 1, 1]


def test_ids_outside_the_vocabulary_name_no_token() -> None:
    assert processed([1.0, 2], allowed_token_ids=(1, 99)) == [NONE, 2]
    assert processed([1.0, 2], logit_bias={99: 5}, bad_token_ids=((99,),), forbidden={99}) == [1, 2]


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"allowed_token_ids": (99,)}, [1.0, 2.0, 3.0]),
        ({"forbidden": {0, 1, 2}}, [1.0, 2.0, 3.0]),
        ({"bad_token_ids": ((0,), (1,), (2,))}, [1.0, 2.0, 3.0]),
        ({"allowed_token_ids": (1,), "bad_token_ids": ((1,),)}, [NONE, 2.0, NONE]),
        ({"allowed_token_ids": (1,), "forbidden": {1}}, [NONE, 2.0, NONE]),
        ({"form": [2], "allowed_token_ids": (1,), "forbidden": {2}}, [NONE, NONE, 3.0]),
        ({"form": [1, 2], "allowed_token_ids": (1,)}, [NONE, 2.0, NONE]),
    ],
)
def test_a_rule_that_would_leave_nothing_is_passed_over_and_the_earlier_one_holds(
    options: dict[str, Any], row: list[float]
) -> None:
    assert processed([1.0, 2, 3], **options) == row
