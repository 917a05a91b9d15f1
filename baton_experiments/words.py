"""How numbers are said in sentences and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from baton_experiments.records import Slo


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def number(value: float, digits: int = 3) -> str:
    """So many digits, and all of those before the point; never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{Decimal(f'{value:.{digits}g}'):f}"


def counted(count: int, noun: str) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def milliseconds(value: float) -> str:
    """For sentences: in seconds from ten on."""
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms" if value < 10_000 else f"{value / 1e3:,.1f} s"


def per_second(rate: float) -> str:
    return f"{number(rate)}/s"


def enumerated(parts: Iterable[str], word: str = "and") -> str:
    *most, last = list(parts)
    return f"{', '.join(most)} {word} {last}" if most else last


def slo_text(slo: Slo) -> str:
    return f"TTFT {limit_text(slo.ttft_ms)}, mean gap {limit_text(slo.tbt_ms)}"


def limit_text(value: float) -> str:
    return f"{number(value, 4)} ms" if value < 10_000 else f"{number(value / 1e3, 4)} s"
