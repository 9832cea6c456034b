"""Slow, independent answers: MXFP8 from its definition in exact Python arithmetic, and errors in decibels."""

import bisect
import math
from fractions import Fraction

import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.job_config import RECIPES

RCEIL_RECIPE, FLOOR_RECIPE = RECIPES["mxfp8_emulated_rceil"], RECIPES["mxfp8_emulated"]
assert (RCEIL_RECIPE.rounding, FLOOR_RECIPE.rounding) == (RCEIL, FLOOR)

SQNR_BUDGETS = [(RCEIL_RECIPE, 28.3), (FLOOR_RECIPE, 27.5)]
"""dB against float64 on normal data that every product must reach; E5M2 gradients give 24.4."""


def _e4m3_magnitudes() -> list[Fraction]:
    """The non-negative finite E4M3 values in ascending order of their bytes, built from the format's fields."""
    magnitudes = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, Fraction(byte & 7, 8)
        magnitudes.append(mantissa / 2**6 if exponent == 0 else (1 + mantissa) * Fraction(2) ** (exponent - 7))
    return magnitudes


_MAGNITUDES = _e4m3_magnitudes()


def e4m3_byte(value: Fraction, negative: bool) -> int:
    """Nearest E4M3, ties to the even mantissa, saturating at 448."""
    value = min(value, _MAGNITUDES[-1])
    above = bisect.bisect_left(_MAGNITUDES, value)
    near = range(max(above - 1, 0), above + 1)
    best = min(near, key=lambda byte: (abs(_MAGNITUDES[byte] - value), byte & 1))
    return best | (0x80 if negative else 0)


def mx_block(values: list[float], rounding: str) -> tuple[int, list[int]]:
    """(scale byte, element bytes) of one block, from the definition: no bit tricks, no floating point."""
    if any(math.isnan(v) or math.isinf(v) for v in values):
        return 255, [0x7F] * len(values)
    amax = max(abs(Fraction(v)) for v in values)
    if amax == 0:
        exponent = -127
    elif rounding == "floor":
        exponent = _floor_log2(amax) - 8
    else:
        exponent = _ceil_log2(amax / 448)
    exponent = max(exponent, -127)
    scale = Fraction(2) ** exponent
    return exponent + 127, [e4m3_byte(abs(Fraction(v)) / scale, math.copysign(1, v) < 0) for v in values]


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def _ceil_log2(value: Fraction) -> int:
    floor = _floor_log2(value)
    return floor if Fraction(2) ** floor == value else floor + 1


def sqnr(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to quantization noise, dB."""
    exact = exact.detach().double()
    noise = (actual.detach().double() - exact).norm()
    return float("inf") if noise == 0 else 20 * math.log10(exact.norm() / noise)
