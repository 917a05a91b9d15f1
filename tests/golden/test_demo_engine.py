"""The demo model's tokens are Hugging Face's, all twenty prompts in one batch, prompts in chunks of 64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.engine.runner import ModelRunner
from tests.golden.demo_prompts import PROMPTS
from tests.golden.tiny_models import Driver, load_runner

GOLDEN = json.loads(Path(__file__).with_name("demo_tokens.json").read_text(encoding="utf-8"))
CASES = GOLDEN["cases"]
CHUNK = 64


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> ModelRunner:
    return load_runner(demo_model, num_blocks=256)


def test_prompts_are_those_of_the_golden_file(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert [case["name"] for case in CASES] == list(PROMPTS)
    for case in CASES:
        assert tokenizer(PROMPTS[case["name"]])["input_ids"] == case["prompt"], case["name"]
    lengths = {len(case["prompt"]) for case in CASES}
    assert {1, 15, 16, 17, 31, 32, 33, 63, 64, 65} <= lengths


def test_tokens_are_those_of_hugging_face(runner: ModelRunner) -> None:
    driver = Driver(runner)
    requests = [driver.request(case["prompt"]) for case in CASES]
    goal = len(CASES[0]["output"])
    while live := [r for r in requests if r.num_outputs < goal]:  # decodes and prompt chunks in the same steps
        driver.step([(r, min(CHUNK, r.num_tokens - r.num_computed)) for r in live])
    wrong = {}
    for case, request in zip(CASES, requests, strict=True):
        output = request.tokens[request.num_prompt :]
        if output != case["output"]:
            first = next(i for i, (a, b) in enumerate(zip(output, case["output"], strict=True)) if a != b)
            wrong[case["name"]] = f"differs at token {first}, where the margin is {case['margins'][first]}"
    assert not wrong
