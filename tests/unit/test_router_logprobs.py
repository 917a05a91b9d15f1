"""The router puts log probabilities in order with their tokens: held back, doubled, of former attempts, of samples."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import RequestTooLargeError
from baton.protocol import HandoffDone, LogprobsOut, RequestKey, Submit, TokenOut, Tokens
from baton.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams, TokenLogprobs
from router.actions import NewTokens, SendWorker
from router.admission import check_prompt_logprobs
from tests.fakes_router import Script, out

PROMPT = (None, TokenLogprobs(1, -1.0, 1), TokenLogprobs(2, -2.0, 2))


def about(index: int, token: int | None = None) -> TokenLogprobs:
    return TokenLogprobs(10 + index if token is None else token, -float(index), 1)


class Told(Script):
    """Keeps the NewTokens that the core returns."""

    def send_tokens(self, worker_id: str, *tokens: TokenOut, logprobs: tuple[LogprobsOut, ...] = ()) -> list[NewTokens]:
        message = Tokens(worker_id, self.life(worker_id), tokens, logprobs=logprobs)
        actions = self.core.on_worker_message(self.life(worker_id), message, self.now)
        self.core.check_integrity()
        return [a for a in actions if isinstance(a, NewTokens)]

    def report(self, worker_id: str, key: RequestKey, *indices: int, prompt: Any = None) -> list[NewTokens]:
        """Tokens with these indices and their log probabilities, the message's entries in another order."""
        entries = [LogprobsOut(*key, i, about(i), prompt if i == 0 else None) for i in reversed(indices)]
        return self.send_tokens(worker_id, *(out(key, i) for i in indices), logprobs=tuple(entries))


def test_they_travel_with_their_tokens() -> None:
    s = Told("b0")
    s.generate(logprobs=2)
    (first,) = s.report("b0", s.key(), 0, 1)
    assert (first.tokens, first.logprobs, first.prompt_logprobs) == ((10, 11), (about(0), about(1)), None)


def test_what_is_held_back_keeps_its_own() -> None:
    s = Told("p0", "d0")
    s.generate(logprobs=0, prompt_logprobs=0)
    assert s.report("d0", s.key(), 2) == []
    assert s.report("d0", s.key(), 1) == []
    (found,) = s.report("p0", s.key(), 0, prompt=PROMPT)
    assert found.tokens == (10, 11, 12)
    assert found.logprobs == (about(0), about(1), about(2))
    assert found.prompt_logprobs == PROMPT
    (found,) = s.report("d0", s.key(), 3)
    assert (found.logprobs, found.prompt_logprobs) == ((about(3),), None)


def test_doubles_bring_nothing_again() -> None:
    s = Told("p0", "d0")
    s.generate(logprobs=0, prompt_logprobs=0)
    s.report("p0", s.key(), 0, prompt=PROMPT)
    assert s.report("p0", s.key(), 0, prompt=PROMPT) == []
    double = TokenOut(*s.key(), 2, 99, None), LogprobsOut(*s.key(), 2, about(2, 99))
    assert s.report("d0", s.key(), 2) == []
    assert s.send_tokens("d0", double[0], logprobs=(double[1],)) == []
    (found,) = s.report("d0", s.key(), 1)
    assert (found.tokens, found.logprobs) == ((11, 12), (about(1), about(2)))


def submitted(actions: list[Any]) -> Submit:
    (message,) = (a[1] for a in actions if len(a) == 2 and isinstance(a[1], Submit))
    return message


def test_a_retry_goes_on_where_delivery_ended_and_asks_about_the_prompt_only_if_nothing_came() -> None:
    s = Told("b0", "b1")
    first = submitted(s.generate(logprobs=0, prompt_logprobs=0))
    assert first.sampling.prompt_logprobs == 0
    here = {key.worker_id: key for key in s.core.view.workers.values() if key.num_outstanding}
    (worker,) = here
    other = {"b0": "b1", "b1": "b0"}[worker]
    again = submitted(s.failed(worker, s.key()))
    assert again.sampling.prompt_logprobs == 0, "nothing was delivered"
    key = s.key(attempt=1)
    (found,) = s.report(other, key, 0, 1, prompt=PROMPT)
    assert found.prompt_logprobs == PROMPT
    assert s.report(other, key, 3) == [], "held back, and lost with its attempt"
    assert s.failed(other, key) == [], "it failed twice, so it waits a little"
    last = submitted(s.wait(0.1))
    assert (last.prior, last.sampling.prompt_logprobs, last.sampling.logprobs) == ((10, 11), None, 0)
    (found,) = s.report(worker, s.key(attempt=2), 2, 3)
    assert (found.tokens, found.logprobs, found.prompt_logprobs) == ((12, 13), (about(2), about(3)), None)


def test_one_sample_tells_about_the_prompt() -> None:
    s = Told("b0")
    sampling = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=1)
    actions = s.core.on_generate(b"c", "x", s.id("x"), 77, (1, 2, 3), sampling, s.now, n=3)
    sent = [a.message for a in actions if isinstance(a, SendWorker)]
    assert [m.sampling.prompt_logprobs for m in sent if isinstance(m, Submit)] == [1, None, None]
    (found,) = s.report("b0", s.key(sample=2), 0, prompt=PROMPT)
    assert (found.sample, found.logprobs, found.prompt_logprobs) == (2, (about(0),), None)


def test_what_a_worker_did_not_tell_leaves_a_gap_and_what_nobody_asked_for_is_dropped() -> None:
    s = Told("b0")
    s.generate("x", logprobs=0)
    s.generate("y")
    key = s.key("y")
    (found,) = s.send_tokens("b0", out(s.key("x"), 0), out(s.key("x"), 1))
    assert found.logprobs == (None, None)
    (found,) = s.report("b0", key, 0, prompt=PROMPT)
    assert (found.logprobs, found.prompt_logprobs) == ((), None)


def test_tokens_after_the_end_bring_nothing() -> None:
    s = Told("p0", "d0")
    s.generate(logprobs=0, max_tokens=2)
    s.report("p0", s.key(), 0)
    (found,) = s.report("d0", s.key(), 1, 2, 3)
    assert (found.tokens, found.logprobs) == ((11,), (about(1),))
    assert s.send("p0", HandoffDone("p0", s.key(), 1, 64)) == [("done", "x", "length")]


def test_what_is_asked_about_a_prompt_must_fit_a_message() -> None:
    sampling = SamplingParams(prompt_logprobs=20)
    check_prompt_logprobs(MAX_PROMPT_LOGPROBS // 21, sampling)
    check_prompt_logprobs(MAX_PROMPT_LOGPROBS, SamplingParams())
    with pytest.raises(RequestTooLargeError, match="prompt_logprobs 20"):
        check_prompt_logprobs(MAX_PROMPT_LOGPROBS // 21 + 1, sampling)
