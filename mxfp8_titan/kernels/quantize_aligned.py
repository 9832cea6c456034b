"""MXFP8 with one scale per row, along K, for FP8 tensor cores. Reference: mxfp8_titan.reference.quantize_aligned.

x is (T, K), one group or those of group_ends, or (E, N, K), where each expert's N rows are a group. The largest
magnitude of each feature in each group can be gathered on the way: it is what the other direction needs
(kernels.quantize_aligned_t), which then starts from the FP8 data.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.column_maxima import (
    merge_maxima,
    new_partial,
    programs_for,
    share_of,
    store_maxima,
)
from mxfp8_titan.kernels.e4m3 import (
    e8m0_from_bits,
    inv_scale_from_e8m0,
    magnitude_bits,
    scale_from_e8m0,
    to_e4m3,
    to_fp32,
)
from mxfp8_titan.kernels.launch import (
    check_choices,
    check_groups,
    check_source,
    launch,
    multiprocessors,
    new_tensor,
    next_power_of_2,
    register_op,
)

MAX_K = 32768
"""Longest row: 1024 threads hold 32 elements each."""

EMPTY_SCALE = 2.0**-127
"""Scale of a row without elements, as of a row of zeros."""

_EMPTY_SCALE = tl.constexpr(EMPTY_SCALE)

ELEMENTS_PER_WARP = 1024
"""Elements of a row's head per warp."""

SMALL, LARGE = (1024, 4), ((512, 5), (1024, 3))
"""The same with column maxima, and rows of a program that are on their way at once; for a head below LARGE_HEAD, and
from it on, without and with token groups, which leave fewer programs without a full share if there are more of them."""

LARGE_HEAD = 8192

BYTES_ON_THEIR_WAY = 64 * 1024
"""Bytes that programs with column maxima wait for on one multiprocessor. More did not help, or harmed."""

SHARED_BYTES = 200 * 1024
"""Shared memory for rows on their way, of the 227 KiB of a multiprocessor."""


@triton.jit
def aligned_along_k_kernel(
    x_ptr, data_ptr, scale_ptr, partial_ptr, group_ends_ptr,
    T, K, stride_xe, stride_xt, stride_xk, rows_out, first_row, programs, partials, first_partial, num_groups,
    ROUNDING: tl.constexpr, WITH_AMAX: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program quantizes one row, or with column maxima a share of an expert's rows; `programs` do an expert.

    An expert has T rows in x and rows_out in data, where those of x start at first_row. A row is held as HEAD and TAIL
    elements, both powers of two. With column maxima, rows come through shared memory, STAGES deep, while the maxima
    stay in registers until they go to memory, see kernels.column_maxima: an expert has `partials` rows there, those of
    x start at first_partial. Rows past the last group are not read. Features past K are masked here.
    """
    expert = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    x_ptr += expert * stride_xe
    data_ptr += (expert * rows_out + first_row) * K
    scale_ptr += expert * rows_out + first_row
    if WITH_AMAX:
        first, end, owned = share_of(program, programs, T, group_ends_ptr, num_groups, GROUPS)
        head_max = tl.zeros([HEAD], tl.int32)
        tail_max = tl.zeros([max(TAIL, 1)], tl.int32)
        for row in tl.range(first, end, num_stages=STAGES):
            head, tail = _quantize_row(
                x_ptr, data_ptr, scale_ptr, row, True, K, stride_xt, stride_xk, ROUNDING, HEAD, TAIL
            )
            head_max = tl.maximum(head_max, head)
            if TAIL > 0:
                tail_max = tl.maximum(tail_max, tail)
        if first < end:
            partial_ptr += (expert * partials + first_partial + program) * K
            store_maxima(partial_ptr, head_max, 0, K, HEAD)
            if TAIL > 0:
                store_maxima(partial_ptr, tail_max, HEAD, K, TAIL)
        if GROUPS > 0:
            for row in range(owned + program, T, programs):
                store_zeros(data_ptr + tl.cast(row, tl.int64) * K, scale_ptr + row, K, HEAD, TAIL)
    else:
        readable = program < tl.load(group_ends_ptr + num_groups - 1) if GROUPS > 0 else True
        _quantize_row(
            x_ptr, data_ptr, scale_ptr, program, readable, K, stride_xt, stride_xk, ROUNDING, HEAD, TAIL
        )  # fmt: skip


@triton.jit
def _quantize_row(
    x_ptr, data_ptr, scale_ptr, row, readable, K, stride_xt, stride_xk,
    ROUNDING: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Quantizes one row, of zeros unless it is readable.

    returns the bits of its magnitudes, int32 (HEAD,) and (TAIL,), the second made up when TAIL is 0
    """
    x_ptr += tl.cast(row, tl.int64) * stride_xt
    out_ptr = data_ptr + tl.cast(row, tl.int64) * K
    head = _load_part(x_ptr, readable, 0, K, stride_xk, HEAD)
    head_bits = magnitude_bits(head)
    tail_bits = tl.zeros([1], tl.int32)
    amax = tl.max(head_bits, 0)
    if TAIL > 0:
        tail = _load_part(x_ptr, readable, HEAD, K, stride_xk, TAIL)
        tail_bits = magnitude_bits(tail)
        amax = tl.maximum(amax, tl.max(tail_bits, 0))
    byte = e8m0_from_bits(amax, ROUNDING)
    inv_scale = inv_scale_from_e8m0(byte)
    k = tl.arange(0, HEAD)
    tl.store(out_ptr + k, to_e4m3(head * inv_scale), mask=k < K)
    if TAIL > 0:
        k = HEAD + tl.arange(0, TAIL)
        tl.store(out_ptr + k, to_e4m3(tail * inv_scale), mask=k < K)
    tl.store(scale_ptr + row, scale_from_e8m0(byte))
    return head_bits, tail_bits


@triton.jit
def store_zeros(row_ptr, scale_ptr, K, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """What quantization makes of a row of zeros."""
    row_ptr = row_ptr.to(tl.pointer_type(tl.uint8))
    k = tl.arange(0, HEAD)
    tl.store(row_ptr + k, tl.zeros([HEAD], tl.uint8), mask=k < K)
    if TAIL > 0:
        k = HEAD + tl.arange(0, TAIL)
        tl.store(row_ptr + k, tl.zeros([TAIL], tl.uint8), mask=k < K)
    tl.store(scale_ptr, _EMPTY_SCALE)


@triton.jit
def _load_part(x_ptr, readable, start, K, stride_xk, SIZE: tl.constexpr):
    """SIZE elements of a row, fp32, from `start` on; zero past K."""
    k = start + tl.arange(0, SIZE)
    return to_fp32(tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=(k < K) & readable, other=0.0))


@lru_cache
def row_parts(features: int) -> tuple[int, int]:
    """(head, tail): powers of two, or a tail of 0, that hold a row with few lanes left over. 5120 is 4096 + 1024."""
    whole = max(next_power_of_2(features), 128)
    half = whole // 2
    rest = max(next_power_of_2(features - half), 128)
    return (half, rest) if rest < half else (whole, 0)


def groups_of(x: Tensor, group_ends: Tensor | None) -> int:
    """How many groups have column maxima of their own."""
    if group_ends is not None:
        return group_ends.shape[0]
    return x.shape[0] if x.ndim == 3 else 1


def check_args(x: Tensor, rounding: str, group_ends: Tensor | None) -> tuple[int, int]:
    """What launch.check_groups returns.

    Raises: ValueError or TypeError for a rounding or groups that don't fit x (T, K) or (E, N, K).
    """
    check_choices(rounding)
    if group_ends is not None and x.ndim == 3:
        raise ValueError("group_ends is for tokens (T, K); w (E, N, K) has one group per expert")
    return check_groups(group_ends, x, x.shape[-2])


def check_row(features: int) -> None:
    """Raises: ValueError for a row that is too long for a program."""
    if features > MAX_K:
        raise ValueError(f"K is {features}, needs at most {MAX_K}: one program holds a whole row in registers")


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of experts (0 if there are none), rows and features."""
    return x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1)


def _allocate_along_k(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.shape
    return new_tensor(x, shape, torch.float8_e4m3fn), new_tensor(x, shape[:-1], torch.float32)


def _allocate_with_amax(x: Tensor, group_ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return *_allocate_along_k(x), new_tensor(x, (groups_of(x, group_ends), x.shape[-1]), torch.float32)


def config_with_amax(x: Tensor, num_groups: int = 0) -> tuple[int, int, int]:
    """(elements per warp, rows on their way, programs of an expert) for x (T, K) or (E, N, K) with column maxima."""
    *experts, rows, features = x.shape
    return _config_with_amax(x.get_device(), experts[0] if experts else 1, rows, features, x.element_size(), num_groups)


@lru_cache
def _config_with_amax(
    device: int, experts: int, rows: int, features: int, element: int, num_groups: int
) -> tuple[int, int, int]:
    large = row_parts(features)[0] >= LARGE_HEAD
    per_warp, stages = LARGE[num_groups > 0] if large else SMALL
    row_bytes = features * element
    stages = min(stages, SHARED_BYTES // row_bytes + 1)
    waiting = max(stages - 1, 1) * row_bytes
    programs = programs_for(multiprocessors(device), rows, experts, num_groups, waiting, BYTES_ON_THEIR_WAY)
    return per_warp, stages, programs


def launch_along_k(
    x: Tensor, data: Tensor, scale: Tensor, partial: Tensor | None, rounding: str, group_ends: Tensor | None,
    groups: tuple[int, int], config: tuple[int, int, int] | None = None,
    rows_out: int = 0, first_row: int = 0, partials: int = 0, first_partial: int = 0,
) -> None:  # fmt: skip
    """Quantizes x (T, K) or (E, N, K), not empty, into rows of data and scale from first_row of each expert's on.

    partial: where the programs of kernels.column_maxima leave the column maxima, or None
    groups: as launch.check_groups returns them
    config: of config_with_amax, or None when partial is
    """
    rows, features = x.shape[-2:]
    per_warp, stages, programs = config or (ELEMENTS_PER_WARP, 1, rows)
    head, tail = row_parts(features)
    launch(
        aligned_along_k_kernel,
        (x.shape[0] if x.ndim == 3 else 1) * programs,
        (x, data, scale, partial, group_ends),
        (
            rows, features, *strides(x), rows_out or rows, first_row, programs, partials or programs, first_partial,
            groups[0],
        ),
        (rounding, partial is not None, groups[1], head, tail, stages),
        min(max(head // per_warp, 1), 32),
    )  # fmt: skip


def quantize_aligned_along_k(x: Tensor, rounding: str, group_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x in MXFP8 with one scale per row: (data, scale).

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; K <= 32768
    group_ends: (G,) int32 or None. Rows past the last end are taken as zeros, unread.
    returns data of x's shape, float8_e4m3fn contiguous; scale (T,) or (E, N) fp32, powers of two or NaN
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(x, "x", (2, 3))
    groups = check_args(x, rounding, group_ends)
    check_row(x.shape[-1])
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
    groups = check_args(x, rounding, group_ends)
    check_row(x.shape[-1])
    data, scale, amax = _allocate_with_amax(x, group_ends)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE), amax.zero_()
    config = config_with_amax(x, groups[0])
    programs = config[2]
    partial = new_partial(x, (x.shape[0] if x.ndim == 3 else 1) * programs, x.shape[-1])
    launch_along_k(x, data, scale, partial, rounding, group_ends, groups, config)
    merge_maxima(partial, amax, group_ends, x.shape[-2], programs, groups)
    return data, scale, amax


OPTIONAL_GROUPS = "str rounding, Tensor? group_ends=None"
register_op(
    f"quantize_aligned_along_k(Tensor x, {OPTIONAL_GROUPS}) -> (Tensor, Tensor)",
    quantize_aligned_along_k,
    lambda x, rounding, group_ends=None: _allocate_along_k(x),
)
register_op(
    f"quantize_aligned_along_k_with_amax(Tensor x, {OPTIONAL_GROUPS}) -> (Tensor, Tensor, Tensor)",
    quantize_aligned_along_k_with_amax,
    lambda x, rounding, group_ends=None: _allocate_with_amax(x, group_ends),
)
