"""MXFP8 with one scale per feature and group of tokens, written transposed. Reference: reference.quantize_aligned.

    requantize_aligned_along_t   from FP8 data along K and its column maxima: exponent shift and transpose
    quantize_aligned_along_t     from x itself, in two reads, or in one where its column maxima are known
    padded_group_ends            where the groups of either lie

x is (T, K), one group or those of group_ends, or (E, N, K), where each expert's N rows are a group. With group_ends
each group starts at a multiple of 128 columns, zeros between them, so that tiles of 128 tokens and the GEMM that reads
them need no group size to be a multiple of anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, GROUP_TILE, round_up
from mxfp8_titan.kernels.e4m3 import (
    e8m0_from_bits,
    inv_scale_from_e8m0,
    magnitude_bits,
    pair_to_fp32,
    scale_from_e8m0,
    to_e4m3,
    to_fp32,
)
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import (
    can_load_words,
    ceil_div,
    check_device,
    check_groups,
    check_same_device,
    check_source,
    launch,
    new_tensor,
    register_op,
)
from mxfp8_titan.kernels.quantize_aligned import OPTIONAL_GROUPS, check_args, groups_of, strides
from mxfp8_titan.kernels.tile import (
    BLOCK,
    BLOCKS_T,
    TILE_T,
    cast_along_t,
    load_words,
    offsets_along_t,
    store_transposed,
    tile_of,
)

TILE_K, VEC, BAND, NUM_WARPS = 128, 4, 8, 4
"""Features per tile, features per thread, tiles along T that are worked on together, warps."""


@triton.jit
def column_amax_kernel(
    x_ptr, amax_ptr, group_ends_ptr, T, T_OUT, K, stride_xe, stride_xt, stride_xk, tiles_t, tiles_k, num_groups,
    GROUPS: tl.constexpr, TILE_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program takes the column maxima of one tile of a group, 128 tokens x TILE_K features, to memory."""
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    group, expert, first, read_end, _, _, _ = place_tile(
        pid // tiles_k, tiles_t, T, T_OUT, group_ends_ptr, num_groups, TILE_T, GROUPS, True
    )
    if first < read_end:
        t, k = offsets_along_t(tile_k, TILE_K, VEC)
        x_tile = x_ptr + expert.to(tl.int64) * stride_xe + first.to(tl.int64) * stride_xt
        x_ptrs = x_tile + t.to(tl.int64) * stride_xt + k.to(tl.int64) * stride_xk
        bits = magnitude_bits(to_fp32(tl.load(x_ptrs, mask=(t < read_end - first) & (k < K), other=0.0)))
        bits = tl.reshape(tl.max(tl.max(bits, 2), 1), [TILE_K])
        k = tile_k * TILE_K + tl.arange(0, TILE_K)
        bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32))
        tl.atomic_max(bits_ptr + group.to(tl.int64) * K + k, bits, mask=k < K, sem="relaxed")


@triton.jit
def aligned_along_t_kernel(
    x_ptr, row_scale_ptr, amax_ptr, data_ptr, scale_ptr, group_ends_ptr,
    T, T_OUT, K, stride_xe, stride_xt, stride_xk, columns, first_column, tiles_t, tiles_k, tiles, num_groups,
    all_groups,
    ROUNDING: tl.constexpr, FROM_FP8: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    TILE_K: tl.constexpr, VEC: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program scales and transposes one tile of 128 tokens x TILE_K features, in the order of tile.tile_of.

    T_OUT of the `columns` of a row of data are written, from first_column on; WHOLE: all three are multiples of 32.
    FROM_FP8: x is E4M3 with one scale per row.  WORDS: see launch.can_load_words.
    After the `tiles` programs of the data come those that write scales, TILE_K of one group each. Tokens of other
    groups, and features past K, are masked here.
    """
    pid = tl.program_id(0)
    if pid >= tiles:
        group = ((pid - tiles) // tiles_k).to(tl.int64)
        _store_scales(amax_ptr, scale_ptr, group, (pid - tiles) % tiles_k, K, ROUNDING, TILE_K)
    else:
        tile, tile_k = tile_of(pid, tiles // tiles_k, tiles_k, BAND)
        _encode_tile(
            x_ptr, row_scale_ptr, amax_ptr, data_ptr + first_column, group_ends_ptr,
            T, T_OUT, K, stride_xe, stride_xt, stride_xk, columns, tiles_t, tile, tile_k, num_groups,
            all_groups, ROUNDING, FROM_FP8, WORDS, WHOLE, GROUPS, TILE_K, VEC,
        )  # fmt: skip


@triton.jit
def _store_scales(amax_ptr, scale_ptr, group, tile_k, K, ROUNDING: tl.constexpr, TILE_K: tl.constexpr):
    """Writes the scales of TILE_K features of one group."""
    k = tile_k * TILE_K + tl.arange(0, TILE_K)
    amax = magnitude_bits(tl.load(amax_ptr + group * K + k, mask=k < K, other=0.0))
    byte = e8m0_from_bits(amax, ROUNDING)
    tl.store(scale_ptr + group * K + k, scale_from_e8m0(byte), mask=k < K)


@triton.jit
def _encode_tile(
    x_ptr, row_scale_ptr, amax_ptr, data_ptr, group_ends_ptr,
    T, T_OUT, K, stride_xe, stride_xt, stride_xk, columns, tiles_t, tile, tile_k, num_groups, all_groups,
    ROUNDING: tl.constexpr, FROM_FP8: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    TILE_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Scales and transposes tile number `tile` along the tokens, `tile_k` along the features."""
    group, expert, first, read_end, _, _, _ = place_tile(
        tile, tiles_t, T, T_OUT, group_ends_ptr, num_groups, TILE_T, GROUPS, True
    )
    column = tile * TILE_T if GROUPS > 0 else first
    t, k = offsets_along_t(tile_k, TILE_K, VEC)
    readable = t < read_end - first
    x_tile = x_ptr + expert.to(tl.int64) * stride_xe + first.to(tl.int64) * stride_xt
    if WORDS:
        words = load_words(x_tile, stride_xt, read_end - first, tile_k, K, TILE_K, VEC)
        x = tl.reshape(pair_to_fp32(words), [TILE_K // VEC, BLOCKS_T, BLOCK, VEC])
    else:
        x_ptrs = x_tile + t.to(tl.int64) * stride_xt + k.to(tl.int64) * stride_xk
        x = to_fp32(tl.load(x_ptrs, mask=readable & (k < K), other=0.0))
    if FROM_FP8:
        x *= tl.load(row_scale_ptr + expert.to(tl.int64) * T + first + t, mask=readable, other=0.0)
    # Past the last group there is no amax: the tile is zero, whatever it is multiplied by.
    amax = tl.load(amax_ptr + group.to(tl.int64) * K + k, mask=(k < K) & (group < all_groups), other=0.0)
    x *= inv_scale_from_e8m0(e8m0_from_bits(magnitude_bits(amax), ROUNDING))
    # From FP8, elements arrive in an order that makes the cast by features the longer one.
    y = to_e4m3(x) if FROM_FP8 else cast_along_t(x)
    if WHOLE:
        store_transposed(y, data_ptr, expert.to(tl.int64) * K, column, T_OUT, tile_k, K, columns, TILE_K)
    else:
        data_ptrs = data_ptr + column + t + (expert.to(tl.int64) * K + k) * columns
        tl.store(data_ptrs, y, mask=(t < T_OUT - column) & (k < K))


@triton.jit
def padded_group_ends_kernel(group_ends_ptr, out_ptr, num_groups, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """The one program sums up the groups' whole tiles."""
    number = tl.arange(0, GROUPS)
    exists = number < num_groups
    ends = tl.load(group_ends_ptr + number, mask=exists, other=0)
    starts = tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0)
    tl.store(out_ptr + number, tl.cumsum((ends - starts + TILE - 1) // TILE, 0) * TILE, mask=exists)


def _columns(x: Tensor, num_groups: int) -> int:
    """Columns of data: enough for any sizes of the groups, none of which is known here."""
    return round_up(x.shape[-2], BLOCK_SIZE) + GROUP_TILE * num_groups


def _allocate(x: Tensor, group_ends: Tensor | None) -> tuple[Tensor, Tensor]:
    columns = _columns(x, 0 if group_ends is None else group_ends.shape[0])
    shape = (*x.shape[:-2], x.shape[-1], columns)
    scale = new_tensor(x, (groups_of(x, group_ends), x.shape[-1]), torch.float32)
    return new_tensor(x, shape, torch.float8_e4m3fn), scale


def _grid(x: Tensor, num_groups: int) -> tuple[int, int, int, int]:
    """(tiles along T of one expert, tiles along K, tiles in all, columns of data)."""
    columns = _columns(x, num_groups)
    tiles_t = ceil_div(columns, GROUP_TILE)
    tiles_k = ceil_div(x.shape[-1], TILE_K)
    return tiles_t, tiles_k, (x.shape[0] if x.ndim == 3 else 1) * tiles_t * tiles_k, columns


def column_amax(x: Tensor, group_ends: Tensor | None = None) -> Tensor:
    """(G, K) fp32: each group's largest magnitude of each feature, NaN kept; 0 in an empty group.

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; rows past the last group end are not read
    """
    check_source(x, "x", (2, 3))
    return _column_amax(x, group_ends, check_groups(group_ends, x, x.shape[-2]))


def _column_amax(x: Tensor, group_ends: Tensor | None, groups: tuple[int, int]) -> Tensor:
    amax = x.new_zeros((groups_of(x, group_ends), x.shape[-1]), dtype=torch.float32)
    tiles_t, tiles_k, tiles, columns = _grid(x, groups[0])
    if x.numel():
        launch(
            column_amax_kernel,
            tiles,
            (x, amax, group_ends),
            (
                x.shape[-2], columns, x.shape[-1], *strides(x), tiles_t, tiles_k, groups[0],
            ),
            (groups[1], TILE_K, VEC),
            NUM_WARPS,
        )  # fmt: skip
    return amax


def launch_along_t(
    x: Tensor, row_scale: Tensor | None, amax: Tensor, data: Tensor, scale: Tensor, rounding: str,
    group_ends: Tensor | None, groups: tuple[int, int], tiles_t: int, tiles_k: int, rows_out: int,
    first_column: int = 0, with_scales: bool = True,
) -> None:  # fmt: skip
    """Quantizes x (T, K) or (E, N, K) into rows_out columns of data from first_column on, and amax into scale.

    groups: as launch.check_groups returns them
    tiles_t: of one expert
    """
    experts = x.shape[0] if x.ndim == 3 else 1
    tiles, columns = experts * tiles_t * tiles_k, data.shape[-1]
    grid = tiles + amax.shape[0] * tiles_k * with_scales
    if grid:
        launch(
            aligned_along_t_kernel,
            grid,
            (x, row_scale, amax, data, scale, group_ends),
            (
                x.shape[-2], rows_out, x.shape[-1], *strides(x), columns, first_column,
                tiles_t, tiles_k, tiles, groups[0], amax.shape[0],
            ),
            (
                rounding, row_scale is not None, can_load_words(x),
                (rows_out | columns | first_column) % BLOCK_SIZE == 0, groups[1], TILE_K, VEC, BAND,
            ),
            NUM_WARPS,
        )  # fmt: skip


def _check_amax(amax: Tensor, x: Tensor, name: str, group_ends: Tensor | None) -> None:
    """Raises: TypeError or ValueError unless amax is one fp32 number per feature and group, where x (`name`) is."""
    if amax.dtype != torch.float32:
        raise TypeError(f"amax is {amax.dtype}, needs float32")
    check_same_device(amax, "amax", x, name)
    expected = (groups_of(x, group_ends), x.shape[-1])
    if amax.shape != expected:
        raise ValueError(f"amax is {tuple(amax.shape)}, {name} {tuple(x.shape)} needs {expected}")


def _quantize_along_t(
    x: Tensor, row_scale: Tensor | None, amax: Tensor, rounding: str, group_ends: Tensor | None,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    data, scale = _allocate(x, group_ends)
    tiles_t, tiles_k, _, columns = _grid(x, groups[0])
    launch_along_t(x, row_scale, amax, data, scale, rounding, group_ends, groups, tiles_t, tiles_k, columns)
    return data, scale


def quantize_aligned_along_t(
    x: Tensor, rounding: str, group_ends: Tensor | None = None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x in MXFP8, written transposed, one scale per feature and group: (data, scale). Reads x twice without amax.

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; rows past the last group end are not read
    group_ends: (G,) int32, any sizes, or None for one group (per expert)
    amax: (G, K) fp32, `column_amax` of x, or None
    returns data (K, T') or (E, K, N') float8_e4m3fn contiguous, zero where no token is (or NaN where the group's scale
            is): T' = T rounded up to 32; with group_ends 128 G more, group g starting at column
            128 * sum over earlier groups of ceil(size / 128);
            scale (G, K) fp32
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(x, "x", (2, 3))
    groups = check_args(x, rounding, group_ends)
    if amax is None:
        amax = _column_amax(x, group_ends, groups)
    else:
        _check_amax(amax, x, "x", group_ends)
    return _quantize_along_t(x, None, amax.contiguous(), rounding, group_ends, groups)


def requantize_aligned_along_t(
    data: Tensor, scale: Tensor, amax: Tensor, rounding: str, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What `quantize_aligned_along_t` returns, from the results of `quantize_aligned_along_k_with_amax`.

    data: (T, K) or (E, N, K) float8_e4m3fn; scale: (T,) or (E, N) fp32 contiguous; amax: (G, K) fp32 contiguous
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    if data.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise TypeError(f"data and scale are {data.dtype} and {scale.dtype}, need float8_e4m3fn and float32")
    check_device(data, "data")
    check_same_device(scale, "scale", data, "data")
    if data.ndim not in (2, 3):
        raise ValueError(f"data is {tuple(data.shape)}, needs 2 or 3 dims")
    groups = check_args(data, rounding, group_ends)
    if scale.shape != data.shape[:-1]:
        raise ValueError(f"scale is {tuple(scale.shape)}, data {tuple(data.shape)} needs {tuple(data.shape[:-1])}")
    _check_amax(amax, data, "data", group_ends)
    return _quantize_along_t(data, scale.contiguous(), amax.contiguous(), rounding, group_ends, groups)


def padded_group_ends(group_ends: Tensor) -> Tensor:
    """(G,) int32: each group's end column in the data of `quantize_aligned_along_t`, its padding counted in.

    group_ends: (G,) int32
    Raises: TypeError for another dtype, ValueError for another shape or a device without kernels.
    """
    check_device(group_ends, "group_ends")
    num_groups, groups = check_groups(group_ends, group_ends, 2**31 - 1)
    out = new_tensor(group_ends, (num_groups,), torch.int32)
    launch(padded_group_ends_kernel, 1, (group_ends, out), (num_groups,), (GROUP_TILE, groups), NUM_WARPS)
    return out


register_op(
    f"quantize_aligned_along_t(Tensor x, {OPTIONAL_GROUPS}, Tensor? amax=None) -> (Tensor, Tensor)",
    quantize_aligned_along_t,
    lambda x, rounding, group_ends=None, amax=None: _allocate(x, group_ends),
)
register_op(
    f"requantize_aligned_along_t(Tensor data, Tensor scale, Tensor amax, {OPTIONAL_GROUPS}) -> (Tensor, Tensor)",
    requantize_aligned_along_t,
    lambda data, scale, amax, rounding, group_ends=None: _allocate(data, group_ends),
)
register_op(
    "padded_group_ends(Tensor group_ends) -> Tensor",
    padded_group_ends,
    lambda group_ends: new_tensor(group_ends, group_ends.shape, torch.int32),
)
