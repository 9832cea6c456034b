"""GEMMs of MXFP8 operands by block-scaled tensor cores. Reference: mxfp8_titan.reference.dot_scaled_gemm.

    gemm_of_rows    rows of each group times that expert's matrix: y and dx
    gemm_over_t     one product per group, contracted over its tokens: dw

On sm100 and sm103 `tl.dot_scaled` is one tcgen05.mma with a scale per 32 elements; on older GPUs Triton emulates it in
bf16, so that the same source can be checked there. Operands and scales travel by the copy engine (TMA): scales as
whole 512-byte tiles of the blocked layout, from where the tensor core reads them without a register in between.
A fixed number of programs walks all tiles; groups are found on the device, from group_ends.

Source: Triton's tutorial "Block Scaled Matrix Multiplication", for the shape of scales that its compiler recognizes.
"""

import functools
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    E4M3_NAN_BYTE,
    GROUP_TILE,
    SCALE_TILE_BYTES,
    SCALE_TILE_ROWS,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
)
from mxfp8_titan.kernels.e4m3 import CAST_BY_HAND, scale_from_e8m0
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import ceil_div, check_groups, check_same_device, check_source
from mxfp8_titan.kernels.tile import tile_of

TILE = tl.constexpr(GROUP_TILE)
"""Rows of an output tile, and elements of the contraction per step: four blocks, the width of one tile of scales."""

TILE_N = 256
"""Columns of an output tile of `gemm_of_rows`. Those of `gemm_over_t` have 128: the next tile of scales along N lies
at a distance that depends on the group, which a copy of several tiles at once cannot express."""

BAND = tl.constexpr(8)
"""Tiles along T that are worked on together, for reuse in the L2 cache."""

NUM_WARPS, STAGES = {"rows": 8, "over_t": 4}, {"rows": 4, "over_t": 3}
"""`over_t` leaves room for two programs on a multiprocessor: one stores its tile while the other multiplies."""

PROGRAMS_PER_MULTIPROCESSOR = {"rows": 1, "over_t": 2}

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


def _data_boxes(data: Tensor, rows: int) -> TensorDescriptor:
    """data (..., R, C) as a matrix of all its rows, moved in boxes of `rows` x 128."""
    return TensorDescriptor(
        data, [data.numel() // data.shape[-1], data.shape[-1]], [data.shape[-1], 1], [rows, TILE.value]
    )


def _scale_boxes(scale: Tensor, cols: int, rows: int) -> TensorDescriptor:
    """Blocked scales as a matrix of 512-byte tiles, `cols` in a row, moved in boxes of `rows` tiles below each other.

    A box is at most 256 elements wide, so that a tile is 2 x 256.
    """
    half = SCALE_TILE_BYTES // 2
    tile_rows = scale.numel() // (SCALE_TILE_BYTES * cols)
    strides = [SCALE_TILE_BYTES * cols, SCALE_TILE_BYTES, half, 1]
    return TensorDescriptor(scale.view(torch.uint8), [tile_rows, cols, 2, half], strides, [rows, 1, 2, half])


@functools.cache
def _programs(device: torch.device, name: str) -> int:
    """How many a kernel is launched with; under the interpreter two, so that programs walk."""
    if triton.knobs.runtime.interpret:
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR[name]


def _launch(kernel: triton.JITFunction, grid: int, num_warps: int, a_boxes: TensorDescriptor, *arguments) -> None:
    """Launches by Triton's own path, which builds the tensor maps anew: host time that small products wait for."""
    device = a_boxes.base.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(grid,)](a_boxes, *arguments, num_warps=num_warps)


def _check_operand(data: Tensor, name: str, dims: tuple[int, ...], out: Tensor) -> None:
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} is {data.dtype}, needs float8_e4m3fn")
    if data.ndim not in dims:
        raise ValueError(f"{name} is {tuple(data.shape)}, needs {' or '.join(map(str, dims))} dims")
    check_same_device(data, name, out, "out")
    if not data.is_contiguous() or data.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"{name} is {tuple(data.shape)} with strides {data.stride()}, needs to be contiguous, its last dim a "
            f"multiple of {BLOCK_SIZE}"
        )


def _check_scale(scale: Tensor, name: str, shape: tuple[int, int], out: Tensor) -> None:
    """shape: rows and columns of the blocked layout; experts lie behind each other"""
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"{name} is {scale.dtype}, needs float8_e8m0fnu")
    check_same_device(scale, name, out, "out")
    size = shape[0] * shape[1]
    if scale.numel() != size or not scale.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(scale.shape)} with strides {scale.stride()}, needs {size} contiguous bytes in the "
            "blocked layout"
        )


def gemm_of_rows(pairs: list[tuple[Tensor, Tensor, Tensor, Tensor]], group_ends: Tensor | None, out: Tensor) -> None:
    """out = the sum over pairs of a @ b^T, or for each group a[rows of e] @ b[e]^T with zeros past the last one.

    pairs: one or two of (a, a_scale, b, b_scale), of equal shapes
        a (T, K), b (N, K) or (E, N, K) float8_e4m3fn contiguous, K a multiple of 32
        a_scale, b_scale  blocked, float8_e8m0fnu: a's rows split by the groups, b's one matrix per expert
    group_ends: (E,) int32, groups of any sizes, or None
    out: (T, N) fp32, bf16 or fp16, any stride between rows
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(out, "out", (2,))
    a, _, b, _ = pairs[0]
    for left, _, right, _ in pairs:
        _check_operand(left, "a", (2,), out)
        _check_operand(right, "b", (2, 3), out)
        if left.shape != a.shape or right.shape != b.shape or left.shape[-1] != right.shape[-1]:
            raise ValueError(f"a is {tuple(left.shape)}, b is {tuple(right.shape)}: they need the same last dim")
    tokens, depth = a.shape
    num_groups, groups = check_groups(group_ends, a, tokens)
    if num_groups != (b.shape[0] if b.ndim == 3 else 0):
        raise ValueError(f"b is {tuple(b.shape)}, group_ends has {num_groups} entries: one matrix per group is needed")
    cols = depth // BLOCK_SIZE
    a_shape = blocked_shape_t_groups(tokens, cols, num_groups) if num_groups else blocked_shape(tokens, cols)
    height, width = blocked_shape(b.shape[-2], cols)
    for _, left_scale, _, right_scale in pairs:
        _check_scale(left_scale, "a_scale", a_shape, out)
        _check_scale(right_scale, "b_scale", ((num_groups or 1) * height, width), out)
    if out.shape != (tokens, b.shape[-2]) or out.stride(1) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, needs {(tokens, b.shape[-2])}, rows contiguous"
        )
    if out.numel() == 0:
        return
    if depth == 0:
        out.zero_()
        return
    steps = ceil_div(depth, TILE.value)
    rows_n = TILE_N // SCALE_TILE_ROWS
    boxes = [
        box
        for left, left_scale, right, right_scale in pairs
        for box in (
            _data_boxes(left, TILE.value), _scale_boxes(left_scale, steps, 1),
            _data_boxes(right, TILE_N), _scale_boxes(right_scale, steps, rows_n),
        )
    ]  # fmt: skip
    tiles_t = ceil_div(tokens + GROUP_TILE * num_groups, GROUP_TILE)
    tiles_n = ceil_div(out.shape[1], TILE_N)
    grid = min(tiles_t * tiles_n, _programs(a.device, "rows"))
    _launch(
        gemm_of_rows_kernel, grid, NUM_WARPS["rows"], *boxes, *(boxes if len(pairs) == 1 else ()),
        out, group_ends, tokens, out.shape[1], depth, out.stride(0), tiles_t, tiles_n, num_groups,
        groups, len(pairs), TILE_N, STAGES["rows"],
    )  # fmt: skip


def gemm_over_t(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None, out: Tensor) -> None:
    """out = a @ b^T, or one such product over the columns of each group, zeros for an empty one.

    a: (N, T), b: (K, T) float8_e4m3fn contiguous, T a multiple of 32
    a_scale, b_scale: blocked, float8_e8m0fnu, columns split by the groups
    group_ends: (E,) int32, sizes multiples of 32, or None
    out: (N, K) or (E, N, K) fp32, bf16 or fp16, contiguous
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(out, "out", (2, 3))
    _check_operand(a, "a", (2,), out)
    _check_operand(b, "b", (2,), out)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has {a.shape[1]} tokens, b has {b.shape[1]}: they need the same")
    rows, tokens = a.shape
    num_groups, groups = check_groups(group_ends, a, tokens, BLOCK_SIZE)
    cols = tokens // BLOCK_SIZE
    for data, scale, name in ((a, a_scale, "a_scale"), (b, b_scale, "b_scale")):
        height = data.shape[0]
        blocked = blocked_shape_k_groups(height, cols, num_groups) if num_groups else blocked_shape(height, cols)
        _check_scale(scale, name, blocked, out)
    shape = *((num_groups,) if num_groups else ()), rows, b.shape[0]
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, needs {shape}, contiguous")
    if out.numel() == 0:
        return
    if tokens == 0:
        out.zero_()
        return
    tiles_n, tiles_k = (ceil_div(size, TILE.value) for size in (rows, b.shape[0]))
    experts = num_groups or 1
    boxes = (
        _data_boxes(a, TILE.value), _scale_boxes(a_scale, 1, 1), _data_boxes(b, TILE.value), _scale_boxes(b_scale, 1, 1)
    )  # fmt: skip
    grid = min(experts * tiles_n * tiles_k, _programs(a.device, "over_t"))
    _launch(
        gemm_over_t_kernel, grid, NUM_WARPS["over_t"], *boxes,
        out, group_ends, tokens, rows, b.shape[0], experts, tiles_n, tiles_k, num_groups, groups, STAGES["over_t"],
    )  # fmt: skip
