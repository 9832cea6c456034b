"""Scales from the order they were computed in to the blocked layout. Reference: mxfp8_titan.reference.scale_swizzle.

For scales that arrive plain; the kernels of this package that quantize can write the blocked layout themselves.

    swizzle             (R, C) or (E, R, C)
    swizzle_t_groups    (T, C), rows split by group_ends
    swizzle_k_groups    (R, T / 32), columns split by group_ends

Scales may be row-major or column-major (what a quantizer along T that does not transpose writes); other strides are
copied first. Bytes travel four at a time: a 32-bit word holds four columns of a row, which is how a blocked tile is
built, so that the layout is a transpose of words.
"""

import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    SCALE_TILE_COLS,
    SCALE_TILE_ROWS,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
)
from mxfp8_titan.kernels.groups import find_group
from mxfp8_titan.kernels.launch import ceil_div, check_groups, launch, register_op

_MATRIX, _T_GROUPS, _K_GROUPS = range(3)
MATRIX, T_GROUPS, K_GROUPS = tl.constexpr(_MATRIX), tl.constexpr(_T_GROUPS), tl.constexpr(_K_GROUPS)

TILES, NUM_WARPS = 8, 4
"""Tiles side by side that one program fills, 32 columns, and its warps."""

MAX_COLS_OF_K_GROUPS = 2**20
"""33 million tokens."""

_ROWS = tl.constexpr(SCALE_TILE_ROWS)
_LOW_21 = tl.constexpr(2**21 - 1)
_NO_GROUP = tl.constexpr(2**63 - 1)
_TILE_WORDS = tl.constexpr(SCALE_TILE_ROWS * SCALE_TILE_COLS // 4)


@triton.jit
def swizzle_kernel(
    scale_ptr, out_ptr, group_ends_ptr, R, C, stride_e, stride_r, stride_c, row_tiles, col_tiles, chunks,
    programs_per_row, num_groups, out_words,
    CASE: tl.constexpr, GROUPS: tl.constexpr, ROW_MAJOR: tl.constexpr, WORDS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One program fills TILES tiles of 128 x 4 scales that lie side by side in one group, with their padding.

    The grid is all row tiles x programs_per_row, as many as there are chunks of columns or fewer, which then loop.
    K groups: chunks are numbered so that none spans two groups, and those past the last group fill what is left.

    col_tiles: tiles per row of tiles, over all groups.  out_words: 32-bit words of the buffer
    WORDS: rows (or columns, if those are contiguous) start at multiples of 4 bytes
    """
    row_tile = tl.program_id(0) // programs_per_row
    first_row = row_tile * _ROWS
    row_end = R
    if CASE == T_GROUPS:
        group, first_row, row_end, _, _ = find_group(row_tile, group_ends_ptr, num_groups, row_tiles, _ROWS, GROUPS)
        row_end = tl.where(group < num_groups, tl.minimum(row_end, R), 0)
    elif CASE == MATRIX:
        scale_ptr += (row_tile // row_tiles).to(tl.int64) * stride_e
        first_row = row_tile % row_tiles * _ROWS
    for chunk in range(tl.program_id(0) % programs_per_row, chunks, programs_per_row):
        if CASE == K_GROUPS:
            first_tile, base, tiles, first_col, col_end = _place_chunk(
                chunk, C, group_ends_ptr, num_groups, col_tiles, GROUPS, TILES
            )
            out_tile = base.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * tiles + (first_tile - base)
            width = base + tiles - first_tile
        else:
            first_col = chunk * TILES * 4
            col_end = C
            out_tile = row_tile.to(tl.int64) * col_tiles + chunk * TILES
            width = col_tiles - chunk * TILES
        if ROW_MAJOR:
            words = _load_rows(scale_ptr, first_row, row_end, first_col, col_end, stride_r, WORDS, TILES)
        else:
            words = _load_columns(scale_ptr, first_row, row_end, first_col, col_end, stride_c, WORDS, TILES)
        # Row 32 b + i of a tile is word 4 i + b of its 128.
        words = tl.reshape(tl.permute(tl.reshape(words, [TILES, 4, 32]), (0, 2, 1)), [TILES, _TILE_WORDS])
        tile = tl.arange(0, TILES)[:, None]
        at = out_tile * _TILE_WORDS + tile * _TILE_WORDS + tl.arange(0, _TILE_WORDS)[None, :]
        tl.store(out_ptr.to(tl.pointer_type(tl.uint32)) + at, words, mask=(tile < width) & (at < out_words))


@triton.jit
def _place_chunk(chunk, C, group_ends_ptr, num_groups, col_tiles, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """(first_tile, base, tiles, first_col, col_end): a chunk of TILES tiles of the group whose first tile is `base`.

    Past the last group: the tiles that are left, with no columns to read. Running sums and maxima come packed, 21 bits
    each, because every one of them is a chain of exchanges between lanes that the loads have to wait for.
    """
    number = tl.arange(0, GROUPS)
    exists = number < num_groups
    ends = tl.load(group_ends_ptr + number, mask=exists, other=0) // 32
    starts = tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0) // 32
    tiles = tl.where(exists, (ends - starts + 3) // 4, 0).to(tl.int64)
    sums = tl.cumsum(((tiles + TILES - 1) // TILES << 21) | tiles, 0)
    all_three = (sums << 21) | ends.to(tl.int64)
    is_before = exists & ((sums >> 21) <= chunk)
    before = tl.max(tl.where(is_before, all_three, 0), 0)
    after = tl.min(tl.where(exists & ((sums >> 21) > chunk), all_three, _NO_GROUP), 0)
    base = ((before >> 21) & _LOW_21).to(tl.int32)
    first_tile = base + (chunk - (before >> 42).to(tl.int32)) * TILES
    first_col = (before & _LOW_21).to(tl.int32) + (first_tile - base) * 4
    owned = after != _NO_GROUP
    col_end = tl.where(owned, tl.minimum((after & _LOW_21).to(tl.int32), C), 0)
    end_tile = tl.where(owned, tl.minimum(((after >> 21) & _LOW_21).to(tl.int32), col_tiles), col_tiles)
    return first_tile, base, end_tile - base, first_col, col_end


@triton.jit
def _load_rows(scale_ptr, first_row, row_end, first_col, col_end, stride_r, WORDS: tl.constexpr, TILES: tl.constexpr):
    """(TILES, 128) words of four columns each, from rows that are contiguous; zero past the ends."""
    row = first_row + tl.arange(0, _ROWS)[:, None]
    in_row = row < row_end
    row_ptr = scale_ptr + row.to(tl.int64) * stride_r
    tile = tl.arange(0, TILES)[None, :]
    if WORDS:
        # A group may start at any column, a load at every fourth: take two words and shift.
        shift = first_col % 4
        col = first_col - shift + tile * 4
        word_ptr = (row_ptr + tl.multiple_of(first_col - shift, 4)).to(tl.pointer_type(tl.uint32)) + tile
        low = tl.load(word_ptr, mask=in_row & (col < col_end), other=0)
        high = tl.load(word_ptr + 1, mask=in_row & (col + 4 < col_end) & (shift > 0), other=0)
        both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        left = tl.minimum(tl.maximum(col_end - first_col - tile * 4, 0), 4)
        keep = (tl.full([1, TILES], 1, tl.uint64) << (left * 8).to(tl.uint64)) - 1
        words = ((both >> (shift * 8).to(tl.uint64)) & keep).to(tl.uint32)
    else:
        words = tl.zeros([_ROWS, TILES], tl.uint32)
        for byte in tl.static_range(4):
            col = first_col + tile * 4 + byte
            value = tl.load(row_ptr + col, mask=in_row & (col < col_end), other=0)
            words |= value.to(tl.uint32) << (byte * 8)
    return tl.permute(words, (1, 0))


@triton.jit
def _load_columns(
    scale_ptr, first_row, row_end, first_col, col_end, stride_c, WORDS: tl.constexpr, TILES: tl.constexpr
):
    """The same from columns that are contiguous: four rows of four columns, transposed byte by byte."""
    col = first_col + tl.arange(0, TILES)[:, None] * 4
    if WORDS:
        row = first_row + tl.arange(0, 32)[None, :] * 4
        c0 = _load_column_words(scale_ptr, row, row_end, col, col_end, stride_c, first_row)
        c1 = _load_column_words(scale_ptr, row, row_end, col + 1, col_end, stride_c, first_row)
        c2 = _load_column_words(scale_ptr, row, row_end, col + 2, col_end, stride_c, first_row)
        c3 = _load_column_words(scale_ptr, row, row_end, col + 3, col_end, stride_c, first_row)
        even = tl.join(_pick_byte(c0, c1, c2, c3, 0), _pick_byte(c0, c1, c2, c3, 2))
        odd = tl.join(_pick_byte(c0, c1, c2, c3, 1), _pick_byte(c0, c1, c2, c3, 3))
        return tl.reshape(tl.join(even, odd), [TILES, _ROWS])
    else:  # noqa: RET505 - one branch is compiled
        row = first_row + tl.arange(0, _ROWS)[None, :]
        words = tl.zeros([TILES, _ROWS], tl.uint32)
        for byte in tl.static_range(4):
            at = (col + byte).to(tl.int64) * stride_c + row
            value = tl.load(scale_ptr + at, mask=(row < row_end) & (col + byte < col_end), other=0)
            words |= value.to(tl.uint32) << (byte * 8)
        return words


@triton.jit
def _load_column_words(scale_ptr, row, row_end, col, col_end, stride_c, first_row):
    """Words of four rows each of one column per tile."""
    column_ptr = (scale_ptr + col.to(tl.int64) * stride_c + tl.multiple_of(first_row, 4)).to(tl.pointer_type(tl.uint32))
    return tl.load(column_ptr + (row - first_row) // 4, mask=(row < row_end) & (col < col_end), other=0)


@triton.jit
def _pick_byte(c0, c1, c2, c3, BYTE: tl.constexpr):
    """The word of one row: byte number BYTE of four columns' words."""
    low = ((c0 >> (8 * BYTE)) & 0xFF) | (((c1 >> (8 * BYTE)) & 0xFF) << 8)
    return low | (((c2 >> (8 * BYTE)) & 0xFF) << 16) | (((c3 >> (8 * BYTE)) & 0xFF) << 24)


def _launch(
    scale: Tensor, out: Tensor, group_ends: Tensor | None, case: int, columns_in_parallel: bool = True
) -> Tensor:
    """Fills `out`; without columns_in_parallel each row of tiles is one program that loops over its columns."""
    if scale.element_size() != 1:
        raise TypeError(f"scale is {scale.dtype}, needs a dtype of one byte, float8_e8m0fnu or uint8")
    if not (scale.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"scale is on {scale.device}, needs a CUDA device; on a CPU use mxfp8_titan.reference")
    rows, cols = scale.shape[-2:]
    if case == _K_GROUPS and cols >= MAX_COLS_OF_K_GROUPS:
        raise ValueError(
            f"scale has {cols} columns, needs fewer than {MAX_COLS_OF_K_GROUPS}: the kernel counts in 21 bits"
        )
    tokens = rows if case == _T_GROUPS else cols * BLOCK_SIZE
    num_groups, groups = check_groups(group_ends, scale, tokens, 1 if case == _T_GROUPS else BLOCK_SIZE)
    if 1 not in (scale.stride(-1), scale.stride(-2)):
        scale = scale.contiguous()
    row_major = scale.stride(-1) == 1
    row_tiles = ceil_div(rows + (SCALE_TILE_ROWS * num_groups if case == _T_GROUPS else 0), SCALE_TILE_ROWS)
    col_tiles = ceil_div(cols + (SCALE_TILE_COLS * num_groups if case == _K_GROUPS else 0), SCALE_TILE_COLS)
    experts = scale.shape[0] if scale.ndim == 3 else 1
    chunks = ceil_div(col_tiles, TILES) + (num_groups if case == _K_GROUPS else 0)
    programs_per_row = chunks if columns_in_parallel else 1
    grid = experts * row_tiles * programs_per_row
    if grid == 0 or out.numel() == 0:
        return out
    stride = (scale.stride(0) if scale.ndim == 3 else 0, scale.stride(-2), scale.stride(-1))
    contiguous, other = (cols, stride[1]) if row_major else (rows, stride[2])
    # Row starts of token groups are known on the device only; along contiguous columns they must be multiples of 4.
    words = (contiguous | other | stride[0] | scale.storage_offset()) % 4 == 0 and (row_major or case != _T_GROUPS)
    launch(
        swizzle_kernel,
        grid,
        (scale, out, group_ends),
        (
            rows, cols, *stride,
            row_tiles, col_tiles, chunks, programs_per_row, num_groups, out.numel() // 4,
        ),
        (case, groups, row_major, words, TILES),
        NUM_WARPS,
    )  # fmt: skip
    return out


def _allocate(scale: Tensor) -> Tensor:
    rows, cols = blocked_shape(*scale.shape[-2:])
    shape = (rows, cols) if scale.ndim == 2 else (scale.shape[0], rows * cols)
    return scale.new_empty(shape)


def _allocate_t_groups(scale: Tensor, group_ends: Tensor) -> Tensor:
    return scale.new_empty(blocked_shape_t_groups(*scale.shape, group_ends.shape[0]))


def _allocate_k_groups(scale: Tensor, group_ends: Tensor) -> Tensor:
    return scale.new_empty(blocked_shape_k_groups(*scale.shape, group_ends.shape[0]))


def swizzle(scale: Tensor) -> Tensor:
    """scale in the blocked layout, (pad128(R), pad4(C)) or one row of pad128(R) * pad4(C) bytes per expert.

    scale: (R, C) or (E, R, C), one byte per element, any strides
    Raises: TypeError for another size of element, ValueError for another device.
    """
    return _launch(scale, _allocate(scale), None, _MATRIX)


def swizzle_t_groups(scale: Tensor, group_ends: Tensor) -> Tensor:
    """Each group's rows in the blocked layout, one group after the other (T + 128 G, pad4(C)).

    scale: (T, C) one byte per element, any strides; rows past the last group end are not read
    group_ends: (G,) int32, tokens, any sizes
    Raises: TypeError or ValueError for what the arguments above don't allow.
    """
    return _launch(scale, _allocate_t_groups(scale, group_ends), group_ends, _T_GROUPS)


def swizzle_k_groups(scale: Tensor, group_ends: Tensor, columns_in_parallel: bool = True) -> Tensor:
    """Each group's columns in the blocked layout, one group after the other (pad128(R), C + 4 G).

    scale: (R, C) one byte per element, any strides; columns past the last group end are not read
    group_ends: (G,) int32, tokens (32 per column), sizes multiples of 32
    columns_in_parallel: False runs one program per 128 rows, to compare with
    Raises: TypeError or ValueError for what the arguments above don't allow.
    """
    out = _allocate_k_groups(scale, group_ends)
    return _launch(scale, out, group_ends, _K_GROUPS, columns_in_parallel)


register_op("swizzle(Tensor scale) -> Tensor", swizzle, _allocate)
register_op("swizzle_t_groups(Tensor scale, Tensor group_ends) -> Tensor", swizzle_t_groups, _allocate_t_groups)
register_op(
    "swizzle_k_groups(Tensor scale, Tensor group_ends, bool columns_in_parallel=True) -> Tensor",
    swizzle_k_groups,
    lambda scale, group_ends, columns_in_parallel=True: _allocate_k_groups(scale, group_ends),
)
