"""MXFP8 with one scale per row, along K, for FP8 tensor cores. Reference: mxfp8_titan.reference.quantize_aligned.

x is (T, K), one group or those of group_ends, or (E, N, K), where each expert's N rows are a group. The largest
magnitude of each feature in each group can be gathered on the way: it is what the other direction needs
(kernels.quantize_aligned_t), which then starts from the FP8 data.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.e4m3 import (
    e8m0_from_bits,
    inv_scale_from_e8m0,
    magnitude_bits,
    scale_from_e8m0,
    to_e4m3,
    to_fp32,
)
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import check_choices, check_groups, check_source, on_device, register_op

MAX_K = 32768
"""Longest row: 1024 threads hold 32 elements each."""

ROWS_WITH_AMAX = 16
"""Rows of one program that gathers column maxima: 1 atomic for 16 elements, and 1024 programs for 16384 rows."""

STAGES_WITH_AMAX = 3
"""Rows of such a program that are on their way at once."""


@triton.jit
def aligned_along_k_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, group_ends_ptr,
    T, K, stride_xe, stride_xt, stride_xk, tiles_t, num_groups,
    ROUNDING: tl.constexpr, WITH_AMAX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program quantizes ROWS consecutive rows of a group; the grid is the number of such pieces.

    With column maxima, the rows come through shared memory, STAGES deep, while the maxima stay in registers; they go
    to memory once, by atomic maximum, which any order of programs leaves the same. Rows past the last group are not
    read. Features past K are masked here.
    """
    group, expert, first, read_end, write_end, _, _ = place_tile(
        tl.program_id(0), tiles_t, T, T, group_ends_ptr, num_groups, ROWS, GROUPS, WITH_AMAX
    )
    k = tl.arange(0, BLOCK_K)
    x_ptr += expert.to(tl.int64) * stride_xe
    row0 = expert.to(tl.int64) * T
    if WITH_AMAX:
        column = tl.zeros([BLOCK_K], tl.int32)
        for row in tl.range(first, tl.minimum(first + ROWS, write_end), num_stages=STAGES):
            bits = _quantize_row(x_ptr, data_ptr, scale_ptr, row0, row, k, read_end, K, stride_xt, stride_xk, ROUNDING)
            column = tl.maximum(column, bits)
        if first < read_end:
            tl.atomic_max(amax_ptr + group.to(tl.int64) * K + k, column, mask=k < K, sem="relaxed")
    else:
        _quantize_row(x_ptr, data_ptr, scale_ptr, row0, first, k, read_end, K, stride_xt, stride_xk, ROUNDING)


@triton.jit
def _quantize_row(
    x_ptr, data_ptr, scale_ptr, row0, row, k, read_end, K, stride_xt, stride_xk, ROUNDING: tl.constexpr
):  # fmt: skip
    """Quantizes one row of an expert whose first row is number row0 in data; returns the bits of its magnitudes."""
    x_ptrs = x_ptr + tl.cast(row, tl.int64) * stride_xt + k.to(tl.int64) * stride_xk
    x = to_fp32(tl.load(x_ptrs, mask=(k < K) & (row < read_end), other=0.0))
    bits = magnitude_bits(x)
    byte = e8m0_from_bits(tl.max(bits, 0), ROUNDING)
    tl.store(data_ptr + (row0 + row) * K + k, to_e4m3(x * inv_scale_from_e8m0(byte)), mask=k < K)
    tl.store(scale_ptr + row0 + row, scale_from_e8m0(byte))
    return bits


def groups_of(x: Tensor, group_ends: Tensor | None) -> int:
    if group_ends is not None:
        return group_ends.shape[0]
    return x.shape[0] if x.ndim == 3 else 1


def _experts(x: Tensor) -> int:
    return x.shape[0] if x.ndim == 3 else 1


def check_args(x: Tensor, rounding: str, group_ends: Tensor | None, multiple: int) -> tuple[int, int]:
    check_choices(rounding)
    if group_ends is not None and x.ndim == 3:
        raise ValueError("group_ends is for tokens (T, K); w (E, N, K) has one group per expert")
    return check_groups(group_ends, x, x.shape[-2], multiple)


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1)


def _allocate_along_k(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _launch_along_k(x: Tensor, rounding: str, group_ends: Tensor | None, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    check_source(x, "x", (2, 3))
    num_groups, groups = check_args(x, rounding, group_ends, 1)
    features = x.shape[-1]
    if features > MAX_K:
        raise ValueError(f"K is {features}, needs at most {MAX_K}: one program holds a whole row in registers")
    data, scale = _allocate_along_k(x)
    if data.numel() == 0:
        return data, scale.fill_(2.0**-127)
    block_k = max(triton.next_power_of_2(features), 128)
    rows_per_program = 1 if amax is None else ROWS_WITH_AMAX
    padding = 0 if amax is None else num_groups
    tiles_t = triton.cdiv(x.shape[-2], rows_per_program) + padding
    with on_device(x):
        aligned_along_k_kernel[(_experts(x) * tiles_t,)](
            x, data, scale, amax if amax is None else amax.view(torch.int32), group_ends,
            x.shape[-2], features, *strides(x), tiles_t, num_groups,
            rounding, amax is not None, groups, rows_per_program, block_k, STAGES_WITH_AMAX,
            num_warps=min(max(block_k // 1024, 1), 32),
        )  # fmt: skip
    return data, scale


def quantize_aligned_along_k(x: Tensor, rounding: str, group_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x in MXFP8 with one scale per row: (data, scale).

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; K <= 32768
    group_ends: (G,) int32 or None. Rows past the last end are taken as zeros, unread.
    returns data of x's shape, float8_e4m3fn contiguous; scale (T,) or (E, N) fp32, powers of two or NaN
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    return _launch_along_k(x, rounding, group_ends, None)


def quantize_aligned_along_k_with_amax(
    x: Tensor, rounding: str, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_aligned_along_k` and (G, K) fp32, each group's largest magnitude of each feature, from one read.

    G is 1 for tokens without group_ends, E for w.
    """
    amax = x.new_zeros((groups_of(x, group_ends), x.shape[-1]), dtype=torch.float32)
    return *_launch_along_k(x, rounding, group_ends, amax), amax


OPTIONAL_GROUPS = "str rounding, Tensor? group_ends=None)"
register_op(
    f"quantize_aligned_along_k(Tensor x, {OPTIONAL_GROUPS} -> (Tensor, Tensor)",
    quantize_aligned_along_k,
    lambda x, rounding, group_ends=None: _allocate_along_k(x),
)
register_op(
    f"quantize_aligned_along_k_with_amax(Tensor x, {OPTIONAL_GROUPS} -> (Tensor, Tensor, Tensor)",
    quantize_aligned_along_k_with_amax,
    lambda x, rounding, group_ends=None: (
        *_allocate_along_k(x),
        x.new_empty((groups_of(x, group_ends), x.shape[-1]), dtype=torch.float32),
    ),
)
