"""Bandwidth of the kernels that quantize, as a share of a copy's in the same run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mxfp8_titan.bench.results import WORST_OF_OPS, Row, print_table
from mxfp8_titan.bench.shapes import random_ends
from mxfp8_titan.bench.timing import device_us
from mxfp8_titan.format import BLOCKED, FLOOR, PLAIN, RCEIL
from mxfp8_titan.kernels import (
    quantize,
    quantize_32x32,
    quantize_aligned,
    quantize_aligned_t,
    quantize_aligned_weights,
    swiglu,
    swiglu_aligned,
)
from mxfp8_titan.reference import quantize as ref
from mxfp8_titan.reference import quantize_32x32 as ref_32x32
from mxfp8_titan.reference import quantize_aligned as ref_aligned

TOKENS = ((32768, 8192), (65536, 5120))
WEIGHTS = ((16, 8192, 5120),)


@dataclass(frozen=True)
class Op:
    """One kernel. `prepare` makes its arguments from a random tensor, `run` is what is timed."""

    name: str
    target: str
    shapes: tuple[tuple[int, ...], ...]
    bytes_per_element: float
    run: Callable[..., tuple[Tensor, ...]]
    """(*arguments, rounding, *layout) -> outputs"""
    prepare: Callable[[Tensor], tuple] = lambda x: (x,)
    layouts: tuple[str, ...] = ()
    expected: Callable[..., tuple[Tensor, ...]] | None = None
    """(*arguments, rounding) -> outputs with plain scales; None where the tests check a bracket instead"""


def _requantize_arguments(x: Tensor) -> tuple:
    """FP8 data, its scales and maxima, and groups that end at 15/16 of the tokens."""
    ends = random_ends(x.shape[0] * 15 // 16, 8)
    data, scale, amax = quantize_aligned.quantize_aligned_along_k_with_amax(x, RCEIL, ends)
    return data, scale, amax, ends


def _two_parts(w: Tensor) -> tuple:
    """w cut along N, as w1 and w3 are joined."""
    return (list(w.chunk(2, 1)),)


def _two_parts_and_amax(w: Tensor) -> tuple:
    ws = list(w.chunk(2, 1))
    return ws, quantize_aligned_weights.quantize_aligned_weights(ws, RCEIL)[2]


def _swiglu_groups(x: Tensor) -> tuple:
    """dh, h13 and even groups of tokens."""
    tokens = x.shape[0]
    ends = torch.arange(1, 17, device="cuda") * (tokens // 16)
    return x * 0.1, torch.cat([x, x.roll(1, 0)], 1), ends.to(torch.int32)


def _three(x: Tensor) -> tuple:
    return x * 0.1, x, x.roll(1, 0)


OPS = (
    Op(
        "quantize_along_k", ">= 0.90", TOKENS, 3 + 1 / 32, quantize.quantize_along_k,
        layouts=(PLAIN, BLOCKED), expected=ref.quantize_along_k,
    ),
    Op(
        "quantize_along_t", ">= 0.90", TOKENS, 3 + 1 / 32, quantize.quantize_along_t,
        layouts=(PLAIN, BLOCKED), expected=ref.quantize_along_t,
    ),
    Op(
        "quantize_both", ">= 0.90", TOKENS, 4 + 2 / 32, quantize.quantize_both, layouts=(PLAIN, BLOCKED),
        expected=lambda x, r: (*ref.quantize_along_k(x, r), *ref.quantize_along_t(x, r)),
    ),
    Op(
        "quantize_3d_along_n", ">= 0.90", WEIGHTS, 3 + 1 / 32, quantize.quantize_along_t,
        layouts=(PLAIN, BLOCKED), expected=ref.quantize_along_n,
    ),
    Op(
        "quantize_3d_both", ">= 0.90", WEIGHTS, 4 + 2 / 32, quantize.quantize_both, layouts=(PLAIN, BLOCKED),
        expected=lambda w, r: (*ref.quantize_along_k(w, r), *ref.quantize_along_n(w, r)),
    ),
    Op(
        "quantize_aligned_along_k", ">= 0.90", TOKENS, 3, quantize_aligned.quantize_aligned_along_k,
        expected=ref_aligned.quantize_aligned_along_k,
    ),
    Op(
        "quantize_aligned_along_k_with_amax", "", TOKENS, 3, quantize_aligned.quantize_aligned_along_k_with_amax,
    ),
    Op(
        "quantize_32x32_both", ">= 0.85", WEIGHTS, 4 + 1 / 1024, quantize_32x32.quantize_32x32_both,
        layouts=(PLAIN, BLOCKED), expected=lambda w, r: ref_32x32.quantize_32x32_both(w, r),
    ),
    Op(
        "requantize_along_t", ">= 0.80", TOKENS, 2,
        lambda data, scale, amax, ends, r: quantize_aligned_t.requantize_aligned_along_t(data, scale, amax, r, ends),
        _requantize_arguments,
        expected=lambda data, scale, amax, ends, r: ref_aligned.requantize_aligned_along_t(
            ref_aligned.Aligned(data, scale), amax, ends, r
        ),
    ),
    Op(
        "quantize_aligned_weights", ">= 0.85", WEIGHTS, 3,
        quantize_aligned_weights.quantize_aligned_weights, _two_parts,
        expected=ref_aligned.quantize_aligned_weights,
    ),
    Op(
        "quantize_aligned_weights_along_n", ">= 0.85", WEIGHTS, 3,
        quantize_aligned_weights.quantize_aligned_weights_along_n, _two_parts_and_amax,
        expected=ref_aligned.quantize_aligned_weights_along_n,
    ),
    Op(
        "swiglu_aligned", ">= 0.85", TOKENS, 5,
        lambda dh, h13, ends, r: swiglu_aligned.swiglu_aligned(h13, r, ends), _swiglu_groups,
    ),
    Op(
        "swiglu_aligned_backward", ">= 0.80", TOKENS, 9,
        lambda dh, h13, ends, r: swiglu_aligned.swiglu_aligned_backward(dh, h13, r, ends), _swiglu_groups,
    ),
    Op(
        "swiglu_forward", ">= 0.85", TOKENS[:1], 5 + 1 / 32,
        lambda dh, h1, h3, r, layout: swiglu.swiglu(h1, h3, r, True, False, layout), _three, (PLAIN, BLOCKED),
    ),
    Op(
        "swiglu_forward_both", "", TOKENS[:1], 6 + 2 / 32,
        lambda dh, h1, h3, r, layout: swiglu.swiglu(h1, h3, r, True, True, layout), _three, (PLAIN, BLOCKED),
    ),
    Op(
        "swiglu_backward", ">= 0.85", TOKENS[:1], 8 + 2 / 32,
        lambda dh, h1, h3, r, layout: swiglu.swiglu_backward(dh, h1, h3, r, True, False, layout),
        _three, (PLAIN, BLOCKED),
    ),
    Op(
        "swiglu_backward_both", "", TOKENS[:1], 10 + 4 / 32,
        lambda dh, h1, h3, r, layout: swiglu.swiglu_backward(dh, h1, h3, r, True, True, layout),
        _three, (PLAIN, BLOCKED),
    ),
)  # fmt: skip


def gate(op: Op) -> None:
    """Raises: AssertionError when the kernel's bits are not the reference's on a small tensor of the op's kind."""
    if op.expected is None:
        return
    shape = (2, 160, 288) if len(op.shapes[0]) == 3 else (1024, 288)
    x = torch.randn(shape, device="cuda") * torch.exp2(torch.randn(shape, device="cuda") * 4)
    arguments = op.prepare(x.bfloat16())
    for rounding in (FLOOR, RCEIL):
        outs = op.run(*arguments, rounding, *op.layouts[:1])
        for out, answer in zip(outs, op.expected(*arguments, rounding), strict=False):
            assert torch.equal(out.view(torch.uint8), answer.view(torch.uint8)), f"{op.name} {rounding}: wrong bits"


def median_us(call: Callable[[], object]) -> float:
    """Device time of one call of a quantizer: the mean of two medians."""
    return statistics.median(device_us(call) for _ in range(2))


def measure(op: Op, copy: float) -> list[Row]:
    """Prints the op's table; returns the row of its worst RCEIL case and one of RCEIL over FLOOR.

    copy: GB/s of a device-to-device copy in this run
    """
    gate(op)
    table, shares, ratios = [], [], []
    for shape in op.shapes:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        arguments = op.prepare(x)
        for layout in op.layouts or ("",):
            case = f"{'x'.join(map(str, shape))} {layout}".strip()
            extra = (layout,) if layout else ()
            times = {r: median_us(partial(op.run, *arguments, r, *extra)) for r in (FLOOR, RCEIL)}
            for rounding, us in times.items():
                gbps = op.bytes_per_element * x.numel() / us / 1000
                table.append((op.name, case, rounding, us, gbps, 100 * gbps / copy))
            shares.append((gbps / copy, f"{case}, RCEIL: {times[RCEIL]:.1f} us, {gbps:.0f} GB/s; copy {copy:.0f} GB/s"))
            ratios.append((times[RCEIL] / times[FLOOR], f"{op.name} {case}"))
    print_table(["op", "case", "rounding", "us", "GB/s", "% of copy"], table)
    share, detail = min(shares)
    ratio, ratio_detail = max(ratios)
    return [
        Row(op.name, round(share, 3), "share of copy", op.target, detail),
        Row(WORST_OF_OPS, round(ratio, 3), "time ratio", "<= 1.05", ratio_detail),
    ]
