"""Workloads by name: the lengths of four kinds of use, from published figures.

Lengths only: arrivals are chosen apart, since every rate is asked about. Prompt and output are drawn independently.

chat
    Azure's conversation trace of November 2023 (Azure/AzurePublicDataset, CC-BY-4.0; Patel et al., "Splitwise",
    ISCA 2024), 19,366 requests: mean 1154.7 in and 211.1 out, median 1020 and 129. Percentiles of that trace. In
    and out hardly correlate there (-0.11); the gaps between arrivals have a coefficient of variation of 1.09.
code
    Azure's code trace, same source, 8,819 requests: mean 2047.8 in and 27.9 out, median 1469 and 13 (the paper says
    1500 and 13). Percentiles of that trace; correlation 0.00.
summarize
    Papers into abstracts, at most 4,096 tokens together: microsoft/vidur (MIT), data/processed_traces,
    arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv. Percentiles of its first 411 rows, which are in no
    order of length: mean 2544 in and 295 out, median 2668 and 161. Not kept: short prompts have the long outputs
    there (correlation -0.46).
reasoning
    Output: DeepSeek-R1 on the reasoning set of MLPerf Inference (AIME, MATH500, GPQA, MMLU-Pro, LiveCodeBench;
    4,388 samples), mean 3,886.2 tokens in the reference evaluation (mlcommons/inference, language/deepseek-r1), at
    most 20,000 as MLCommons gives for the model there. No spread is published: a lognormal distribution with a
    coefficient of variation of 1 is assumed, that of the exponential outputs that ServeGen (arXiv 2505.09999) finds
    in production. The cut leaves a mean of 3,823. Prompt: no source found for such requests; derived, so that a
    generated token has 4,989 tokens of context on average, as DeepSeek reports of its service, V3 and R1 together
    (608 billion tokens in and 168 billion out in a day; deepseek-ai/open-infra-index, day 6). That is a mean of
    1,523, its coefficient of variation again assumed to be 1.

These are the lengths of large models' services. `scaled` and `fitting` divide them for a small model or a slow
machine, and the description says so: shapes and proportions stay, the source's figures do not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.workloads.lengths import LogNormal, Quantiles, TokenLengths, mean_tokens


class Preset(msgspec.Struct, frozen=True):
    """Lengths with a name and a source."""

    name: str
    lengths: TokenLengths
    source: str
    factor: float = 1.0
    """What the source's lengths were multiplied by."""

    def scaled(self, factor: float) -> Preset:
        """All lengths times `factor`."""
        return Preset(self.name, self.lengths.scaled(factor), self.source, self.factor * factor)

    def fitting(self, max_model_len: int) -> Preset:
        """Halved until the longest prompt and the longest output fit into the model together.

        Raises ConfigError if not even one token each does.
        """
        if max_model_len < 2:
            raise ConfigError("max_model_len", "must hold a prompt and an output", value=max_model_len, allowed=">= 2")
        preset, halvings = self, 0
        while (preset.lengths.prompt.longest or 0) + (preset.lengths.output.longest or 0) > max_model_len:
            halvings += 1
            preset = self.scaled(0.5**halvings)
        return preset

    @property
    def description(self) -> dict[str, Any]:
        """For a result: name, source, factor, and the mean lengths as they are drawn, in tokens."""
        return {
            "preset": self.name,
            "source": self.source,
            "length_factor": self.factor,
            "mean_prompt_tokens": round(mean_tokens(self.lengths.prompt), 1),
            "mean_output_tokens": round(mean_tokens(self.lengths.output), 1),
        }


def preset(name: str, *, max_model_len: int | None = None) -> Preset:
    """The preset of this name. `chat/8` is chat with lengths divided by 8; `max_model_len` makes it fit, see `fitting`.

    Raises ConfigError for a name that is none.
    """
    kind, slash, divisor = name.partition("/")
    allowed = f"{', '.join(PRESETS)}; chat/8 has lengths divided by 8"
    if kind not in PRESETS or (slash and not (divisor.isdecimal() and int(divisor) > 0)):
        raise ConfigError("workload", "is no preset", value=name, allowed=allowed)
    found = PRESETS[kind].scaled(1 / int(divisor)) if slash else PRESETS[kind]
    return found if max_model_len is None else found.fitting(max_model_len)


# fmt: off
_AZURE_LEVELS = (
    0.0, 1.0, 5.0, 10.0, 20.0, 25.0, 30.0, 40.0, 42.0, 45.0, 50.0, 60.0, 70.0, 75.0, 80.0, 85.0, 88.0, 90.0,
    93.0, 95.0, 97.0, 98.0, 99.0, 99.5, 99.9, 100.0,
)
_ARXIV_LEVELS = (
    0.0, 1.0, 5.0, 10.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 70.0, 75.0, 80.0, 90.0, 95.0, 99.0, 100.0,
)
_CHAT = TokenLengths(
    Quantiles(_AZURE_LEVELS, (
        2, 29, 181, 207, 387, 396, 403, 703, 903, 984, 1020, 1071, 1130, 1189, 1315, 1876, 2401, 2734, 4076,
        4083, 4090, 4098, 4142, 4831, 6179, 14050,
    )),
    Quantiles(_AZURE_LEVELS, (
        7, 16, 41, 54, 77, 85, 91, 103, 107, 113, 129, 177, 384, 395, 400, 411, 417, 424, 433, 451, 509, 540,
        601, 643, 954, 1000,
    )),
)
_CODE = TokenLengths(
    Quantiles(_AZURE_LEVELS, (
        3, 17, 75, 147, 386, 578, 770, 1075, 1133, 1261, 1469, 1909, 2433, 2744, 3192, 3920, 4559, 5188, 6194,
        7303, 7435, 7436, 7436, 7436, 7437, 7437,
    )),
    Quantiles(_AZURE_LEVELS, (
        6, 6, 6, 7, 8, 9, 9, 11, 12, 12, 13, 16, 20, 24, 29, 39, 48, 55, 72, 90, 128, 171, 251, 359, 825, 1899,
    )),
)
_SUMMARIZE = TokenLengths(
    Quantiles(_ARXIV_LEVELS, (
        1, 12, 710, 1128, 1685, 1928, 2050, 2383, 2668, 2986, 3225, 3351, 3481, 3725, 3848, 3950, 4009,
    )),
    Quantiles(_ARXIV_LEVELS, (
        5, 29, 54, 76, 100, 110, 117, 137, 161, 186, 220, 244, 280, 417, 1112, 2945, 3716,
    )),
)
# fmt: on
_REASONING = TokenLengths(
    LogNormal.from_mean_cv(1523, 1.0, high=20_000), LogNormal.from_mean_cv(3886.2, 1.0, high=20_000)
)

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("chat", _CHAT, "percentiles of Azure's conversation trace of 2023 (Splitwise, ISCA 2024; CC-BY-4.0)"),
        Preset("code", _CODE, "percentiles of Azure's code trace of 2023 (Splitwise, ISCA 2024; CC-BY-4.0)"),
        Preset("summarize", _SUMMARIZE, "percentiles of 411 rows of Vidur's arXiv summarization lengths (MIT)"),
        Preset(
            "reasoning",
            _REASONING,
            "outputs: mean of DeepSeek-R1 in MLPerf Inference, spread assumed; prompts: derived from the mean context "
            "of a generated token in DeepSeek's service",
        ),
    )
}
