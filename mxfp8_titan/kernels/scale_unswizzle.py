"""Blocked scales back to plain ones: the inverse of kernels.scale_swizzle, for tests and for people who debug."""

import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, SCALE_TILE_ROWS
from mxfp8_titan.kernels.launch import ceil_div, check_groups, launch
from mxfp8_titan.kernels.scale_swizzle import _K_GROUPS, _MATRIX, _T_GROUPS, K_GROUPS, T_GROUPS

BLOCK_C = 32
"""Columns that one program gathers."""

_ROWS = tl.constexpr(SCALE_TILE_ROWS)


@triton.jit
def unswizzle_kernel(
    blocked_ptr, out_ptr, group_ends_ptr, R, C, row_tiles, col_blocks, num_groups,
    CASE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program gathers 128 x BLOCK_C scales, byte by byte, each from where format.blocked_index puts it.

    Written to be compared with, not to be fast.
    """
    pid = tl.program_id(0)
    tile = (pid // col_blocks).to(tl.int64)
    expert = tile // row_tiles
    row = tile % row_tiles * _ROWS + tl.arange(0, _ROWS)[:, None]
    col = pid % col_blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    out_ptrs = out_ptr + (expert * R + row) * C + col
    inside = (row < R) & (col < C)
    width = tl.cdiv(C, 4)
    region = expert * row_tiles * width * 512
    read = inside
    if CASE == T_GROUPS:
        start, end, before = _group_of(row, group_ends_ptr, num_groups, 128, GROUPS, 1)
        region = before[:, None].to(tl.int64) * width * 512
        read = inside & (row < end[:, None])
        row -= start[:, None]
    if CASE == K_GROUPS:
        start, end, before = _group_of(col, group_ends_ptr, num_groups, 128, GROUPS, 0)
        region = before[None, :].to(tl.int64) * row_tiles * 512
        width = ((end - start + 3) // 4)[None, :]
        read = inside & (col < end[None, :])
        col -= start[None, :]
    at = (row // 128).to(tl.int64) * width + col // 4
    at = region + at * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
    tl.store(out_ptrs, tl.load(blocked_ptr + at, mask=read, other=0), mask=inside)


@triton.jit
def _group_of(index, group_ends_ptr, num_groups, TOKENS: tl.constexpr, GROUPS: tl.constexpr, AXIS: tl.constexpr):
    """(start, end, tiles before it) of the group of each row or column number; end is 0 past the last group.

    index: (rows, 1) in tokens with AXIS 1, or (1, columns) in blocks of tokens with AXIS 0
    """
    UNIT: tl.constexpr = 1 if AXIS == 1 else 32
    index = tl.reshape(index, [index.numel])[:, None]
    number = tl.arange(0, GROUPS)[None, :]
    exists = number < num_groups
    ends = tl.load(group_ends_ptr + number, mask=exists, other=0)
    starts = tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0)
    tiles = (ends - starts + TOKENS - 1) // TOKENS
    before = exists & (ends // UNIT <= index)
    start = tl.max(tl.where(before, ends // UNIT, 0), 1)
    end = tl.min(tl.where(exists & (ends // UNIT > index), ends // UNIT, 2**31 - 1), 1)
    return start, tl.where(end == 2**31 - 1, 0, end), tl.sum(tl.where(before, tiles, 0), 1)


def _launch(blocked: Tensor, shape: tuple[int, ...], group_ends: Tensor | None, case: int) -> Tensor:
    if blocked.element_size() != 1 or not blocked.is_contiguous():
        raise ValueError(f"blocked is {blocked.dtype} with strides {blocked.stride()}, needs contiguous bytes")
    rows, cols = shape[-2:]
    tokens = rows if case == _T_GROUPS else cols * BLOCK_SIZE
    num_groups, groups = check_groups(group_ends, blocked, tokens, 1 if case == _T_GROUPS else BLOCK_SIZE)
    out = blocked.new_empty(shape)
    row_tiles, col_blocks = ceil_div(rows, SCALE_TILE_ROWS), ceil_div(cols, BLOCK_C)
    grid = (shape[0] if len(shape) == 3 else 1) * row_tiles * col_blocks
    if grid:
        launch(
            unswizzle_kernel,
            grid,
            (blocked, out, group_ends),
            (
                rows, cols, row_tiles, col_blocks,
                num_groups,
            ),
            (case, groups, BLOCK_C),
            4,
        )  # fmt: skip
    return out


def unswizzle(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """(rows, cols) scales from the buffer of `swizzle` of one matrix.

    blocked: (pad128(rows), pad4(cols)) bytes, contiguous
    """
    return _launch(blocked, (rows, cols), None, _MATRIX)


def unswizzle_per_expert(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """(E, rows, cols) scales from the buffer of `swizzle` of a matrix per expert.

    blocked: (E, pad128(rows) * pad4(cols)) bytes, contiguous
    """
    return _launch(blocked, (blocked.shape[0], rows, cols), None, _MATRIX)


def unswizzle_t_groups(blocked: Tensor, group_ends: Tensor, tokens: int, cols: int) -> Tensor:
    """(tokens, cols) scales from the buffer of `swizzle_t_groups`; rows past the last group end are zero."""
    return _launch(blocked, (tokens, cols), group_ends, _T_GROUPS)


def unswizzle_k_groups(blocked: Tensor, group_ends: Tensor, rows: int, cols: int) -> Tensor:
    """(rows, cols) scales from the buffer of `swizzle_k_groups`; columns past the last group end are zero."""
    return _launch(blocked, (rows, cols), group_ends, _K_GROUPS)
