"""The kernels of kernels.dot_scaled_gemm: a fixed number of programs walks all tiles.

On sm100 and sm103 `tl.dot_scaled` is one tcgen05.mma with a scale per 32 elements; on older GPUs Triton emulates it in
bf16, so that the same source can be checked there. Operands and scales travel by the copy engine (TMA): scales as
whole 512-byte tiles of the blocked layout, from where the tensor core reads them without a register in between.
Groups are found on the device, from group_ends.

Source: Triton's tutorial "Block Scaled Matrix Multiplication", for the shape of scales that its compiler recognizes.
"""

import triton
import triton.language as tl

from mxfp8_titan.format import BLOCK_SIZE, E4M3_NAN_BYTE, GROUP_TILE, SCALE_TILE_ROWS
from mxfp8_titan.kernels.e4m3 import CAST_BY_HAND, scale_from_e8m0
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.tile import tile_of

TILE = tl.constexpr(GROUP_TILE)
"""Rows of an output tile, and elements of the contraction per step: four blocks, the width of one tile of scales."""

BAND = tl.constexpr(8)
"""Tiles along T that are worked on together, for reuse in the L2 cache."""

_SCALE_ROWS = tl.constexpr(SCALE_TILE_ROWS)
_BLOCKS = tl.constexpr(GROUP_TILE // BLOCK_SIZE)
_BLOCK = tl.constexpr(BLOCK_SIZE)
_E4M3_NAN = tl.constexpr(E4M3_NAN_BYTE)


@triton.jit
def load_scales(desc, row_tile, col_tile, ROW_TILES: tl.constexpr):
    """Scale bytes (128 * ROW_TILES, 4) of tiles of the blocked layout that lie below each other."""
    tiles = desc.load([row_tile, col_tile, 0, 0])
    tiles = tl.permute(tl.reshape(tiles, [ROW_TILES, 1, 32, 4, 4]), (0, 3, 2, 1, 4))
    return tl.reshape(tiles, [ROW_TILES * _SCALE_ROWS, _BLOCKS])


@triton.jit
def dequantize(data, byte):
    """data (R, 128) times its scales (R, 4), fp32. For the interpreter, which takes E4M3's NaN for 480."""
    scale = tl.broadcast_to(scale_from_e8m0(byte.to(tl.int32))[:, :, None], [byte.shape[0], _BLOCKS, _BLOCK])
    code = data.to(tl.uint8, bitcast=True) & 0x7F
    value = tl.where(code == _E4M3_NAN, float("nan"), data.to(tl.float32))
    return value * tl.reshape(scale, data.shape)


@triton.jit
def multiply(a, a_byte, b, b_byte, acc):
    """acc + a @ b^T of E4M3 tiles (M, 128) and (N, 128) with scale bytes (M, 4) and (N, 4).

    The interpreter of Triton 3.6 has no dot_scaled. To be dropped once it does.
    """
    if CAST_BY_HAND:
        return tl.dot(dequantize(a, a_byte), tl.trans(dequantize(b, b_byte)), acc)
    else:  # noqa: RET505 - one branch is compiled
        return tl.dot_scaled(a, a_byte, "e4m3", b.T, b_byte, "e4m3", acc)


@triton.jit
def round_to(acc, dtype: tl.constexpr):
    """acc (fp32) as `dtype`, rounded to nearest even; the interpreter's cast to bf16 cuts."""
    if CAST_BY_HAND and dtype == tl.bfloat16:
        bits = acc.to(tl.int32, bitcast=True)
        rounded = bits + tl.where((bits & 0x7F800000) == 0x7F800000, 0, 0x7FFF + ((bits >> 16) & 1))
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - one branch is compiled
        return acc.to(dtype)


@triton.jit(do_not_specialize=["T", "tiles_t", "num_groups"])
def gemm_of_rows_kernel(
    a_desc, a_scale_desc, b_desc, b_scale_desc, a2_desc, a2_scale_desc, b2_desc, b2_scale_desc,
    out_ptr, group_ends_ptr, T, N, K, stride_ot, tiles_t, tiles_n, num_groups,
    GROUPS: tl.constexpr, PAIRS: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program works on every n-th tile of 128 tokens x TILE_N; tiles along T are those of the blocked scales.

    With two PAIRS of operands their products are added. A tile reads rows and columns past its group and N, whose
    products are masked when it is stored; past K the copy engine fills in zeros. Tiles past the last group store
    zeros, so that every row of the output is written.
    """
    steps_k = tl.cdiv(K, TILE)
    row_tiles_n = tl.cdiv(N, _SCALE_ROWS)
    ROW_TILES: tl.constexpr = TILE_N // _SCALE_ROWS
    for number in tl.range(tl.program_id(0), tiles_t * tiles_n, tl.num_programs(0)):
        tile, tile_n = tile_of(number, tiles_t, tiles_n, BAND)
        group, _, first, read_end, write_end, _, _ = place_tile(
            tile, tiles_t, T, T, group_ends_ptr, num_groups, TILE, GROUPS, True
        )
        steps = tl.where(read_end > first, steps_k, 0)
        b_row = group * N + tile_n * TILE_N
        b_tile = group * row_tiles_n + tile_n * ROW_TILES
        acc = tl.zeros([TILE, TILE_N], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            a = a_desc.load([first, step * TILE])
            b = b_desc.load([b_row, step * TILE])
            a_byte = load_scales(a_scale_desc, tile, step, 1)
            acc = multiply(a, a_byte, b, load_scales(b_scale_desc, b_tile, step, ROW_TILES), acc)
        if PAIRS == 2:
            for step in tl.range(0, steps, num_stages=STAGES):
                a = a2_desc.load([first, step * TILE])
                b = b2_desc.load([b_row, step * TILE])
                a_byte = load_scales(a2_scale_desc, tile, step, 1)
                acc = multiply(a, a_byte, b, load_scales(b2_scale_desc, b_tile, step, ROW_TILES), acc)
        t = first + tl.arange(0, TILE)[:, None]
        n = tile_n * TILE_N + tl.arange(0, TILE_N)[None, :]
        out = out_ptr + t.to(tl.int64) * stride_ot + n
        tl.store(out, round_to(acc, out_ptr.dtype.element_ty), mask=(t < write_end) & (n < N))


@triton.jit(do_not_specialize=["T", "experts", "num_groups"])
def gemm_over_t_kernel(
    a_desc, a_scale_desc, b_desc, b_scale_desc, out_ptr, group_ends_ptr,
    T, N, K, experts, tiles_n, tiles_k, num_groups,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program works on every n-th tile of 128 x 128 outputs of an expert.

    A group's tokens are contracted 128 at a time. What is left of it, 32, 64 or 96 tokens, shares its tile with the
    next group's and is masked in registers, in a step of its own: a scale cannot mask, for it cannot be zero.
    """
    row_tiles_n = tl.cdiv(N, _SCALE_ROWS)
    row_tiles_k = tl.cdiv(K, _SCALE_ROWS)
    for number in tl.range(tl.program_id(0), experts * tiles_n * tiles_k, tl.num_programs(0)):
        expert = number // (tiles_n * tiles_k)
        tile_n, tile_k = tile_of(number - expert * (tiles_n * tiles_k), tiles_n, tiles_k, BAND)
        if GROUPS > 0:
            group = tl.arange(0, GROUPS)
            exists = group < num_groups
            ends = tl.load(group_ends_ptr + group, mask=exists, other=0)
            starts = tl.load(group_ends_ptr + group - 1, mask=exists & (group > 0), other=0)
            start = tl.sum(tl.where(group == expert, starts, 0), 0)
            end = tl.sum(tl.where(group == expert, ends, 0), 0)
            base = tl.sum(tl.where(group < expert, tl.cdiv(ends - starts, TILE), 0), 0)
        else:
            start, end, base = 0, T, 0
        tiles = tl.cdiv(end - start, TILE)
        a_tile = base * row_tiles_n + tile_n * tiles
        b_tile = base * row_tiles_k + tile_k * tiles
        whole = (end - start) // TILE
        acc = tl.zeros([TILE, TILE], tl.float32)
        for step in tl.range(0, whole, num_stages=STAGES):
            a = a_desc.load([tile_n * TILE, start + step * TILE])
            b = b_desc.load([tile_k * TILE, start + step * TILE])
            a_byte = load_scales(a_scale_desc, a_tile + step, 0, 1)
            acc = multiply(a, a_byte, b, load_scales(b_scale_desc, b_tile + step, 0, 1), acc)
        if whole < tiles:
            a = _first_columns(a_desc.load([tile_n * TILE, start + whole * TILE]), end - start - whole * TILE)
            b = _first_columns(b_desc.load([tile_k * TILE, start + whole * TILE]), end - start - whole * TILE)
            a_byte = load_scales(a_scale_desc, a_tile + whole, 0, 1)
            acc = multiply(a, a_byte, b, load_scales(b_scale_desc, b_tile + whole, 0, 1), acc)
        n = tile_n * TILE + tl.arange(0, TILE)[:, None]
        k = tile_k * TILE + tl.arange(0, TILE)[None, :]
        out = out_ptr + (expert.to(tl.int64) * N + n) * K + k
        tl.store(out, round_to(acc, out_ptr.dtype.element_ty), mask=(n < N) & (k < K))


@triton.jit
def _first_columns(data, count):
    """data (128, 128) E4M3 with zeros from column `count` on, also in the place of NaN."""
    column = tl.arange(0, data.shape[1])[None, :]
    byte = tl.where(column < count, data.to(tl.uint8, bitcast=True), 0)
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
