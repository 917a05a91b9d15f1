"""Writes demo_tokens.json: what Hugging Face generates for the demo prompts, greedily, in float32.

    python -m tests.golden.make_demo_tokens

The model is loaded from the GGUF file by transformers itself, so that Baton's conversion is tested too.
Takes about two minutes. Run it again only if prompts change; another CPU may differ where margins are tiny.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
import transformers

from baton.engine.weights import demo_file
from tests.golden.demo_prompts import PROMPTS

NUM_NEW_TOKENS = 12
OUTPUT = Path(__file__).with_name("demo_tokens.json")


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    file = demo_file()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    cases = []
    for name, text in PROMPTS.items():
        prompt = tokenizer(text)["input_ids"]
        output, margins = greedy(model, prompt)
        cases.append({"name": name, "prompt": prompt, "output": output, "margins": margins})
        print(f"{len(prompt):4} tokens, least margin {min(margins):.4f}: {name}: {tokenizer.decode(output)!r}")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": file.name,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    OUTPUT.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """New tokens, not stopping at EOS, and for each the difference between the two greatest logits."""
    output: list[int] = []
    margins: list[float] = []
    for _ in range(NUM_NEW_TOKENS):  # each time all over: the reference uses no KV cache
        top = model(torch.tensor([prompt + output]), use_cache=False, logits_to_keep=1).logits[0, -1].topk(2)
        output.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 3))
    return output, margins


if __name__ == "__main__":
    main()
