"""Log probabilities as OpenAI's two APIs and vLLM show them.

Knows how tokens read; must not know requests.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.sampling_params import TokenLogprobs
from router.http.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprobs, TopLogprob

if TYPE_CHECKING:
    from router.text import Text

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames:
    """How single tokens read, remembered: at most one entry per token of the vocabulary."""

    def __init__(self, text: Text):
        self._text = text
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """Its characters, U+FFFD where it is only part of one, and its bytes."""
        known = self._known.get(token)
        if known is None:
            data = self._text.token_bytes(token)
            known = self._known[token] = (data.decode("utf-8", "replace"), list(data))
        return known

    def name(self, token: int, as_ids: bool) -> str:
        """Its characters, or with `as_ids` such as `token_id:7`."""
        return f"token_id:{token}" if as_ids else self.of(token)[0]


class Place:
    """Where in a text the next token begins: inside a character it is where that one begins."""

    __slots__ = ("_decoder", "offset")

    def __init__(self) -> None:
        self.offset = 0
        """Characters before it."""
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def pass_by(self, data: bytes) -> None:
        """The bytes of one more token."""
        self.offset += len(self._decoder.decode(data))


class LogprobsWriter:
    """Writes a request's. `num_top`: most probable tokens that are shown at each place."""

    def __init__(self, names: TokenNames, num_top: int, *, as_ids: bool):
        self._names = names
        self._num_top = num_top
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> ChatLogprobs:
        """Those of `tokens`; of a place that its worker did not tell of, `LOWEST`."""
        return ChatLogprobs([self._chat(token, entry) for token, entry in zip(tokens, entries, strict=True)])

    def _chat(self, token: int, entry: TokenLogprobs | None) -> ChatLogprob:
        if entry is None:
            entry = TokenLogprobs(token, LOWEST, 0)
        top = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        return ChatLogprob(
            self._names.name(token, self._as_ids),
            _finite(entry.logprob),
            self._names.of(token)[1],
            [TopLogprob(self._names.name(t, self._as_ids), _finite(p), self._names.of(t)[1]) for t, p in top],
        )

    def completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], place: Place
    ) -> CompletionLogprobs:
        """Those of `tokens`, the first of which begins at `place`; moves it to where the next one does."""
        logprobs = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            logprobs.tokens.append(self._names.name(token, self._as_ids))
            logprobs.text_offset.append(place.offset)
            place.pass_by(bytes(self._names.of(token)[1]))
            if entry is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.token_logprobs.append(_finite(entry.logprob))
            top = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
            shown: dict[str, float] = {}
            for other, logprob in top:
                shown.setdefault(self._names.name(other, self._as_ids), _finite(logprob))
            # Parts of characters may all be called U+FFFD: the best of them is shown, or the one that was taken.
            shown[logprobs.tokens[-1]] = _finite(entry.logprob)
            logprobs.top_logprobs.append(shown)
        return logprobs

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """As vLLM's `prompt_logprobs`: the most probable tokens at each place, and the prompt's own."""
        return [None if entry is None else self._prompt(entry) for entry in entries]

    def _prompt(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        top = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        shown: dict[str, dict[str, object]] = {str(entry.token): self._entry(entry.token, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(top, 1):
            if token != entry.token:
                shown[str(token)] = self._entry(token, logprob, rank)
        return shown

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._names.of(token)[0]}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
