"""MXFP8 quantization along K, along T, or along both from one read. Reference: mxfp8_titan.reference.quantize.

The same kernel serves activations (T, K) and expert weights (E, N, K), whose rows N take the place of T. Scales come
out plain or in the blocked layout of their case:

    x (T, K)                 one matrix
    x (T, K), group_ends     along K: the groups split the rows of the scales; along T: their columns
    w (E, N, K)              one matrix per expert
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    BLOCKED,
    GROUP_TILE,
    PLAIN,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
    round_up,
)
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import (
    can_load_words,
    ceil_div,
    check_blocks,
    check_choices,
    check_groups,
    check_source,
    launch,
    new_tensor,
    register_op,
)
from mxfp8_titan.kernels.tile import (
    TILE_T,
    load_along_k,
    load_along_t,
    load_words,
    store_along_k,
    store_along_t,
    store_words_along_k,
    tile_of,
    unpack_along_t,
)


@dataclass(frozen=True)
class Config:
    """How the work is cut up. Fixed per direction: nothing here depends on how many tokens there are."""

    tile_k: int = 128
    """Features per tile."""
    vec: int = 4
    """Features per thread, along T."""
    band: int = 4
    """Tiles along T that are worked on together, so that their pieces of a transposed row lie side by side."""
    hold: bool = False
    """Whether both directions work from the words of one load, or the second loads again, from the caches."""
    num_warps: int = 4
    maxnreg: int | None = None


CONFIG_ALONG_K = Config(band=1, num_warps=8)
CONFIG_ALONG_T = Config()
CONFIG_BOTH = {PLAIN: Config(maxnreg=128), BLOCKED: Config(hold=True, maxnreg=168)}
"""By scale layout; registers for 4 and for 3 programs at once on a multiprocessor. See docs/benchmarks/notes.md."""


@triton.jit
def quantize_kernel(
    x_ptr, along_k_ptr, scale_k_ptr, along_t_ptr, scale_t_ptr, group_ends_ptr,
    T, T_OUT, K, stride_xe, stride_xt, stride_xk, tiles_t, tiles_k, all_tiles_t, num_groups,
    scale_k_bytes, scale_t_bytes,
    ROUNDING: tl.constexpr, ALONG_K: tl.constexpr, ALONG_T: tl.constexpr, BLOCKED: tl.constexpr, GROUPS: tl.constexpr,
    WORDS: tl.constexpr, TILE_K: tl.constexpr, VEC: tl.constexpr, BAND: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """One program quantizes one tile of 128 tokens x TILE_K features; the grid is their number, see tile.tile_of.

    With both directions, HOLD keeps bf16 words in registers for the second; otherwise the tile is loaded again, a
    third of it from the L1 cache and the rest from L2, in the shape of that direction.
    Tokens outside the tile's group, and features past K, are masked here.
    """
    tile, tile_k = tile_of(tl.program_id(0), all_tiles_t, tiles_k, BAND)
    _, expert, first, read_end, write_end, base, tiles = place_tile(
        tile, tiles_t, T, T_OUT, group_ends_ptr, num_groups, TILE_T, GROUPS, BLOCKED
    )
    x_tile = x_ptr + expert.to(tl.int64) * stride_xe + first.to(tl.int64) * stride_xt
    rows = read_end - first
    rows_out = tl.minimum(write_end, T) - first
    row0 = expert.to(tl.int64) * T + first
    SHARED: tl.constexpr = HOLD and ALONG_K and ALONG_T and WORDS
    if ALONG_T:
        if SHARED:
            words = load_words(x_tile, stride_xt, rows, tile_k, K, TILE_K, VEC)
            x, amax = unpack_along_t(words, VEC)
        else:
            x, amax = load_along_t(x_tile, stride_xt, stride_xk, rows, tile_k, K, TILE_K, VEC, WORDS)
        store_along_t(
            x, amax, along_t_ptr, scale_t_ptr, scale_t_bytes, expert.to(tl.int64) * K, first, write_end,
            tile, base, tiles, tile_k, K, T_OUT, ROUNDING, BLOCKED, GROUPS, TILE_K,
        )  # fmt: skip
    if SHARED:
        store_words_along_k(
            words, along_k_ptr, scale_k_ptr, scale_k_bytes, row0, rows_out, tile, tile_k, K,
            ROUNDING, BLOCKED, GROUPS, TILE_K, VEC,
        )  # fmt: skip
    elif ALONG_K:
        x = load_along_k(x_tile, stride_xt, stride_xk, rows, tile_k, K, TILE_K)
        store_along_k(
            x, along_k_ptr, scale_k_ptr, scale_k_bytes, row0, rows_out, tile, tile_k, K,
            ROUNDING, BLOCKED, GROUPS, TILE_K,
        )  # fmt: skip


def allocate_along_k(x: Tensor, scale_layout: str, groups: int) -> tuple[Tensor, Tensor]:
    """Empty data, of x's shape, and scales."""
    *experts, rows, features = x.shape
    cols = features // BLOCK_SIZE
    data = new_tensor(x, x.shape, torch.float8_e4m3fn)
    return data, new_tensor(x, _scale_shape(experts, rows, cols, scale_layout, groups, False), torch.float8_e8m0fnu)


def allocate_along_t(x: Tensor, scale_layout: str, groups: int) -> tuple[Tensor, Tensor]:
    """Empty data (..., features, tokens rounded up to 32) and scales."""
    *experts, rows, features = x.shape
    rows = round_up(rows, BLOCK_SIZE)
    data = new_tensor(x, (*experts, features, rows), torch.float8_e4m3fn)
    shape = _scale_shape(experts, features, rows // BLOCK_SIZE, scale_layout, groups, True)
    return data, new_tensor(x, shape, torch.float8_e8m0fnu)


def _scale_shape(
    experts: list[int], rows: int, cols: int, scale_layout: str, groups: int, groups_split_columns: bool
) -> tuple[int, ...]:
    if scale_layout == PLAIN:
        return (*experts, rows, cols)
    if experts:
        height, width = blocked_shape(rows, cols)
        return (*experts, height * width)
    if not groups:
        return blocked_shape(rows, cols)
    return (blocked_shape_k_groups if groups_split_columns else blocked_shape_t_groups)(rows, cols, groups)


def _config(along_k: bool, along_t: bool, scale_layout: str) -> Config:
    if along_k and along_t:
        return CONFIG_BOTH[scale_layout]
    return CONFIG_ALONG_K if along_k else CONFIG_ALONG_T


def quantize_into(
    x: Tensor,
    along_k: tuple[Tensor, Tensor] | None,
    along_t: tuple[Tensor, Tensor] | None,
    rounding: str,
    scale_layout: str,
    group_ends: Tensor | None,
    config: Config | None = None,
) -> None:
    """Fills (data, scale) of the directions that are not None.

    Raises: ValueError or TypeError for a wrong device, dtype, shape or choice; see `mxfp8_titan.kernels.launch`.
    """
    check_choices(rounding, scale_layout)
    rows, features = x.shape[-2:]
    experts = x.shape[0] if x.ndim == 3 else 1
    if group_ends is not None and x.ndim == 3:
        raise ValueError("group_ends is for tokens (T, K); w (E, N, K) has one matrix per expert")
    if x.ndim == 3 and along_t is not None:
        check_blocks(rows, "N of w (E, N, K)")
    if along_k is not None:
        check_blocks(features, "K")
    blocked = scale_layout == BLOCKED
    multiple = 1 if along_t is None else BLOCK_SIZE
    num_groups, groups = check_groups(group_ends, x, rows, multiple)
    rows_out = round_up(rows, BLOCK_SIZE)
    if config is None:
        config = _config(along_k is not None, along_t is not None, scale_layout)
    tiles_t = ceil_div(rows_out + GROUP_TILE * num_groups * blocked, GROUP_TILE)
    tiles_k = ceil_div(round_up(features, GROUP_TILE) if blocked else features, config.tile_k)
    grid = experts * tiles_t * tiles_k
    if grid == 0:
        return
    data_k, scale_k = along_k or (x, x)
    data_t, scale_t = along_t or (x, x)
    launch(
        quantize_kernel,
        grid,
        (x, data_k, scale_k, data_t, scale_t, group_ends),
        (
            rows, rows_out, features, x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1),
            tiles_t, tiles_k, experts * tiles_t, num_groups, scale_k.numel(), scale_t.numel(),
        ),
        (
            rounding, along_k is not None, along_t is not None, blocked, groups,
            can_load_words(x), config.tile_k, config.vec, config.band, config.hold,
        ),
        config.num_warps,
        config.maxnreg,
    )  # fmt: skip


def quantize_along_k(
    x: Tensor, rounding: str, scale_layout: str = PLAIN, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x in MXFP8, blocks of 32 along its last dim: (data, scale).

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; K a multiple of 32
    group_ends: (G,) int32, ends of the token groups, or None. Rows past the last end come out zero, unread.
    returns data of x's shape, float8_e4m3fn contiguous; scale float8_e8m0fnu, (..., K / 32), or blocked
            (pad128(T), pad4(K / 32)), (T + 128 G, pad4(K / 32)) with groups, (E, pad128(N) * pad4(K / 32)) for w
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(x, "x", (2, 3))
    out = allocate_along_k(x, scale_layout, 0 if group_ends is None else group_ends.shape[0])
    quantize_into(x, out, None, rounding, scale_layout, group_ends)
    return out


def quantize_along_t(
    x: Tensor, rounding: str, scale_layout: str = PLAIN, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x in MXFP8, blocks of 32 along its rows, written transposed: (data, scale).

    For w this is quantization along N: data (E, K, N), which as (E, N, K) has strides (N * K, 1, N).

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; N a multiple of 32, T any
    group_ends: (G,) int32, ends of the token groups, sizes multiples of 32, or None. Tokens past the last end come
        out zero, unread.
    returns data (K, T') float8_e4m3fn contiguous, T' = T rounded up to 32 with zeros, or (E, K, N);
            scale float8_e8m0fnu, (K, T' / 32) or (E, K, N / 32), or blocked (pad128(K), pad4(T' / 32)),
            (pad128(K), T' / 32 + 4 G) with groups, (E, pad128(K) * pad4(N / 32)) for w
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(x, "x", (2, 3))
    out = allocate_along_t(x, scale_layout, 0 if group_ends is None else group_ends.shape[0])
    quantize_into(x, None, out, rounding, scale_layout, group_ends)
    return out


def quantize_both(
    x: Tensor, rounding: str, scale_layout: str = PLAIN, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_along_k` and `quantize_along_t` of x from one read: (data, scale) of each."""
    check_source(x, "x", (2, 3))
    groups = 0 if group_ends is None else group_ends.shape[0]
    along_k = allocate_along_k(x, scale_layout, groups)
    along_t = allocate_along_t(x, scale_layout, groups)
    quantize_into(x, along_k, along_t, rounding, scale_layout, group_ends)
    return *along_k, *along_t


def _fake(*allocators):
    def fake(x: Tensor, rounding: str, scale_layout: str = PLAIN, group_ends: Tensor | None = None):
        groups = 0 if group_ends is None else group_ends.shape[0]
        return tuple(out for allocate in allocators for out in allocate(x, scale_layout, groups))

    return fake


_ARGS = "(Tensor x, str rounding, str scale_layout='plain', Tensor? group_ends=None)"
register_op("quantize_along_k" + _ARGS + " -> (Tensor, Tensor)", quantize_along_k, _fake(allocate_along_k))
register_op("quantize_along_t" + _ARGS + " -> (Tensor, Tensor)", quantize_along_t, _fake(allocate_along_t))
register_op(
    "quantize_both" + _ARGS + " -> (Tensor, Tensor, Tensor, Tensor)",
    quantize_both,
    _fake(allocate_along_k, allocate_along_t),
)
