"""The performance model of splitwise-sim: prompts and tokens timed on whole servers, one CSV row per run.

    model,hardware,tensor_parallel,prompt_size,batch_size,token_size,...,prompt_time,token_time     (times in ms)

A prompt step follows the prompt tokens in it, a decode step the batch; both are medians over the runs.

Conventions `splitwise`: what splitwise-sim makes of the same file (Mutinifni/splitwise-sim, performance_model.py).
Decode steps are looked up by the number of their tokens in a table by `prompt_size * batch_size`; mixed steps cost a
tenth more than a prompt of as many tokens. Must not know clusters.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton.step_log import StepShape
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.choice import ProfileChoice
from baton_experiments.profiles.memory import kv_note, kv_tokens_that_fit, memory_gib
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import decoder
from baton_experiments.profiles.tables import Curve, Row, header_of, read_rows, rising

FORMAT = "splitwise"
SOURCE = "splitwise-sim (Mutinifni/splitwise-sim), MIT"
COLUMNS = (
    "model",
    "hardware",
    "tensor_parallel",
    "prompt_size",
    "batch_size",
    "token_size",
    "prompt_time",
    "token_time",
)
MIXED = 1.1
LINK_BYTES_PER_S = 200 * 2**30
"""Its default between servers."""


class SplitwiseLatency(msgspec.Struct, frozen=True):
    """Seconds."""

    prompt: Curve
    """By tokens of the step."""
    token: Curve
    """By decodes of the step; by their number looked up as tokens, with `mixed`."""
    context_s: float = 0.0
    """Of each position that a decode attends to, beyond those that the runs of `token` had."""
    token_context: float = 0.0
    """Positions that each decode of those runs attended to."""
    mixed: float | None = None
    """The factor of splitwise-sim; None: prompts and decodes are one batch, and the decodes' context is added."""

    def step_s(self, plan: StepPlan) -> float:
        shape = StepShape.of(plan)
        if not shape.chunks:
            context = shape.decode_context - shape.decodes * self.token_context
            return self.token(shape.decodes) + self.context_s * max(0.0, context)
        seconds = self.prompt(shape.chunk_tokens + shape.decodes)
        if self.mixed is not None:
            return seconds * self.mixed if shape.decodes else seconds
        if shape.chunk_context:  # the later part of a prompt takes longer than a prompt of its length
            for item in plan.items:
                if item.num_tokens > 1 and item.start:
                    part = self.prompt(item.start + item.num_tokens) - self.prompt(item.start)
                    seconds += max(0.0, part - self.prompt(item.num_tokens))
        return max(seconds, self.token(shape.decodes)) + self.context_s * shape.decode_context


def is_table(path: Path) -> bool:
    return header_of(path).issuperset(COLUMNS)


def choices(path: Path) -> list[ProfileChoice]:
    found = {
        ProfileChoice(FORMAT, row.text("model"), row.text("hardware"), row.count("tensor_parallel"), FORMAT, path)
        for row in read_rows(path, COLUMNS)
    }
    return sorted(found)


def read(choice: ProfileChoice, *, conventions: str | None = None) -> EngineProfile:
    """`conventions`: None or `splitwise`. Raises ConfigError that names file and line."""
    rows = [row for row in read_rows(choice.path, COLUMNS) if _is_of(row, choice)]
    runs = [(r.count("prompt_size"), r.count("batch_size"), r.count("token_size"), r) for r in rows]
    prompt, no_prompts = rising((p * b, r.number("prompt_time", scale=1e-3)) for p, b, _, r in runs)
    by_batch: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for p, b, t, r in runs:
        by_batch[b].append((p + t / 2, r.number("token_time", scale=1e-3)))
    shape = decoder(choice.model, str(choice.path))
    # Batches of one request were run with many contexts, others with one, which is the reference.
    lengths = [p + t / 2 for p, b, t, _ in runs if b > 1] or [p + t / 2 for p, _, t, _ in runs]
    reference = float(np.median(lengths))
    near = {b: [s for c, s in timed if c == reference] or [s for _, s in timed] for b, timed in by_batch.items()}
    token, no_batches = rising((b, s) for b, seconds in near.items() for s in seconds)
    if token.ys[0] <= 0 or prompt.ys[0] <= 0:
        raise ConfigError(str(choice.path), f"{choice.name}: a step must take time", allowed="ms, > 0")
    latency = SplitwiseLatency(prompt, token, _slope(by_batch[min(by_batch)]), reference)
    gib = memory_gib(choice.hardware)
    notes = [
        "a step with prompts and decodes is not in the profile: it takes what a prompt of as many tokens does, and the "
        "decodes' context",
        f"prompts of {prompt.xs[0]:g} to {prompt.xs[-1]:g} tokens, {token.xs[0]:g} to {token.xs[-1]:g} decodes",
        kv_note(gib),
    ]
    for what, sizes in (("prompts of so many tokens", no_prompts), ("batches of so many decodes", no_batches)):
        if sizes:
            notes.append(f"left out, as fewer take longer: {what}: {', '.join(f'{x:g}' for x in sizes)}")
    profile = EngineProfile(
        name=f"{choice.model} {choice.hardware} tp{choice.tp}",
        model=choice.model,
        hardware=choice.hardware,
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_tokens=kv_tokens_that_fit(shape, gib * choice.tp, shape.kv_bytes_per_token),
        gpus=choice.tp,
        source=f"{SOURCE}: {choice.path.name}",
        notes=tuple(notes),
    )
    return profile if conventions is None else _conventional(profile, latency, runs, choice)


def _conventional(
    profile: EngineProfile, latency: SplitwiseLatency, runs: list[tuple[int, int, int, Row]], choice: ProfileChoice
) -> EngineProfile:
    shape = decoder(choice.model, str(choice.path))
    kv_bytes = 2 * 2 * shape.layers * shape.hidden
    token = Curve.of((p * b, r.number("token_time", scale=1e-3)) for p, b, _, r in runs)
    prompt = Curve.of((p * b, r.number("prompt_time", scale=1e-3)) for p, b, _, r in runs)
    return msgspec.structs.replace(
        profile,
        name=f"{profile.name}, conventions of splitwise-sim",
        latency=SplitwiseLatency(prompt, token, mixed=MIXED),
        kv_bytes_per_token=kv_bytes,
        kv_tokens=kv_tokens_that_fit(shape, memory_gib(choice.hardware) * choice.tp, kv_bytes),
        link=LinkModel(bytes_per_s=LINK_BYTES_PER_S),
        notes=(
            *profile.notes,
            f"decode steps by their number of tokens, mixed ones {MIXED:g} times a prompt's; {kv_bytes:,} bytes of KV "
            f"a token, as of a model without grouped heads; {LINK_BYTES_PER_S / 2**30:g} GiB/s between servers",
        ),
    )


def _is_of(row: Row, choice: ProfileChoice) -> bool:
    named = (row.text("model"), row.text("hardware"), row.count("tensor_parallel"))
    return named == (choice.model, choice.hardware, choice.tp)


def _slope(timed: list[tuple[float, float]]) -> float:
    """Seconds a position, least squares; not negative, and 0 where all runs had one length."""
    contexts, seconds = np.array(timed).T
    if np.ptp(contexts) == 0:
        return 0.0
    return max(0.0, float(np.polyfit(contexts, seconds, 1)[0]))
