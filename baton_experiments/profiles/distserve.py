"""Profiles of DistServe's simulator: two straight lines per model and tensor parallel degree.

    {"facebook/opt-13b": {"1": {"prefill": [a, b, c], "decoding_smallbs": [a, b, c], "decoding_largebs": [a, b, c],
                                "decoding_large_small_bs_threshold": 95}}}

In milliseconds: a prefill step takes `a + b * sum(len) + c * sum(len^2)`, a decode step `a + b * sum(context) +
c * batch`, with the first set below the threshold. A file is one engine: placements are compared under one of them. How
many tokens fit the KV cache is in `max_num_tokens.csv` beside it, by model, tp and pp.

Conventions `distserve`: what its simulator does besides (LLMServe/DistServe, simdistserve), as the settings of a
profile, so that its figures can be met. Must not know clusters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton.step_log import StepShape
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.choice import UNKNOWN, ProfileChoice
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import DECODERS
from baton_experiments.profiles.tables import header_of, read_rows

FORMAT = "distserve"
SOURCE = "DistServe (LLMServe/DistServe, simdistserve), Apache-2.0"
KV_COLUMNS = ("model", "tp", "pp", "max_num_tokens")
UNBOUNDED_KV_TOKENS = 1 << 22
"""Its simulator has no KV cache that could be full."""
STEP_S = 2e-3
TOKEN_S = 1e-7
PREFILL_S = 1e-3
"""What its simulator adds to each step, to each token of context in it, and to each prefill step."""
MAX_DECODE_CONTEXT = 50_000
"""Its decode batches hold so many tokens of context at most; requests beyond that take turns. Not written down
anywhere: its figures for the reference workload are met by this number and by no other."""

_GPU = re.compile(r"[a-z]\d+[-_]\d+g", re.IGNORECASE)
"""In names of its files, which are `profiler-a100-80g.distserve.json`."""

Line = tuple[float, float, float]


class DistServeLatency(msgspec.Struct, frozen=True):
    """Seconds. A chunk counts for its squares as the piece of its prompt's that it is: `end^2 - start^2`."""

    prefill: Line
    decode: Line
    decode_large: Line
    threshold: int
    """Decodes from which on `decode_large` counts."""
    step_s_more: float = 0.0
    token_s_more: float = 0.0
    prefill_s_more: float = 0.0
    max_decode_context: int | None = None
    """A step of more is several: each request waits for its turn."""

    def step_s(self, plan: StepPlan) -> float:
        """A step of chunks and decodes pays once what does not depend on them."""
        shape = StepShape.of(plan)
        fixed = work = 0.0
        if shape.chunks:
            fixed, b, c = self.prefill
            squares = 2 * shape.chunk_attended - shape.chunk_tokens
            work = max(0.0, b * shape.chunk_tokens + c * squares)
            work += self.prefill_s_more + self.token_s_more * (shape.chunk_tokens + shape.chunk_context)
        if shape.decodes:
            most = self.max_decode_context
            if most is not None and shape.decode_context > most:
                return fixed + work + self._turns_s(shape.decodes, shape.decode_context, most)
            a, b, c = self._decode(shape.decodes)
            fixed = max(fixed, a)
            work += b * shape.decode_context + c * shape.decodes
            work += self.token_s_more * (shape.decode_context - shape.decodes)
        return max(fixed, fixed + work) + self.step_s_more

    def _turns_s(self, decodes: int, context: int, most: int) -> float:
        """A turn ends where the next request does not fit: half of one short of the limit, on average."""
        held = max(most / 2, most - context / decodes / 2)
        turns = context / held
        batch = decodes / turns
        a, b, c = self._decode(batch)
        return turns * (a + b * held + c * batch + self.token_s_more * (held - batch) + self.step_s_more)

    def _decode(self, batch: float) -> Line:
        return self.decode if batch < self.threshold else self.decode_large


def is_kv_table(path: Path) -> bool:
    return header_of(path).issuperset(KV_COLUMNS)


def choices(path: Path, tree: Any) -> list[ProfileChoice]:
    """Of a parsed file. Raises ConfigError for one that is malformed."""
    found = []
    *_, engine = re.split(r"[._]", path.stem)
    hardware = match[0].upper().replace("_", "-") if (match := _GPU.search(path.stem)) else UNKNOWN
    for model, by_tp in tree.items():
        if not isinstance(by_tp, dict):
            raise ConfigError(str(path), f"{model}: holds no profiles by tensor parallel degree")
        for tp in by_tp:
            if not tp.isdecimal() or int(tp) < 1:
                raise ConfigError(str(path), f"{model}: is no tensor parallel degree", value=tp)
            _coefficients(path, tree, model, tp)
            found.append(ProfileChoice(FORMAT, model, hardware, int(tp), engine, path))
    return found


def is_tree(tree: Any) -> bool:
    """Whether parsed JSON is of this format: an object of objects of objects with `prefill`."""
    return isinstance(tree, dict) and any(
        isinstance(entry, dict) and "prefill" in entry
        for by_tp in tree.values()
        if isinstance(by_tp, dict)
        for entry in by_tp.values()
    )


def read(choice: ProfileChoice, *, conventions: str | None = None) -> EngineProfile:
    """`conventions`: None or `distserve`. Raises ConfigError that names file and place."""
    path = choice.path
    tree = json.loads(path.read_text(encoding="utf-8"))
    small, large, threshold, prefill = _coefficients(path, tree, choice.model, str(choice.tp))
    latency = DistServeLatency(prefill, small, large, threshold)
    decoder = DECODERS.get(choice.model)
    if decoder is None:
        raise ConfigError(
            str(path), f"is of {choice.model}, whose KV size is not known here", allowed=", ".join(DECODERS)
        )
    kv_tokens = _kv_tokens(choice)
    note = "a step with prompts and decodes is not in the profile: what grows is added, what is fixed counts once"
    profile = EngineProfile(
        name=f"{choice.model} {choice.hardware} tp{choice.tp} {choice.engine}",
        model=choice.model,
        hardware=choice.hardware,
        latency=latency,
        kv_bytes_per_token=decoder.kv_bytes_per_token,
        kv_tokens=kv_tokens,
        gpus=choice.tp,
        source=f"{SOURCE}: {path.name}",
        notes=(note,),
    )
    return profile if conventions is None else _conventional(profile, latency, kv_tokens)


def _conventional(profile: EngineProfile, latency: DistServeLatency, kv_tokens: int | None) -> EngineProfile:
    budget = kv_tokens or UNBOUNDED_KV_TOKENS
    return msgspec.structs.replace(
        profile,
        name=f"{profile.name}, conventions of DistServe",
        latency=msgspec.structs.replace(
            latency,
            step_s_more=STEP_S,
            token_s_more=TOKEN_S,
            prefill_s_more=PREFILL_S,
            max_decode_context=MAX_DECODE_CONTEXT,
        ),
        kv_tokens=UNBOUNDED_KV_TOKENS,
        link=LinkModel(latency_s=0.0, bytes_per_s=1e15),
        config={
            "engine.policy": "prefill_first",
            "engine.max_batch_tokens": budget,
            "engine.max_batch_requests": 1 << 20,
            "engine.prefix_cache": False,
            "router.max_requests": 1 << 20,
        },
        extra_output_tokens=1,
        notes=(
            *profile.notes,
            f"prompts first and whole, {budget} tokens a step; no transfer time; a token more than the output is long",
            f"{STEP_S * 1e3:g} ms more a step, {PREFILL_S * 1e3:g} ms more a prefill step, "
            f"{TOKEN_S * 1e6:g} us more a token of context, as its simulator adds",
            f"decode batches of {MAX_DECODE_CONTEXT} tokens of context, in turns; KV memory without limit",
        ),
    )


def _coefficients(path: Path, tree: Any, model: str, tp: str) -> tuple[Line, Line, int, Line]:
    """Seconds: decode below the threshold, from it on, the threshold, prefill."""
    where = f"{model}.{tp}"
    entry = tree[model][tp]
    try:
        raw = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as e:
        raise ConfigError(str(path), f"{where}: {e}") from None
    lines = []
    for name in ("decoding_smallbs", "decoding_largebs", "prefill"):
        a, b, c = (value / 1e3 for value in getattr(raw, name))
        if a <= 0:
            raise ConfigError(str(path), f"{where}.{name}: a step must take time", value=a * 1e3, allowed="ms, > 0")
        lines.append((a, b, c))
    small, large, prefill = lines
    return small, large, raw.decoding_large_small_bs_threshold, prefill


class _Entry(msgspec.Struct):
    decoding_large_small_bs_threshold: int
    prefill: Line
    decoding_smallbs: Line
    decoding_largebs: Line


def _kv_tokens(choice: ProfileChoice) -> int | None:
    """From the tables beside the file; None where there is none or it does not hold this."""
    for path in sorted(choice.path.parent.glob("*.csv")):
        if is_kv_table(path):
            for row in read_rows(path, KV_COLUMNS):
                if row.text("model") == choice.model and (row.count("tp"), row.count("pp")) == (choice.tp, 1):
                    return row.count("max_num_tokens")
    return None
