"""Between clients and the core: requests become events of `router.core`, its answers become messages; text and tokens.

What every front needs, however its clients speak. Must not know sockets, HTTP or workers. Used by the router's
thread only.

Tokens wait until `take_deltas`, so that what a request gets while the thread is busy travels as one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec

from baton.engine.structured import check_structured
from baton.errors import BatonError
from baton.protocol import Delta, Done, Failed, Generate, ToClient
from router.actions import ClientId, LedgerDone, NewTokens, RequestDone, RequestFailed, RouterAction, SampleDone
from router.admission import check_sampling_ids, check_source, check_token_ids
from router.core import RouterCore
from router.request import SampleId
from router.stop import StopStrings
from router.text import Detokenizer, Text, WatchedText


class Translator:
    """Holds the unfinished texts of all open requests."""

    def __init__(self, core: RouterCore, text: Text):
        self._core = core
        self._text = text
        self._detokenizers: dict[SampleId, Detokenizer] = {}
        self._skips_special: dict[str, bool] = {}
        """By request id, for those that want special tokens shown: False."""
        self._waiting: dict[SampleId, NewTokens] = {}
        """Tokens that nobody was told of yet."""

    # --- in ---------------------------------------------------------------------------------------

    def encode(self, message: Generate) -> tuple[int, ...]:
        """The prompt's tokens. Raises RequestError for what no model could read."""
        check_source(message)
        if message.text is not None:
            return tuple(self._text.encode(message.text))
        if message.messages is not None:
            return tuple(
                self._text.encode_messages(
                    message.messages,
                    tools=message.tools,
                    options=message.template_options,
                    continue_final=message.continue_final,
                )
            )
        prompt = message.token_ids or ()
        check_token_ids(prompt, self._text.vocab_size)
        return prompt

    def on_generate(
        self,
        client: ClientId,
        message: Generate,
        received_at: float,
        *,
        prompt: tuple[int, ...] | None = None,
        request_id: str | None = None,
    ) -> list[RouterAction]:
        """A client's request. `prompt`: its tokens, where they are known already (`encode`). `request_id`: 128 bits
        in hex, minted by who asks, who must know it at once.

        What is wrong with it is answered with a RequestFailed, like all refusals.
        """
        request_id = request_id or secrets.token_hex(16)
        try:
            if prompt is None:
                prompt = self.encode(message)
            check_sampling_ids(message.sampling, self._text.vocab_size)
            if message.sampling.structured is not None:
                check_structured(message.sampling.structured)
        except BatonError as e:
            field = getattr(e, "field", None)
            return [RequestFailed(client, message.label, request_id, e.code, str(e), field, message.n)]
        if not message.skip_special_tokens:
            self._skips_special[request_id] = False
        return self._core.on_generate(
            client,
            message.label,
            request_id,
            secrets.randbits(63),
            prompt,
            message.sampling,
            time.monotonic(),
            received_at=received_at,
            n=message.n,
            priority=message.priority,
            timeout_s=message.timeout_s,
            watches=self._watch(message, request_id) if message.stop else (),
            session=message.session,
        )

    def _watch(self, message: Generate, request_id: str) -> list[WatchedText]:
        """Texts in which stop strings are looked for, one per sample."""
        stops, watches = StopStrings(message.stop), []
        for sample in range(message.n):
            text = WatchedText(
                self._text.detokenizer(skip_special_tokens=message.skip_special_tokens),
                stops,
                include=message.include_stop_str_in_output,
                min_tokens=message.sampling.min_tokens,
            )
            self._detokenizers[request_id, sample] = text
            watches.append(text)
        return watches

    # --- out --------------------------------------------------------------------------------------

    def on_tokens(self, action: NewTokens) -> None:
        """They wait for `take_deltas`, or for the end of their sample."""
        sample = (action.request_id, action.sample)
        waiting = self._waiting.get(sample)
        if waiting is not None:
            action = msgspec.structs.replace(
                waiting, tokens=waiting.tokens + action.tokens, logprobs=waiting.logprobs + action.logprobs
            )
        self._waiting[sample] = action

    def messages(self, action: SampleDone | RequestDone | RequestFailed | LedgerDone) -> Iterator[ToClient]:
        """What is to be told to `action.client` now."""
        if type(action) is SampleDone:
            yield self._last_delta(action)
        elif type(action) is RequestDone:
            delta, text = self._end_text((action.request_id, 0))
            if delta is not None:
                yield delta
            self._skips_special.pop(action.request_id, None)
            yield Done(
                label=action.label,
                request_id=action.request_id,
                finish_reason=action.finish_reason,
                usage=action.usage,
                marks=action.marks,
                prefill_worker=action.prefill_worker,
                decode_worker=action.decode_worker,
                attempts=action.attempts,
                kv_bytes=action.kv_bytes,
                text=text,
            )
        elif type(action) is RequestFailed:
            for i in range(action.n):
                delta, _ = self._end_text((action.request_id, i))
                if delta is not None:
                    yield delta
            self._skips_special.pop(action.request_id, None)
            yield Failed(
                action.label, action.code, action.message, action.field, action.request_id, action.retry_after_s
            )
        elif type(action) is LedgerDone:
            yield action.message

    def take_deltas(self) -> dict[ClientId, list[Delta]]:
        """By client, what its requests got since the last call."""
        deltas: dict[ClientId, list[Delta]] = {}
        if not self._waiting:
            return deltas
        for sample, action in self._waiting.items():
            delta = self._delta(sample, action)
            of_client = deltas.get(action.client)
            if of_client is None:
                deltas[action.client] = [delta]
            else:
                of_client.append(delta)
        self._waiting.clear()
        return deltas

    def _delta(self, sample: SampleId, action: NewTokens) -> Delta:
        text = (self._detokenizers.get(sample) or self._open_text(sample)).push(action.tokens)
        return Delta(action.label, action.tokens, text, action.sample, None, action.logprobs, action.prompt_logprobs)

    def _open_text(self, sample: SampleId) -> Detokenizer:
        skip = self._skips_special.get(sample[0], True)
        detokenizer = self._detokenizers[sample] = self._text.detokenizer(skip_special_tokens=skip)
        return detokenizer

    def _end_text(self, sample: SampleId) -> tuple[Delta | None, str]:
        """The sample's waiting tokens, and the text that was held back."""
        waiting = self._waiting.pop(sample, None)
        delta = None if waiting is None else self._delta(sample, waiting)
        detokenizer = self._detokenizers.pop(sample, None)
        return delta, "" if detokenizer is None else detokenizer.flush()

    def _last_delta(self, done: SampleDone) -> Delta:
        """The sample's waiting tokens, all text that has not been told, and how it ended."""
        sample = (done.request_id, done.sample)
        waiting = self._waiting.pop(sample, None)
        delta = self._delta(sample, waiting or NewTokens(done.client, done.label, done.request_id, (), done.sample))
        rest = self._detokenizers.pop(sample).flush()
        return msgspec.structs.replace(delta, text=delta.text + rest, finish_reason=done.finish_reason)
