"""`baton demo`: the main job, from an empty machine to answers that are checked.

1  a Ray cluster with one prefill and one decode worker on the demo model
2  questions, answered token by token; where each request's time went
3  the same questions colocated and by Hugging Face: the tokens must be the same
4  an experiment of a minute: which of the two placements is better, and why
5  no block is held, nothing is left running; where the experiment's report is
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.rule import Rule

from baton.config import parse_config
from baton.engine.weights import resolve_model
from baton_cli.experiment import INTERRUPTED, run_experiment
from baton_cli.output import completion_data, ms, out, spinner, status_data, status_table, timeline_table
from baton_cluster.ray_cluster import RayCluster
from baton_cluster.ray_session import RaySession
from baton_experiments.placement import with_placement
from baton_experiments.plan import Plan
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths
from router.client import Completion

QUESTIONS = (
    "What is the capital of France?",
    "Which planet is known as the Red Planet?",
    "What is the largest ocean on Earth?",
)
MAX_TOKENS = 24

CONFIG: dict[str, Any] = {
    "name": "baton-demo",
    # float32 everywhere, so that the tokens can be compared with Hugging Face one by one.
    "model": {"source": "demo", "dtype": "float32"},
    "pools": {"prefill": {"kv_memory_mib": 256}, "decode": {"kv_memory_mib": 256}},
    "engine": {"max_batch_tokens": 128, "record_steps": True},
    # Two clusters, a client and Hugging Face share what may be two cores.
    "liveness": {"heartbeat_s": 1.0, "timeout_s": 15.0},
}

EXPERIMENT = Plan(
    placements=("colocated:2", "split:1+1"),
    rates=(1.0, 2.0),
    seeds=(0, 1),
    num_requests=6,
    work=Work(lengths=Lengths((32, 96), (8, 16))),
)


def run_demo(json_path: Path | None, *, compare: bool) -> int:
    """Run all steps; 0 if every check held, else 1."""
    started = time.monotonic()
    config = parse_config(CONFIG)
    colocated = with_placement(config, "colocated:2")
    problems: list[str] = []
    result: dict[str, Any] = {}
    report: Path | None = None
    with ExitStack() as stack:
        progress = Progress(stack)
        progress("preparing the demo model")
        model_path = resolve_model("demo", progress=progress)
        progress("starting Ray")
        with RaySession(config.ray, num_cpus=4, namespace="baton-demo") as session:
            with RayCluster(config, session=session, progress=progress) as split:
                progress.pause()
                out.print("The model is SmolLM2-135M-Instruct, from a 4-bit GGUF file, computed in float32.")
                _heading("1", "One prefill worker and one decode worker, each in its own process")
                status = split.status()
                out.print(status_table(status, split.address))
                result["status"] = status_data(status, split.address)
                for warning in split.warnings:
                    out.print(f"note: {warning}", style="yellow")

                _heading("2", "Questions; each answer's KV cache is handed over after the first token")
                answers = [_ask_aloud(split, question) for question in QUESTIONS]
                result["answers"] = [completion_data(done) for done in answers]
                out.print("Where the time of the first one went:")
                out.print(timeline_table(answers[0]))

                progress("starting two colocated workers")
                with RayCluster(colocated, session=session, progress=progress) as both:
                    progress("asking the colocated workers")
                    with both.client() as client:
                        same = [client.generate(_chat(q), max_tokens=MAX_TOKENS).token_ids for q in QUESTIONS]
                    progress("asking Hugging Face")
                    reference = hugging_face_greedy(model_path, [_chat(q) for q in QUESTIONS], MAX_TOKENS)
                    progress.pause()
                    _heading("3", "The same tokens from split, colocated and Hugging Face")
                    for question, done, other, expected in zip(QUESTIONS, answers, same, reference, strict=True):
                        equal = list(done.token_ids) == list(other) == expected
                        out.print(f"{'equal ' if equal else 'DIFFER'}  {len(expected):3d} tokens  {question}")
                        if not equal:
                            problems.append(
                                f"tokens differ for {question!r}: split {list(done.token_ids)}, "
                                f"colocated {list(other)}, Hugging Face {expected}"
                            )
                    if compare:
                        _heading("4", "Split against colocated, on the same two workers' worth of cores")
                        clusters = {"colocated:2": both, "split:1+1": split}
                        outcome, ended = run_experiment(
                            config, EXPERIMENT, folder=Path("results/demo"), clusters=clusters, anew=True
                        )
                        if ended == INTERRUPTED:
                            raise KeyboardInterrupt
                        problems += [f"request failed: {r.error}" for r in outcome.records if r.error]
                        report = outcome.report_path
                    held = {**split.num_held_blocks(), **both.num_held_blocks()}
                    problems += [f"{worker} still holds {count} KV blocks" for worker, count in held.items() if count]
            _heading("5", "The end")
            out.print("no KV block is held" if not any(held.values()) else f"held blocks: {held}")
    out.print(f"all processes have ended; {time.monotonic() - started:.0f} s in all")
    for problem in problems:
        out.print(f"problem: {problem}", style="red", markup=False)
    if report is not None:
        out.print(f"the experiment's report: {report}", soft_wrap=True)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        result |= {"report": None if report is None else str(report), "problems": problems}
        json_path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if problems else 0


class Progress:
    """A spinner that comes and goes, between what is printed for good."""

    def __init__(self, stack: ExitStack):
        self._outer = stack
        self._shown: ExitStack | None = None

    def __call__(self, text: str) -> None:
        if self._shown is None:
            self._shown = self._outer.enter_context(ExitStack())
            self._show = self._shown.enter_context(spinner(text))
        else:
            self._show(text)

    def pause(self) -> None:
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def _heading(number: str, text: str) -> None:
    out.print(Rule(f"{number}  {text}", align="left"))


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _ask_aloud(cluster: RayCluster, question: str) -> Completion:
    """Ask, and print the answer as it comes."""
    out.print(f"[bold]{question}[/bold]")
    with cluster.client() as client, client.stream(_chat(question), max_tokens=MAX_TOKENS) as stream:
        for delta in stream:
            out.out(delta.text, end="")
        done = stream.result()
    out.out(" [...]" if done.finish_reason == "length" else "")
    out.print(
        f"[dim]{done.usage.prompt_tokens} tokens in with the chat template, {done.usage.completion_tokens} out; "
        f"first token after {ms(done.ttft_s)} ms;\n"
        f"{done.kv_bytes:,} bytes of KV cache handed from {done.prefill_worker} to {done.decode_worker}[/dim]"
    )
    return done


def hugging_face_greedy(
    model_path: Path, conversations: list[list[dict[str, str]]], max_tokens: int
) -> list[list[int]]:
    """Output tokens of transformers' own model in float32, greedy, one conversation after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outputs = []
    for conversation in conversations:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
        outputs.append(tokens[0, ids["input_ids"].shape[1] :].tolist())
    return outputs
