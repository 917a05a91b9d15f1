"""From a step's logits to its tokens and to what its requests want to know about them.

Joins requests with what works on rows: logit processors, sampler, log probabilities, structured output. Must not know
models or where logits come from. A step of which all requests are plain (most probable token, nothing asked) takes
one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.logit_processors import process
from baton.engine.logprobs import token_logprobs
from baton.engine.request import EngineRequest, StepItem
from baton.engine.sampler import choose, most_probable
from baton.engine.structured import Grammars
from baton.errors import InvalidRequestError, ModelError


def prompt_places(item: StepItem) -> range:
    """Positions among the item's tokens whose logits are about the next prompt token, where the request wants them."""
    if not item.request.wants_prompt_logprobs:
        return range(0)
    return range(item.start, min(item.start + item.num_tokens, item.request.num_prompt - 1))


class StepSampler:
    """One per worker; used by its engine thread."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars

    def sample(self, items: Sequence[StepItem], logits: torch.Tensor) -> list[int]:
        """The next token of each item, all of which sample. `logits`: `[items, vocab]` float32, not changed.

        Sets an item's `logprobs` where they are wanted, and its `problem` (its token is 0 then) where its structured
        output cannot be had: that ends this request, not the step.
        """
        rows = [row for row, item in enumerate(items) if not item.request.plain]
        if not rows:
            return most_probable(logits)
        # A copy in any case, as processors write to it.
        taken = logits[rows].cpu().numpy() if len(rows) < len(items) else logits.to("cpu", copy=True).numpy()
        tokens = most_probable(logits) if len(rows) < len(items) else [0] * len(items)
        for row, own in zip(rows, taken, strict=True):
            item, request = items[row], items[row].request
            sampling = request.sampling
            form = None
            if sampling.structured is not None:
                outputs = request.tokens[request.num_prompt :]
                try:
                    form = self._grammars.allowed(request.key, sampling.structured, outputs)
                except (InvalidRequestError, ModelError) as e:
                    item.problem = str(e)
                    continue
            process(own, sampling, request.tokens, request.num_prompt, forbidden=request.forbidden, form=form)
            tokens[row] = token = choose(own, sampling, request.sample, len(request.tokens))
            if form is not None and _ends(request, token):
                self._grammars.forget(request.key)
        self._report(items, tokens, logits)
        return tokens

    def _report(self, items: Sequence[StepItem], tokens: Sequence[int], logits: torch.Tensor) -> None:
        rows, num_top = [], []
        for row, item in enumerate(items):
            if (wanted := item.request.sampling.logprobs) is not None:
                rows.append(row)
                num_top.append(wanted)
        if rows:
            found = token_logprobs(logits[rows], [tokens[row] for row in rows], num_top)
            for row, logprobs in zip(rows, found, strict=True):
                items[row].logprobs = logprobs

    def report_prompts(self, items: Sequence[StepItem], logits: torch.Tensor) -> None:
        """Set `prompt_logprobs` of the items that want them. `logits`: a row for each of their `prompt_places`."""
        start = 0
        for item in items:
            request, places = item.request, prompt_places(item)
            if request.wants_prompt_logprobs:
                following = request.tokens[places.start + 1 : places.stop + 1]
                rows = logits[start : start + len(places)]
                item.prompt_logprobs = token_logprobs(
                    rows, following, [request.sampling.prompt_logprobs or 0] * len(places)
                )
                start += len(places)


def _ends(request: EngineRequest, token: int) -> bool:
    return token in request.stop_ids or len(request.tokens) + 1 >= request.max_len
