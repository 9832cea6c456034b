"""The SwiGLU product and its gradients in MXFP8 with one scale per row, never stored unquantized.

Reference: mxfp8_titan.reference.swiglu_aligned, to the rounding of the exponential as in kernels.swiglu. Column maxima
of each group are gathered on the way (kernels.column_maxima): with them, an exponent shift and a transpose make the
operands that contract tokens (kernels.quantize_aligned_t).
"""

from functools import lru_cache
from typing import NamedTuple

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
    check_same_device,
    check_source,
    launch,
    multiprocessors,
    new_tensor,
    register_op,
    with_whole_rows,
)
from mxfp8_titan.kernels.quantize_aligned import EMPTY_SCALE, SHARED_BYTES, row_parts, store_zeros
from mxfp8_titan.kernels.swiglu import sigmoid

MAX_HIDDEN = 32768
"""Longest row of h: 1024 threads hold 32 elements of each tensor. Gradients spill registers from 16384 on."""

FORWARD, BACKWARD, BACKWARD_WITH_TAIL = (1024, 3, 128 * 1024), (512, 3, 128 * 1024), (512, 4, 144 * 1024)
"""Elements of a row's head per warp, rows of a program that are on their way at once, and bytes that all programs of a
multiprocessor wait for. The last is for gradients in token groups with a tail, which would spill as two programs."""

REGISTERS, MAX_REGISTERS = 65536, 248
"""Of a multiprocessor, and the most of a thread."""


@triton.jit
def _load(ptr, start, end, SIZE: tl.constexpr):
    """SIZE elements from `start` on, fp32; zero from `end` on."""
    k = start + tl.arange(0, SIZE)
    return to_fp32(tl.load(ptr + k, mask=k < end, other=0.0))


@triton.jit
def _product(h13_ptr, start, H, SIZE: tl.constexpr):
    """h (SIZE,) fp32 of one row, from feature `start` on."""
    h1 = _load(h13_ptr, start, H, SIZE)
    h3 = _load(h13_ptr + H, start, H, SIZE)
    return h1 * sigmoid(h1) * h3


@triton.jit
def _gradients(dh_ptr, h13_ptr, start, H, SIZE: tl.constexpr):
    """dh1, dh3, h (SIZE,) fp32 of one row, from feature `start` on."""
    h1 = _load(h13_ptr, start, H, SIZE)
    h3 = _load(h13_ptr + H, start, H, SIZE)
    dh = _load(dh_ptr, start, H, SIZE)
    s = sigmoid(h1)
    silu = h1 * s
    return dh * h3 * (s + silu * (1.0 - s)), dh * silu, silu * h3


@triton.jit
def _store(x, inv_scale, data_ptr, start, H, SIZE: tl.constexpr):
    k = start + tl.arange(0, SIZE)
    tl.store(data_ptr + k, to_e4m3(x * inv_scale), mask=k < H)


@triton.jit
def swiglu_aligned_kernel(
    h13_ptr, data_ptr, scale_ptr, partial_ptr, group_ends_ptr, T, H, stride_ht, programs, num_groups,
    ROUNDING: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program works on a share of a group's rows, as quantize_aligned.aligned_along_k_kernel does."""
    program = tl.program_id(0)
    first, end, owned = share_of(program, programs, T, group_ends_ptr, num_groups, GROUPS)
    head_max = tl.zeros([HEAD], tl.int32)
    tail_max = tl.zeros([max(TAIL, 1)], tl.int32)
    for row in tl.range(first, end, num_stages=STAGES):
        at = tl.cast(row, tl.int64)
        head = _product(h13_ptr + at * stride_ht, 0, H, HEAD)
        bits = magnitude_bits(head)
        head_max = tl.maximum(head_max, bits)
        amax = tl.max(bits, 0)
        if TAIL > 0:
            tail = _product(h13_ptr + at * stride_ht, HEAD, H, TAIL)
            bits = magnitude_bits(tail)
            tail_max = tl.maximum(tail_max, bits)
            amax = tl.maximum(amax, tl.max(bits, 0))
        byte = e8m0_from_bits(amax, ROUNDING)
        inv_scale = inv_scale_from_e8m0(byte)
        _store(head, inv_scale, data_ptr + at * H, 0, H, HEAD)
        if TAIL > 0:
            _store(tail, inv_scale, data_ptr + at * H, HEAD, H, TAIL)
        tl.store(scale_ptr + row, scale_from_e8m0(byte))
    if first < end:
        part_ptr = partial_ptr + program.to(tl.int64) * H
        store_maxima(part_ptr, head_max, 0, H, HEAD)
        if TAIL > 0:
            store_maxima(part_ptr, tail_max, HEAD, H, TAIL)
    for row in range(owned + program, T, programs):
        store_zeros(data_ptr + tl.cast(row, tl.int64) * H, scale_ptr + row, H, HEAD, TAIL)


@triton.jit
def swiglu_aligned_backward_kernel(
    dh_ptr, h13_ptr, data_ptr, scale_ptr, h_data_ptr, h_scale_ptr, partial_ptr, group_ends_ptr,
    T, H, stride_dt, stride_ht, programs, num_groups,
    ROUNDING: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for the gradients, dh1 and dh3 in one row of 2H, and for h."""
    program = tl.program_id(0)
    first, end, owned = share_of(program, programs, T, group_ends_ptr, num_groups, GROUPS)
    head1_max = tl.zeros([HEAD], tl.int32)
    head3_max = tl.zeros([HEAD], tl.int32)
    tail1_max = tl.zeros([max(TAIL, 1)], tl.int32)
    tail3_max = tl.zeros([max(TAIL, 1)], tl.int32)
    for row in tl.range(first, end, num_stages=STAGES):
        at = tl.cast(row, tl.int64)
        dh_row, h13_row = dh_ptr + at * stride_dt, h13_ptr + at * stride_ht
        head1, head3, head = _gradients(dh_row, h13_row, 0, H, HEAD)
        bits1, bits3 = magnitude_bits(head1), magnitude_bits(head3)
        head1_max = tl.maximum(head1_max, bits1)
        head3_max = tl.maximum(head3_max, bits3)
        amax, h_amax = tl.max(tl.maximum(bits1, bits3), 0), tl.max(magnitude_bits(head), 0)
        if TAIL > 0:
            tail1, tail3, tail = _gradients(dh_row, h13_row, HEAD, H, TAIL)
            bits1, bits3 = magnitude_bits(tail1), magnitude_bits(tail3)
            tail1_max = tl.maximum(tail1_max, bits1)
            tail3_max = tl.maximum(tail3_max, bits3)
            amax = tl.maximum(amax, tl.max(tl.maximum(bits1, bits3), 0))
            h_amax = tl.maximum(h_amax, tl.max(magnitude_bits(tail), 0))
        byte, h_byte = e8m0_from_bits(amax, ROUNDING), e8m0_from_bits(h_amax, ROUNDING)
        inv_scale, h_inv_scale = inv_scale_from_e8m0(byte), inv_scale_from_e8m0(h_byte)
        _store(head1, inv_scale, data_ptr + at * 2 * H, 0, H, HEAD)
        _store(head3, inv_scale, data_ptr + at * 2 * H + H, 0, H, HEAD)
        _store(head, h_inv_scale, h_data_ptr + at * H, 0, H, HEAD)
        if TAIL > 0:
            _store(tail1, inv_scale, data_ptr + at * 2 * H, HEAD, H, TAIL)
            _store(tail3, inv_scale, data_ptr + at * 2 * H + H, HEAD, H, TAIL)
            _store(tail, h_inv_scale, h_data_ptr + at * H, HEAD, H, TAIL)
        tl.store(scale_ptr + row, scale_from_e8m0(byte))
        tl.store(h_scale_ptr + row, scale_from_e8m0(h_byte))
    if first < end:
        part_ptr = partial_ptr + program.to(tl.int64) * 2 * H
        store_maxima(part_ptr, head1_max, 0, H, HEAD)
        store_maxima(part_ptr + H, head3_max, 0, H, HEAD)
        if TAIL > 0:
            store_maxima(part_ptr, tail1_max, HEAD, H, TAIL)
            store_maxima(part_ptr + H, tail3_max, HEAD, H, TAIL)
    for row in range(owned + program, T, programs):
        at = tl.cast(row, tl.int64)
        store_zeros(h_data_ptr + at * H, h_scale_ptr + row, H, HEAD, TAIL)
        for half in tl.static_range(2):
            store_zeros(data_ptr + (at * 2 + half) * H, scale_ptr + row, H, HEAD, TAIL)


def _check(h13: Tensor, rounding: str, group_ends: Tensor | None) -> tuple[int, int]:
    """(number of groups, the power of two the kernel is compiled for)."""
    check_source(h13, "h13", (2,))
    check_choices(rounding)
    width = h13.shape[1]
    if width % 2 or width > 2 * MAX_HIDDEN:
        raise ValueError(
            f"h13 is {tuple(h13.shape)}, needs (T, 2H) with H at most {MAX_HIDDEN}: h1 and h3 side by side, and one "
            "program holds a whole row in registers"
        )
    return check_groups(group_ends, h13, h13.shape[0])


class _Config(NamedTuple):
    """How a kernel is launched."""

    programs: int
    constants: tuple[int, int, int]
    """HEAD, TAIL, STAGES"""
    warps: int
    registers: int
    """Most registers of a thread with which the programs of a multiprocessor run at the same time."""


@lru_cache
def config_for(
    device: int, rows: int, hidden: int, num_groups: int, row_bytes: int, config: tuple[int, int, int]
) -> _Config:
    """For `rows` rows of `hidden` features, of which each is row_bytes to read.

    device: what Tensor.get_device() returns
    config: FORWARD, BACKWARD or BACKWARD_WITH_TAIL
    """
    head, tail = row_parts(hidden)
    per_warp, stages, wanted = config
    stages = min(stages, SHARED_BYTES // row_bytes + 1)
    waiting = max(stages - 1, 1) * row_bytes
    warps = min(max(head // per_warp, 1), 32)
    registers = REGISTERS // (max(wanted // waiting, 1) * warps * 32) // 8 * 8
    programs = programs_for(multiprocessors(device), rows, 1, num_groups, waiting, wanted)
    return _Config(programs, (head, tail, stages), warps, min(max(registers, 64), MAX_REGISTERS))


def _allocate(h13: Tensor, group_ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, hidden = h13.shape[0], h13.shape[1] // 2
    return (
        new_tensor(h13, (rows, hidden), torch.float8_e4m3fn),
        new_tensor(h13, (rows,), torch.float32),
        new_tensor(h13, (1 if group_ends is None else group_ends.shape[0], hidden), torch.float32),
    )


def swiglu_aligned(h13: Tensor, rounding: str, group_ends: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """h = silu(h1) * h3 in MXFP8 with one scale per row, and its column maxima: (data, scale, amax).

    h13: (T, 2H) = [h1, h3] fp32, bf16 or fp16, copied unless its rows are contiguous; H <= 32768
    group_ends: (G,) int32, any sizes, or None for one group. Rows past the last end are taken as zeros, unread.
    returns data (T, H) float8_e4m3fn contiguous; scale (T,) fp32, powers of two or NaN; amax (G, H) fp32
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    groups = _check(h13, rounding, group_ends)
    data, scale, amax = _allocate(h13, group_ends)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE), amax.zero_()
    h13 = with_whole_rows(h13)
    rows, hidden = data.shape
    config = config_for(h13.get_device(), rows, hidden, groups[0], 2 * hidden * h13.element_size(), FORWARD)
    partial = new_partial(h13, config.programs, hidden)
    launch(
        swiglu_aligned_kernel,
        config.programs,
        (h13, data, scale, partial, group_ends),
        (rows, hidden, h13.stride(0), config.programs, groups[0]),
        (rounding, groups[1], *config.constants),
        config.warps,
        config.registers,
    )
    merge_maxima(partial, amax, group_ends, rows, config.programs, groups)
    return data, scale, amax


def _allocate_backward(h13: Tensor, group_ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, width = h13.shape
    return (
        new_tensor(h13, (rows, width), torch.float8_e4m3fn),
        new_tensor(h13, (rows,), torch.float32),
        new_tensor(h13, (1 if group_ends is None else group_ends.shape[0], width), torch.float32),
        new_tensor(h13, (rows, width // 2), torch.float8_e4m3fn),
        new_tensor(h13, (rows,), torch.float32),
    )


def swiglu_aligned_backward(
    dh: Tensor, h13: Tensor, rounding: str, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dh13 = [dh1, dh3] in MXFP8 with one scale per row, its column maxima, and h: (data, scale, amax, data, scale).

    h is made again because its FP8 form is cheaper to make beside the gradients than to save.

    dh: (T, H), h13: (T, 2H) = [h1, h3], fp32, bf16 or fp16, copied unless their rows are contiguous; H <= 32768
    group_ends: (G,) int32, any sizes, or None for one group. Rows past the last end are taken as zeros, unread.
    returns data (T, 2H) float8_e4m3fn, scale (T,) fp32, amax (G, 2H) fp32 of dh13; data (T, H), scale (T,) of h, what
            `swiglu_aligned` returns
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    groups = _check(h13, rounding, group_ends)
    check_source(dh, "dh", (2,))
    check_same_device(dh, "dh", h13, "h13")
    rows, hidden = h13.shape[0], h13.shape[1] // 2
    if dh.shape != (rows, hidden):
        raise ValueError(f"dh is {tuple(dh.shape)}, h13 is {tuple(h13.shape)}: dh needs {(rows, hidden)}")
    data, scale, amax, h_data, h_scale = out = _allocate_backward(h13, group_ends)
    if data.numel() == 0:
        return data, scale.fill_(EMPTY_SCALE), amax.zero_(), h_data, h_scale.fill_(EMPTY_SCALE)
    dh, h13 = with_whole_rows(dh), with_whole_rows(h13)
    row_bytes = hidden * (2 * h13.element_size() + dh.element_size())
    with_tail = groups[0] > 0 and row_parts(hidden)[1] > 0
    constants = BACKWARD_WITH_TAIL if with_tail else BACKWARD
    config = config_for(h13.get_device(), rows, hidden, groups[0], row_bytes, constants)
    partial = new_partial(h13, config.programs, 2 * hidden)
    launch(
        swiglu_aligned_backward_kernel,
        config.programs,
        (dh, h13, data, scale, h_data, h_scale, partial, group_ends),
        (rows, hidden, dh.stride(0), h13.stride(0), config.programs, groups[0]),
        (rounding, groups[1], *config.constants),
        config.warps,
        config.registers,
    )
    merge_maxima(partial, amax, group_ends, rows, config.programs, groups)
    return out


register_op(
    "swiglu_aligned(Tensor h13, str rounding, Tensor? group_ends=None) -> (Tensor, Tensor, Tensor)",
    swiglu_aligned,
    lambda h13, rounding, group_ends=None: _allocate(h13, group_ends),
)
register_op(
    "swiglu_aligned_backward(Tensor dh, Tensor h13, str rounding, Tensor? group_ends=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    swiglu_aligned_backward,
    lambda dh, h13, rounding, group_ends=None: _allocate_backward(h13, group_ends),
)
