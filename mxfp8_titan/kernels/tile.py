"""Device functions for one tile of 128 tokens x TILE_K features: its place, its addresses, its stores.

128 tokens x 128 features are one 512-byte tile of blocked scales, along K and along T alike.

A tile is held in one of two shapes. Along K it is (128, TILE_K), rows of 16-byte pieces, and the maximum of a block
takes two shuffles. Along T it is (TILE_K / VEC, 4, 32, VEC): feature / VEC, block of tokens, token of the block,
feature % VEC. Triton gives the last dim to one thread, spreads lanes and then warps over the dims in this order and
leaves the rest to registers, so with 4 warps and TILE_K / VEC = 32

    a lane owns VEC features,      so that a warp reads VEC * 64 consecutive bytes of bf16;
    a warp owns one token block,   so that the maximum along T never leaves a thread;
    after the cast a thread holds 32 consecutive tokens of a feature, so that the transpose moves 16-byte pieces.

The order of the dims is what makes Triton choose this (seen with 3.6; tests/kernels/test_compile.py would notice).
"""

import triton
import triton.language as tl

from mxfp8_titan.format import BLOCK_SIZE as _BLOCK_SIZE
from mxfp8_titan.format import GROUP_TILE as _GROUP_TILE
from mxfp8_titan.format import SCALE_TILE_BYTES as _SCALE_TILE_BYTES
from mxfp8_titan.format import SCALE_TILE_ROWS as _SCALE_TILE_ROWS
from mxfp8_titan.kernels.e4m3 import (
    e8m0_from_bits,
    inv_scale_from_e8m0,
    magnitude_bits,
    max_in_pairs,
    max_of_pairs,
    pair_to_fp32,
    pair_to_fp32_again,
    to_e4m3,
    to_fp32,
)

BLOCK = tl.constexpr(_BLOCK_SIZE)
TILE_T = tl.constexpr(_GROUP_TILE)
BLOCKS_T = tl.constexpr(_GROUP_TILE // _BLOCK_SIZE)

_SCALE_TILE = tl.constexpr(_SCALE_TILE_BYTES)
_SCALE_ROWS = tl.constexpr(_SCALE_TILE_ROWS)


@triton.jit
def tile_of(pid, tiles_t, tiles_k, BAND: tl.constexpr):
    """(tile along T, tile along K) of program pid: bands of BAND tiles along T, in each of them T fastest.

    Programs that run at the same time then write BAND neighbouring pieces of 128 bytes of a transposed row, and still
    read whole stretches of the rows of x.
    """
    band = pid // (BAND * tiles_k)
    height = tl.minimum(tiles_t - band * BAND, BAND)
    inside = pid - band * (BAND * tiles_k)
    return band * BAND + inside % height, inside // height


@triton.jit
def offsets_along_k(tile_k, TILE_K: tl.constexpr):
    """Tokens (128, 1), counted from the tile's first, and features (1, TILE_K)."""
    return tl.arange(0, TILE_T)[:, None], tile_k * TILE_K + tl.arange(0, TILE_K)[None, :]


@triton.jit
def offsets_along_t(tile_k, TILE_K: tl.constexpr, VEC: tl.constexpr):
    """Tokens (1, 4, 32, 1), counted from the tile's first, and features (TILE_K / VEC, 1, 1, VEC)."""
    t = tl.arange(0, BLOCKS_T)[None, :, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :, None]
    vec = tl.arange(0, TILE_K // VEC)[:, None, None, None]
    return t, tile_k * TILE_K + vec * VEC + tl.arange(0, VEC)[None, None, None, :]


@triton.jit
def load_along_k(x_ptr, stride_t, stride_k, rows, tile_k, K, TILE_K: tl.constexpr):
    """x (128, TILE_K) fp32, zero past `rows` and K."""
    t, k = offsets_along_k(tile_k, TILE_K)
    x_ptrs = x_ptr + t.to(tl.int64) * stride_t + k.to(tl.int64) * stride_k
    return to_fp32(tl.load(x_ptrs, mask=(t < rows) & (k < K), other=0.0))


@triton.jit
def load_along_t(
    x_ptr, stride_t, stride_k, rows, tile_k, K, TILE_K: tl.constexpr, VEC: tl.constexpr, WORDS: tl.constexpr
):
    """x (TILE_K / VEC, 4, 32, VEC) fp32, zero past `rows` and K, and its blocks' maxima as bits (TILE_K / VEC, 4, VEC).

    WORDS: load bf16 in 32-bit words, two neighbours each; see launch.can_load_words
    """
    if WORDS:
        return unpack_along_t(load_words(x_ptr, stride_t, rows, tile_k, K, TILE_K, VEC), VEC)
    else:  # noqa: RET505 - one branch is compiled
        t, k = offsets_along_t(tile_k, TILE_K, VEC)
        x_ptrs = x_ptr + t.to(tl.int64) * stride_t + k.to(tl.int64) * stride_k
        x = to_fp32(tl.load(x_ptrs, mask=(t < rows) & (k < K), other=0.0))
        return x, tl.max(magnitude_bits(x), 2)


@triton.jit
def load_words(x_ptr, stride_t, rows, tile_k, K, TILE_K: tl.constexpr, VEC: tl.constexpr):
    """A bf16 tile as int32 words of two neighbours (TILE_K / VEC, 4, 32, VEC / 2), zero past `rows` and K.

    The sizes, multiples of 16 here, are halved in a way that leaves the compiler knowing as much.
    """
    t, word = offsets_along_t(tile_k, TILE_K // 2, VEC // 2)
    words = x_ptr.to(tl.pointer_type(tl.int32)) + t * (stride_t // 16 * 8) + word
    return tl.load(words, mask=(t < rows) & (word < K // 16 * 8), other=0)


@triton.jit
def unpack_along_t(words, VEC: tl.constexpr):
    """What `load_along_t` returns, from the words of a tile."""
    low, high = max_of_pairs(words, 2)
    x = tl.reshape(pair_to_fp32(words), [words.shape[0], BLOCKS_T, BLOCK, VEC])
    return x, tl.reshape(tl.join(low, high), [words.shape[0], BLOCKS_T, VEC])


@triton.jit
def cast_along_t(y):
    """y (TILE_K / VEC, 4, 32, VEC) as E4M3, the elements of one feature cast together.

    The hardware casts two numbers at once into neighbouring bytes. Split by feature first, those are two tokens of
    one feature, as the transposed row wants them; otherwise bytes would have to be sorted afterwards.
    """
    VEC: tl.constexpr = y.shape[3]
    if VEC == 1:
        return to_e4m3(y)
    else:  # noqa: RET505 - one branch is compiled
        shape: tl.constexpr = [y.shape[0], y.shape[1], y.shape[2], VEC // 2, 2]
        even, odd = tl.split(tl.reshape(y, shape))
        return tl.reshape(tl.join(cast_along_t(even), cast_along_t(odd)), y.shape)


@triton.jit
def store_along_k(
    x, data_ptr, scale_ptr, scale_bytes, row0, rows, tile, tile_k, K,
    ROUNDING: tl.constexpr, BLOCKED: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Quantizes what `load_along_k` returned in blocks along K; stores data and scales of its first `rows` rows.

    row0: int64, number of the tile's first row in data (all rows, K) and in plain scales (all rows, K / 32)
    """
    BLOCKS_K: tl.constexpr = TILE_K // BLOCK
    bits = tl.reshape(magnitude_bits(x), [TILE_T, BLOCKS_K, BLOCK])
    byte = e8m0_from_bits(tl.max(bits, 2), ROUNDING)
    y = tl.reshape(x, [TILE_T, BLOCKS_K, BLOCK]) * inv_scale_from_e8m0(byte)[:, :, None]
    t, k = offsets_along_k(tile_k, TILE_K)
    out = data_ptr + row0 * K + t.to(tl.int64) * K + k
    tl.store(out, tl.reshape(to_e4m3(y), [TILE_T, TILE_K]), mask=(t < rows) & (k < K))
    _store_scales_along_k(
        byte, scale_ptr, scale_bytes, row0, rows, tile, tile_k, K, BLOCKED, GROUPS, TILE_K
    )  # fmt: skip


@triton.jit
def store_words_along_k(
    words, data_ptr, scale_ptr, scale_bytes, row0, rows, tile, tile_k, K,
    ROUNDING: tl.constexpr, BLOCKED: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`store_along_k` of a tile that is held for the other direction, as words (TILE_K / VEC, 4, 32, VEC / 2).

    32 / VEC lanes share a block of each row. They exchange the maxima of two rows at once, packed in a word.
    """
    LANES: tl.constexpr = BLOCK // VEC
    BLOCKS_K: tl.constexpr = TILE_K // BLOCK
    each = max_in_pairs(words, 3)
    each = tl.maximum(each & 0x7FFF, each >> 16)
    even, odd = tl.split(tl.reshape(each, [TILE_K // VEC, BLOCKS_T, BLOCK // 2, 2]))
    low, high = max_of_pairs(tl.reshape(even | (odd << 16), [BLOCKS_K, LANES, BLOCKS_T, BLOCK // 2]), 1)
    byte = e8m0_from_bits(tl.reshape(tl.join(low, high), [BLOCKS_K, BLOCKS_T, BLOCK]), ROUNDING)
    inv_scale = tl.broadcast_to(inv_scale_from_e8m0(byte)[:, None, :, :], [BLOCKS_K, LANES, BLOCKS_T, BLOCK])
    inv_scale = tl.reshape(inv_scale, [TILE_K // VEC, BLOCKS_T, BLOCK])
    x = tl.reshape(pair_to_fp32_again(words), [TILE_K // VEC, BLOCKS_T, BLOCK, VEC])
    t, k = offsets_along_t(tile_k, TILE_K, VEC)
    out = data_ptr + row0 * K + t.to(tl.int64) * K + k
    tl.store(out, to_e4m3(x * inv_scale[:, :, :, None]), mask=(t < rows) & (k < K))
    byte = tl.reshape(tl.permute(byte, (1, 2, 0)), [TILE_T, BLOCKS_K])
    _store_scales_along_k(
        byte, scale_ptr, scale_bytes, row0, rows, tile, tile_k, K, BLOCKED, GROUPS, TILE_K
    )  # fmt: skip


@triton.jit
def _store_scales_along_k(
    byte, scale_ptr, scale_bytes, row0, rows, tile, tile_k, K,
    BLOCKED: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Stores byte (128, TILE_K / 32), plain or blocked."""
    BLOCKS_K: tl.constexpr = TILE_K // BLOCK
    if BLOCKED:
        PARTS: tl.constexpr = _SCALE_ROWS // TILE_K
        region = (tile.to(tl.int64) * tl.cdiv(K, _SCALE_ROWS) + tile_k // PARTS) * _SCALE_TILE
        if PARTS > 1:
            region += tile_k % PARTS * BLOCKS_K
        byte = tl.permute(tl.reshape(byte, [4, 32, BLOCKS_K]), (1, 0, 2))
        store_blocked(scale_ptr, region, byte, scale_bytes, 4, BLOCKS_K, GROUPS > 0)
    else:
        t = tl.arange(0, TILE_T)[:, None]
        cols = K // BLOCK
        col = tile_k * BLOCKS_K + tl.arange(0, BLOCKS_K)[None, :]
        out = scale_ptr + row0 * cols + t.to(tl.int64) * cols + col
        tl.store(out, byte.to(tl.uint8), mask=(t < rows) & (col < cols))


@triton.jit
def store_along_t(
    x, amax, data_ptr, scale_ptr, scale_bytes, feature0, first, write_end, tile, base, tiles, tile_k, K, T_OUT,
    ROUNDING: tl.constexpr, BLOCKED: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Quantizes what `load_along_t` returned in blocks along T; stores data (features, T_OUT) and scales.

    feature0: int64, the features of earlier experts
    """
    byte = e8m0_from_bits(amax, ROUNDING)
    y = cast_along_t(x * inv_scale_from_e8m0(byte)[:, :, None, :])
    store_transposed(y, data_ptr, feature0, first, write_end, tile_k, K, T_OUT, TILE_K)
    byte = tl.permute(byte, (0, 2, 1))
    if BLOCKED:
        PARTS: tl.constexpr = _SCALE_ROWS // TILE_K
        HEIGHT: tl.constexpr = TILE_K // 32
        row_tile = (tile_k // PARTS).to(tl.int64)
        region = (base.to(tl.int64) * tl.cdiv(K, _SCALE_ROWS) + row_tile * tiles + (tile - base)) * _SCALE_TILE
        if PARTS > 1:
            region += tile_k % PARTS * HEIGHT * 4
        byte = tl.permute(tl.reshape(byte, [HEIGHT, 32, BLOCKS_T]), (1, 0, 2))
        store_blocked(scale_ptr, region, byte, scale_bytes, HEIGHT, BLOCKS_T, GROUPS > 0)
    else:
        k = tile_k * TILE_K + tl.arange(0, TILE_K)[:, None]
        block = first // BLOCK + tl.arange(0, BLOCKS_T)[None, :]
        out = scale_ptr + (feature0 + k) * (T_OUT // BLOCK) + block
        byte = tl.reshape(byte, [TILE_K, BLOCKS_T])
        tl.store(out, byte.to(tl.uint8), mask=(k < K) & (block * BLOCK < write_end))


@triton.jit
def store_transposed(y, data_ptr, feature0, first, write_end, tile_k, K, T_OUT, TILE_K: tl.constexpr):
    """Stores the E4M3 tile y (TILE_K / VEC, 4, 32, VEC) as data (features, T_OUT)."""
    y = tl.reshape(tl.permute(y, (0, 3, 1, 2)), [TILE_K, TILE_T])
    # Both are multiples of 32 already; said this way, the compiler knows, and stores 16 bytes at once.
    first = first // BLOCK * BLOCK
    write_end = write_end // BLOCK * BLOCK
    k = tile_k * TILE_K + tl.arange(0, TILE_K)[:, None]
    t = tl.arange(0, TILE_T)[None, :]
    tl.store(data_ptr + first + (feature0 + k) * T_OUT + t, y, mask=(k < K) & (t < write_end - first))


@triton.jit
def store_blocked(ptr, region, byte, limit, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """Stores byte (32, HEIGHT, WIDTH) into a 512-byte tile (32, 4, 4); only a grouped buffer can end inside one."""
    i = tl.arange(0, 32)[:, None, None]
    at = i * 16 + tl.arange(0, HEIGHT)[None, :, None] * 4 + tl.arange(0, WIDTH)[None, None, :]
    if BOUNDED:
        tl.store(ptr + region + at, byte.to(tl.uint8), mask=at < tl.multiple_of(limit - region, 4))
    else:
        tl.store(ptr + region + at, byte.to(tl.uint8))
