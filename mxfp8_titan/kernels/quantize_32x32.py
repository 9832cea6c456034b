"""Weights in MXFP8 with one scale per 32 x 32 square, in both layouts from one read.

Reference: mxfp8_titan.reference.quantize_32x32. Plain scales come out once per square; blocked ones, which tensor
cores read, repeat a square's byte for each of its 32 rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, BLOCKED, GROUP_TILE, PLAIN, blocked_shape
from mxfp8_titan.kernels.e4m3 import e8m0_from_bits, inv_scale_from_e8m0, to_e4m3
from mxfp8_titan.kernels.launch import (
    can_load_words,
    ceil_div,
    check_blocks,
    check_choices,
    check_source,
    launch,
    register_op,
)
from mxfp8_titan.kernels.tile import (
    BLOCK,
    BLOCKS_T,
    TILE_T,
    cast_along_t,
    load_along_k,
    load_along_t,
    offsets_along_k,
    store_blocked,
    store_transposed,
    tile_of,
)

VEC, BAND, NUM_WARPS = 4, 8, 4
"""Features per thread, tiles along N that are worked on together, warps, for a tile of 128 x 128."""


@triton.jit
def quantize_32x32_kernel(
    w_ptr, along_k_ptr, along_n_ptr, scale_k_ptr, scale_n_ptr,
    N, K, stride_we, stride_wn, stride_wk, tiles_n, tiles_k, all_tiles_n,
    ROUNDING: tl.constexpr, BLOCKED: tl.constexpr, WORDS: tl.constexpr, VEC: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program quantizes one 128 x 128 tile of an expert; the grid is their number, in the order of tile.tile_of.

    The maximum of a square is taken along N inside threads, then along K over 32 / VEC lanes. The tile is loaded
    again, from the caches, for the layout along K: see kernels.quantize. Edges are masked here.
    """
    BLOCKS_K: tl.constexpr = TILE_T // BLOCK
    tile, tile_k = tile_of(tl.program_id(0), all_tiles_n, tiles_k, BAND)
    expert = (tile // tiles_n).to(tl.int64)
    tile_n = tile % tiles_n
    first = tile_n * TILE_T
    rows = N - first
    w_tile = w_ptr + expert * stride_we + first.to(tl.int64) * stride_wn

    w, amax = load_along_t(w_tile, stride_wn, stride_wk, rows, tile_k, K, TILE_T, VEC, WORDS)
    lanes = tl.permute(tl.max(amax, 2), (1, 0))
    byte = e8m0_from_bits(tl.max(tl.reshape(lanes, [BLOCKS_T, BLOCKS_K, BLOCK // VEC]), 2), ROUNDING)
    inv_scale = inv_scale_from_e8m0(byte)
    per_lane = tl.broadcast_to(inv_scale[:, :, None], [BLOCKS_T, BLOCKS_K, BLOCK // VEC])
    per_lane = tl.permute(tl.reshape(per_lane, [BLOCKS_T, TILE_T // VEC]), (1, 0))
    y = cast_along_t(w * per_lane[:, :, None, None])
    store_transposed(y, along_n_ptr, expert * K, first, N, tile_k, K, N, TILE_T)

    w = load_along_k(w_tile, stride_wn, stride_wk, rows, tile_k, K, TILE_T)
    y = tl.reshape(w, [BLOCKS_T, BLOCK, BLOCKS_K, BLOCK]) * inv_scale[:, None, :, None]
    n, k = offsets_along_k(tile_k, TILE_T)
    out = along_k_ptr + (expert * N + first) * K + n.to(tl.int64) * K + k
    tl.store(out, tl.reshape(to_e4m3(y), [TILE_T, TILE_T]), mask=(n < rows) & (k < K))

    if BLOCKED:
        # Rows 32 b + i of the tile share square row b: the tile (32, 4, 4) of bytes repeats along i.
        repeated = tl.broadcast_to(byte[None, :, :], [BLOCK, BLOCKS_T, BLOCKS_K])
        store_blocked(scale_k_ptr, (tile.to(tl.int64) * tiles_k + tile_k) * 512, repeated, 0, 4, 4, False)
        repeated = tl.broadcast_to(tl.permute(byte, (1, 0))[None, :, :], [BLOCK, BLOCKS_K, BLOCKS_T])
        region = (expert * tiles_k + tile_k) * tiles_n + tile_n
        store_blocked(scale_n_ptr, region * 512, repeated, 0, 4, 4, False)
    else:
        row = first // BLOCK + tl.arange(0, BLOCKS_T)[:, None]
        col = tile_k * BLOCKS_K + tl.arange(0, BLOCKS_K)[None, :]
        out = scale_k_ptr + (expert * (N // BLOCK) + row) * (K // BLOCK) + col
        tl.store(out, byte.to(tl.uint8), mask=(row < N // BLOCK) & (col < K // BLOCK))


def _allocate(w: Tensor, rounding: str, scale_layout: str = PLAIN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty along_k, along_n, scale_k, scale_n; plain scales exist once, so scale_n is empty then."""
    *experts, rows, features = w.shape
    along_k = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    along_n = w.new_empty((*experts, features, rows), dtype=torch.float8_e4m3fn)
    n_blocks, k_blocks = rows // BLOCK_SIZE, features // BLOCK_SIZE
    if scale_layout == PLAIN:
        shapes = (*experts, n_blocks, k_blocks), (0,)
    else:
        shapes = blocked_shape(rows, k_blocks), blocked_shape(features, n_blocks)
        if experts:
            shapes = tuple((*experts, height * width) for height, width in shapes)
    return along_k, along_n, *(w.new_empty(shape, dtype=torch.float8_e8m0fnu) for shape in shapes)


def quantize_32x32_both(w: Tensor, rounding: str, scale_layout: str = PLAIN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w and its transpose in MXFP8, one scale per 32 x 32 square: (along_k, along_n, scale_k, scale_n).

    w: (N, K) or (E, N, K) fp32, bf16 or fp16, any strides; N and K multiples of 32
    returns along_k of w's shape and along_n (..., K, N), float8_e4m3fn contiguous; float8_e8m0fnu scales, either
            plain: scale_k (..., N / 32, K / 32), and scale_n empty, since it is scale_k transposed; or
            blocked: both as for 1 x 32 blocks, (pad128(N), pad4(K / 32)) and (pad128(K), pad4(N / 32)), flat per expert
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(w, "w", (2, 3))
    check_choices(rounding, scale_layout)
    rows, features = w.shape[-2:]
    check_blocks(rows, "N")
    check_blocks(features, "K")
    out = _allocate(w, rounding, scale_layout)
    if w.numel() == 0:
        return out
    experts = w.shape[0] if w.ndim == 3 else 1
    tiles_n, tiles_k = ceil_div(rows, GROUP_TILE), ceil_div(features, GROUP_TILE)
    along_k, along_n, scale_k, scale_n = out
    launch(
        quantize_32x32_kernel,
        experts * tiles_n * tiles_k,
        (w, along_k, along_n, scale_k, scale_n),
        (
            rows, features,
            w.stride(0) if w.ndim == 3 else 0, w.stride(-2), w.stride(-1), tiles_n, tiles_k, experts * tiles_n,
        ),
        (rounding, scale_layout == BLOCKED, can_load_words(w), VEC, BAND),
        NUM_WARPS,
    )  # fmt: skip
    return out


register_op(
    "quantize_32x32_both(Tensor w, str rounding, str scale_layout='plain') -> (Tensor, Tensor, Tensor, Tensor)",
    quantize_32x32_both,
    _allocate,
)
