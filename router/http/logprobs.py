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
        self._special: dict[int, bool] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """Its characters, U+FFFD where it is only part of one, and its bytes."""
        known = self._known.get(token)
        if known is None:
            data = self._text.token_bytes(token)
            known = self._known[token] = (data.decode("utf-8", "replace"), list(data))
        return known

    def is_special(self, token: int) -> bool:
        """Whether texts leave it out that show no special tokens."""
        special = self._special.get(token)
        if special is None:
            special = self._special[token] = not self._text.decode([token])
        return special

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

    def pass_by(self, data: bytes) -> int:
        """The bytes of one more token; returns where it begins, which only its first byte tells after part of one."""
        begins = self.offset
        if self._decoder.getstate()[0] and data:
            read = self._decoder.decode(data[:1])
            if len(read) > 1 or data[0] & 0xC0 != 0x80:
                begins += 1  # it does not go on with that character, which reads as U+FFFD now
            self.offset += len(read)
            data = data[1:]
        self.offset += len(self._decoder.decode(data))
        return begins

    def end_text(self) -> None:
        """What comes is another text behind this one: part of a character at its end is not gone on with."""
        self.offset += len(self._decoder.decode(b"", final=True))


class LogprobsWriter:
    """Writes a request's. `num_top`: most probable tokens that are shown at each place. `shows_special`: its text
    has special tokens in it."""

    def __init__(self, names: TokenNames, num_top: int, *, as_ids: bool, shows_special: bool = False):
        self._shows_special = shows_special
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
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], place: Place, text: str | None = None
    ) -> CompletionLogprobs:
        """Those of `tokens`, the first of which begins at `place`; moves it to where the next one does.

        `text`: what they are shown as, if that is another's words: it tells which special tokens are part of it.
        """
        logprobs = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            logprobs.tokens.append(self._names.name(token, self._as_ids))
            left_out = self._names.is_special(token) and not self._shows(token, place, text)
            logprobs.text_offset.append(place.pass_by(b"" if left_out else bytes(self._names.of(token)[1])))
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

    def _shows(self, token: int, place: Place, text: str | None) -> bool:
        """Whether this special token is in the text."""
        return self._shows_special if text is None else text.startswith(self._names.of(token)[0], place.offset)

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


def join(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Of texts that follow each other."""
    if len(parts) == 1:
        return parts[0]
    return CompletionLogprobs(
        [token for part in parts for token in part.tokens],
        [logprob for part in parts for logprob in part.token_logprobs],
        [top for part in parts for top in part.top_logprobs],
        [offset for part in parts for offset in part.text_offset],
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
