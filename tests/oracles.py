"""Slow, independent answers: MXFP8 from its definition in exact Python arithmetic, and errors in decibels."""

import math
from fractions import Fraction

import torch

E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def _e4m3_candidates() -> list[tuple[Fraction, int]]:
    """Non-negative finite E4M3 values with their bytes, built from the format's fields."""
    values = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        value = (
            Fraction(mantissa, 8) * Fraction(2) ** -6
            if exponent == 0
            else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
        )
        values.append((value, byte))
    return values


_CANDIDATES = _e4m3_candidates()


def e4m3_byte(value: Fraction, negative: bool) -> int:
    """Nearest E4M3, ties to the even mantissa, saturating at 448."""
    value = min(value, Fraction(448))
    best = min(_CANDIDATES, key=lambda candidate: (abs(candidate[0] - value), candidate[1] & 1))
    return best[1] | (0x80 if negative else 0)


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
