"""In how many bits a config.json says its weights are stored. Pure.

Methods differ in their keys, and new ones come: what is read here are the keys that most of them share. Where they do
not say it, `bits` is None, and who asks must be told. Embeddings, output matrix and norms stay as they were with all
methods known here.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

import msgspec

SCALE_BITS = 16
"""Of the factor that a group of numbers shares, unless its method says another."""


class Quantization(msgspec.Struct, frozen=True):
    """Of a model's weights."""

    method: str
    bits: float | None
    """Of one number, its part of what its group shares included; None: not said."""
    only_experts: bool = False
    kept: tuple[str, ...] = ()
    """Modules that stay as they were: parts of their names, or patterns of them."""

    def includes(self, parameter: str, *, is_expert: bool) -> bool:
        """Whether the parameter of that name is quantised."""
        if self.only_experts and not is_expert:
            return False
        return not any(_is_within(parameter, module) for module in self.kept)

    def mean_bits(self, total: int, kept: int, plain_bits: float) -> float | None:
        """Of `total` numbers, of which `kept` stay in `plain_bits`."""
        if kept == total:
            return plain_bits
        return None if self.bits is None else (kept * plain_bits + (total - kept) * self.bits) / total


def read_quantization(config: Any) -> Quantization | None:
    """Of a config of transformers, the whole one of a model that has more than text; None: nothing is quantised."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found is None:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    method = str(values.get("quant_method") or "unknown method")
    kept = [values.get(key) or () for key in ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")]
    return Quantization(
        method=method,
        bits=_bits(method, values),
        only_experts=method == "mxfp4",
        kept=tuple(str(module) for some in kept if isinstance(some, list | tuple) for module in some),
    )


def _bits(method: str, values: dict[str, Any]) -> float | None:
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0  # a scale for a row or for a square of 128
    if method in ("mxfp4", "mxfp8"):
        return float(method[-1]) + 8 / 32  # eight bits for 32 numbers, as OCP's standard has it
    if method == "bitsandbytes":
        if values.get("load_in_4bit"):  # 32 bits for 64 numbers; or 8 for 64, and 32 for 256 of those
            return 4 + (8 / 64 + 32 / 64 / 256 if values.get("bnb_4bit_use_double_quant") else 32 / 64)
        return 8.0 if values.get("load_in_8bit") else None
    if isinstance(groups := values.get("config_groups"), dict):  # compressed-tensors, modelopt
        each = {_group_bits(group.get("weights")) for group in groups.values() if isinstance(group, dict)}
        return each.pop() if len(each) == 1 else None
    bits = values.get("bits", values.get("w_bit"))
    if not _is_count(bits):
        return None
    # gptq, awq and what follows them: a scale and a zero point for each group.
    return bits + _shared(values.get("group_size", values.get("q_group_size")), SCALE_BITS + bits)


def _group_bits(weights: Any) -> float | None:
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    if not _is_count(bits):
        return None
    is_fp4 = weights.get("type") == "float" and bits == 4  # whose scales have eight bits
    shared = (8 if is_fp4 else SCALE_BITS) + (0 if weights.get("symmetric", True) else bits)
    return float(bits + _shared(weights.get("group_size"), shared))


def _shared(group_size: Any, bits: float) -> float:
    """A number's part; none where a group is a whole row."""
    return bits / group_size if _is_count(group_size) else 0.0


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_within(parameter: str, module: str) -> bool:
    if f".{module}." in f".{parameter}":
        return True
    try:
        return re.match(rf"(?:{module.removeprefix('re:')})(?:\.|$)", parameter) is not None
    except re.error:
        return False
