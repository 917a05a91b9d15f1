"""The decoder on a GPU against Hugging Face; both attention backends; CUDA graphs against eager steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.cuda_graphs import GraphedDecoder
from baton.engine.request import StepItem, StepPlan
from baton.engine.runner import ModelRunner
from tests.golden.test_tiny_models import KINDS
from tests.golden.tiny_models import Driver, make_tiny_model, prompt_of
from tests.gpu.parts import HEAD_DIM, TIE, behind, gpu_runner, no_flashinfer


def needs_flashinfer() -> None:
    if (reason := no_flashinfer()) is not None:
        pytest.skip(reason)


def serve(runner: ModelRunner, lengths: tuple[int, ...], steps: int) -> list[list[int]]:
    """Chunked prompts, then decodes together; all tokens of each request."""
    driver = Driver(runner)
    requests = [driver.request(prompt_of(n)) for n in lengths]
    for request in requests:
        driver.prefill(request, chunk=64)
    driver.decode(requests, steps)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_greedy_tokens_equal_hugging_face(kind: str, graphs: bool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, **KINDS[kind])
    runner = gpu_runner(tmp_path, dtype="float32", attention="torch", graphs=graphs)
    # LongRoPE: Hugging Face takes its short factors for short sequences, we do not, see README.
    lengths = (150, 90, 120) if "longrope" in kind else (150, 1, 16, 17, 90)
    for length, tokens in zip(lengths, serve(runner, lengths, 20), strict=True):
        assert behind(model, tokens, length) <= TIE


@pytest.mark.parametrize("block_size", [7, 16, 64])
def test_a_batch_of_everything(tmp_path: Path, block_size: int) -> None:
    """Requests at all stages in the same steps."""
    model = make_tiny_model(tmp_path)
    driver = Driver(gpu_runner(tmp_path, dtype="float32", attention="torch", graphs=True, block_size=block_size))
    draw = random.Random(block_size)
    requests = [driver.request(prompt_of(n)) for n in (1, 3, 16, 17, 40, 64, 65, 90)]
    while live := [r for r in requests if r.num_outputs < 6]:
        chosen = [r for r in live if draw.random() < 0.7] or live
        driver.step([(r, min(draw.choice((1, 8, 30)), r.num_tokens - r.num_computed)) for r in chosen])
    for request in requests:
        assert behind(model, request.tokens, request.num_prompt) <= TIE


@pytest.mark.parametrize("kind", ["plain", "Qwen3", "Phi3", "Gemma", "Gemma 2", "Gemma 3", "Mistral, window"])
@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_bfloat16_stays_close(kind: str, attention: str, tmp_path: Path) -> None:
    """To float32, hardly less than transformers in bfloat16 does: a prompt in chunks, then a decode with a graph."""
    if attention == "flashinfer":
        needs_flashinfer()
    changes: dict[str, Any] = {"head_dim": HEAD_DIM, "initializer_range": 0.1}
    model = make_tiny_model(tmp_path, **(KINDS[kind] | changes))
    runner = gpu_runner(tmp_path, dtype="bfloat16", attention=attention, graphs=True)
    driver = Driver(runner)
    prompt = prompt_of(120)
    request = driver.request(prompt)
    driver.step([(request, 50)])
    driver.step([(request, 69)])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1:]
        theirs = model.bfloat16()(torch.tensor([prompt])).logits[0, -1:].float()
    logits = runner.logits(StepPlan([StepItem(request, 1)])).cpu()
    assert torch.nn.functional.cosine_similarity(logits, expected).item() > 0.999
    assert (logits - expected).norm() < 1.5 * (theirs - expected).norm()


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_graphs_give_the_logits_of_eager_steps(attention: str, tmp_path: Path) -> None:
    """In bfloat16, for each number of sequences, padded or not.

    Torch's rows do not depend on what else is in a batch of one captured size. FlashInfer shares a long context out
    among blocks of threads by what the others leave, so there the order of sums does.
    """
    if attention == "flashinfer":
        needs_flashinfer()
    make_tiny_model(tmp_path, head_dim=HEAD_DIM, initializer_range=0.1)
    runner = gpu_runner(tmp_path, dtype="bfloat16", attention=attention, graphs=True)
    graphed = runner.model
    assert isinstance(graphed, GraphedDecoder)
    driver = Driver(runner)
    requests = [driver.request(prompt_of(n)) for n in (100, 5, 30, 32, 16, 200, 1)]
    for request in requests:
        driver.prefill(request)
    driver.decode(requests, 1)
    logits: dict[int, torch.Tensor] = {}
    for count in range(1, len(requests) + 1):
        plan = StepPlan([StepItem(request, 1) for request in requests[:count]])
        logits[count] = runner.logits(plan).clone()
        runner.model = graphed.model
        torch.testing.assert_close(logits[count], runner.logits(plan), atol=3e-2, rtol=3e-2)
        runner.model = graphed
    for few, many in ((3, 4), (5, 6), (6, 7)):  # of one captured size each
        tolerance = 0.0 if attention == "torch" else 3e-2
        torch.testing.assert_close(logits[few], logits[many][:few], atol=tolerance, rtol=tolerance)


def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    lengths = (3, 16, 40, 90, 150)
    found = [
        serve(gpu_runner(tmp_path, dtype="float32", attention="torch", graphs=graphs), lengths, 40)
        for graphs in (False, True)
    ]
    assert found[0] == found[1]
