"""MXFP8 with one scale per row, along K, for FP8 tensor cores. Reference: mxfp8_titan.reference.quantize_aligned.

x is (T, K), one group or those of group_ends, or (E, N, K), where each expert's N rows are a group. The largest
magnitude of each feature in each group can be gathered on the way: it is what the other direction needs
(kernels.quantize_aligned_t), which then starts from the FP8 data.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.column_maxima import merge_maxima, new_partial, share_rows, store_maxima
from mxfp8_titan.kernels.e4m3 import (
    e8m0_from_bits,
    inv_scale_from_e8m0,
    magnitude_bits,
    scale_from_e8m0,
    to_e4m3,
    to_fp32,
)
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import (
    check_choices,
    check_groups,
    check_source,
    launch,
    next_power_of_2,
    register_op,
)

MAX_K = 32768
"""Longest row: 1024 threads hold 32 elements each."""

EMPTY_SCALE = 2.0**-127
"""Scale of a row without elements, as of a row of zeros."""

ELEMENTS_PER_WARP = 1024
"""Elements of a row's head per warp."""

AMAX_STAGES = 4
"""Rows of a program that gathers column maxima that are on their way at once."""


@triton.jit
def aligned_along_k_kernel(
    x_ptr, data_ptr, scale_ptr, partial_ptr, group_ends_ptr,
    T, K, stride_xe, stride_xt, stride_xk, rows_out, first_row, rows_per_program, programs, partials, first_partial,
    num_groups,
    ROUNDING: tl.constexpr, WITH_AMAX: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program quantizes rows_per_program consecutive rows of a group; `programs` of them cover an expert.

    An expert has T rows in x and rows_out in data, where those of x start at first_row. A row is held as HEAD and TAIL
    elements, both powers of two. With column maxima, rows come through shared memory, STAGES deep, while the maxima
    stay in registers; they go to memory once, see kernels.column_maxima: an expert has `partials` rows there, those
    of x start at first_partial. Rows past the last group are not read. Features past K are masked here.
    """
    _, expert, first, read_end, write_end, _, _ = place_tile(
        tl.program_id(0), programs, T, T, group_ends_ptr, num_groups, rows_per_program, GROUPS, WITH_AMAX
    )
    x_ptr += expert.to(tl.int64) * stride_xe
    row0 = expert.to(tl.int64) * rows_out + first_row
    if WITH_AMAX:
        head_max = tl.zeros([HEAD], tl.int32)
        tail_max = tl.zeros([max(TAIL, 1)], tl.int32)
        for row in tl.range(first, tl.minimum(first + rows_per_program, write_end), num_stages=STAGES):
            head, tail = _quantize_row(
                x_ptr, data_ptr, scale_ptr, row0, row, read_end, K, stride_xt, stride_xk, ROUNDING, HEAD, TAIL
            )
            head_max = tl.maximum(head_max, head)
            if TAIL > 0:
                tail_max = tl.maximum(tail_max, tail)
        if first < read_end:
            number = expert.to(tl.int64) * (partials - programs) + first_partial + tl.program_id(0)
            store_maxima(partial_ptr, number, head_max, 0, K, HEAD)
            if TAIL > 0:
                store_maxima(partial_ptr, number, tail_max, HEAD, K, TAIL)
    else:
        _quantize_row(x_ptr, data_ptr, scale_ptr, row0, first, read_end, K, stride_xt, stride_xk, ROUNDING, HEAD, TAIL)


@triton.jit
def _quantize_row(
    x_ptr, data_ptr, scale_ptr, row0, row, read_end, K, stride_xt, stride_xk,
    ROUNDING: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Quantizes one row of an expert whose first row is number row0 in data.

    returns the bits of its magnitudes, int32 (HEAD,) and (TAIL,), the second made up when TAIL is 0
    """
    x_ptr += tl.cast(row, tl.int64) * stride_xt
    out_ptr = data_ptr + (row0 + row) * K
    head = _load_part(x_ptr, row < read_end, 0, K, stride_xk, HEAD)
    head_bits = magnitude_bits(head)
    tail_bits = tl.zeros([1], tl.int32)
    amax = tl.max(head_bits, 0)
    if TAIL > 0:
        tail = _load_part(x_ptr, row < read_end, HEAD, K, stride_xk, TAIL)
        tail_bits = magnitude_bits(tail)
        amax = tl.maximum(amax, tl.max(tail_bits, 0))
    byte = e8m0_from_bits(amax, ROUNDING)
    inv_scale = inv_scale_from_e8m0(byte)
    k = tl.arange(0, HEAD)
    tl.store(out_ptr + k, to_e4m3(head * inv_scale), mask=k < K)
    if TAIL > 0:
        k = HEAD + tl.arange(0, TAIL)
        tl.store(out_ptr + k, to_e4m3(tail * inv_scale), mask=k < K)
    tl.store(scale_ptr + row0 + row, scale_from_e8m0(byte))
    return head_bits, tail_bits


@triton.jit
def _load_part(x_ptr, readable, start, K, stride_xk, SIZE: tl.constexpr):
    """SIZE elements of a row, fp32, from `start` on; zero past K."""
    k = start + tl.arange(0, SIZE)
    return to_fp32(tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=(k < K) & readable, other=0.0))


def row_parts(features: int) -> tuple[int, int]:
    """(head, tail): powers of two, or a tail of 0, that hold a row with few lanes left over. 5120 is 4096 + 1024."""
    whole = max(next_power_of_2(features), 128)
    half = whole // 2
    rest = max(next_power_of_2(features - half), 128)
    return (half, rest) if rest < half else (whole, 0)


def groups_of(x: Tensor, group_ends: Tensor | None) -> int:
    if group_ends is not None:
        return group_ends.shape[0]
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


def _allocate_with_amax(x: Tensor, group_ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return *_allocate_along_k(x), x.new_empty((groups_of(x, group_ends), x.shape[-1]), dtype=torch.float32)


def launch_along_k(
    x: Tensor, data: Tensor, scale: Tensor, partial: Tensor | None, rounding: str, group_ends: Tensor | None = None,
    groups: tuple[int, int] = (0, 0), rows_out: int = 0, first_row: int = 0, partials: int = 0, first_partial: int = 0,
) -> None:  # fmt: skip
    """Quantizes x (T, K) or (E, N, K), not empty, into rows of data and scale from first_row of each expert's on.

    partial: where the programs of kernels.column_maxima leave the column maxima, or None
    groups: as launch.check_groups returns them
    """
    rows, features = x.shape[-2:]
    if features > MAX_K:
        raise ValueError(f"K is {features}, needs at most {MAX_K}: one program holds a whole row in registers")
    experts = x.shape[0] if x.ndim == 3 else 1
    head, tail = row_parts(features)
    rows_per_program, programs = (1, rows) if partial is None else share_rows(rows, experts, groups[0])
    launch(
        aligned_along_k_kernel,
        experts * programs,
        (x, data, scale, partial, group_ends),
        (
            rows, features, *strides(x), rows_out or rows, first_row,
            rows_per_program, programs, partials or programs, first_partial, groups[0],
        ),
        (rounding, partial is not None, groups[1], head, tail, AMAX_STAGES),
        min(max(head // ELEMENTS_PER_WARP, 1), 32),
    )  # fmt: skip


def quantize_aligned_along_k(x: Tensor, rounding: str, group_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x in MXFP8 with one scale per row: (data, scale).

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; K <= 32768
    group_ends: (G,) int32 or None. Rows past the last end are taken as zeros, unread.
    returns data of x's shape, float8_e4m3fn contiguous; scale (T,) or (E, N) fp32, powers of two or NaN
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(x, "x", (2, 3))
    groups = check_args(x, rounding, group_ends, 1)
    data, scale = _allocate_along_k(x)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE)
    launch_along_k(x, data, scale, None, rounding, group_ends, groups)
    return data, scale


def quantize_aligned_along_k_with_amax(
    x: Tensor, rounding: str, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_aligned_along_k` and (G, K) fp32, each group's largest magnitude of each feature, from one read.

    G is 1 for tokens without group_ends, E for w.
    """
    check_source(x, "x", (2, 3))
    groups = check_args(x, rounding, group_ends, 1)
    data, scale, amax = _allocate_with_amax(x, group_ends)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE), amax.zero_()
    experts = x.shape[0] if x.ndim == 3 else 1
    shares = share_rows(x.shape[-2], experts, groups[0])
    partial = new_partial(x, experts * shares[1], x.shape[-1])
    launch_along_k(x, data, scale, partial, rounding, group_ends, groups)
    merge_maxima(partial, amax, group_ends, *shares, *groups)
    return data, scale, amax


OPTIONAL_GROUPS = "str rounding, Tensor? group_ends=None)"
register_op(
    f"quantize_aligned_along_k(Tensor x, {OPTIONAL_GROUPS} -> (Tensor, Tensor)",
    quantize_aligned_along_k,
    lambda x, rounding, group_ends=None: _allocate_along_k(x),
)
register_op(
    f"quantize_aligned_along_k_with_amax(Tensor x, {OPTIONAL_GROUPS} -> (Tensor, Tensor, Tensor)",
    quantize_aligned_along_k_with_amax,
    lambda x, rounding, group_ends=None: _allocate_with_amax(x, group_ends),
)
