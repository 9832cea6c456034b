"""GEMMs of MXFP8 operands by block-scaled tensor cores. Reference: mxfp8_titan.reference.dot_scaled_gemm.

    gemm_of_rows    rows of each group times that expert's matrix: y and dx
    gemm_over_t     one product per group, contracted over its tokens: dw

The kernels, and why they have this form, are in kernels.dot_scaled_gemm_kernel.
"""

from contextlib import nullcontext

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxfp8_titan.format import (
    BLOCK_SIZE,
    GROUP_TILE,
    SCALE_TILE_BYTES,
    SCALE_TILE_ROWS,
    blocked_shape,
    blocked_shape_k_groups,
    blocked_shape_t_groups,
)
from mxfp8_titan.kernels.dot_scaled_gemm_kernel import gemm_of_rows_kernel, gemm_over_t_kernel
from mxfp8_titan.kernels.launch import ceil_div, check_groups, check_same_device, check_source, multiprocessors

TILE_N = 256
"""Columns of an output tile of `gemm_of_rows`. Those of `gemm_over_t` have 128: the next tile of scales along N lies
at a distance that depends on the group, which a copy of several tiles at once cannot express."""

NUM_WARPS, STAGES = {"rows": 8, "over_t": 4}, {"rows": 4, "over_t": 3}
"""`over_t` leaves room for two programs on a multiprocessor: one stores its tile while the other multiplies."""

PROGRAMS_PER_MULTIPROCESSOR = {"rows": 1, "over_t": 2}


def _data_boxes(data: Tensor, rows: int) -> TensorDescriptor:
    """data (..., R, C) as a matrix of all its rows, moved in boxes of `rows` x 128."""
    return TensorDescriptor(
        data, [data.numel() // data.shape[-1], data.shape[-1]], [data.shape[-1], 1], [rows, GROUP_TILE]
    )


def _scale_boxes(scale: Tensor, cols: int, rows: int) -> TensorDescriptor:
    """Blocked scales as a matrix of 512-byte tiles, `cols` in a row, moved in boxes of `rows` tiles below each other.

    A box is at most 256 elements wide, so that a tile is 2 x 256.
    """
    half = SCALE_TILE_BYTES // 2
    tile_rows = scale.numel() // (SCALE_TILE_BYTES * cols)
    strides = [SCALE_TILE_BYTES * cols, SCALE_TILE_BYTES, half, 1]
    return TensorDescriptor(scale.view(torch.uint8), [tile_rows, cols, 2, half], strides, [rows, 1, 2, half])


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
    steps = ceil_div(depth, GROUP_TILE)
    rows_n = TILE_N // SCALE_TILE_ROWS
    boxes = [
        box
        for left, left_scale, right, right_scale in pairs
        for box in (
            _data_boxes(left, GROUP_TILE), _scale_boxes(left_scale, steps, 1),
            _data_boxes(right, TILE_N), _scale_boxes(right_scale, steps, rows_n),
        )
    ]  # fmt: skip
    tiles_t = ceil_div(tokens + GROUP_TILE * num_groups, GROUP_TILE)
    tiles_n = ceil_div(out.shape[1], TILE_N)
    grid = min(tiles_t * tiles_n, multiprocessors(a.get_device()) * PROGRAMS_PER_MULTIPROCESSOR["rows"])
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
    tiles_n, tiles_k = (ceil_div(size, GROUP_TILE) for size in (rows, b.shape[0]))
    experts = num_groups or 1
    boxes = (
        _data_boxes(a, GROUP_TILE), _scale_boxes(a_scale, 1, 1), _data_boxes(b, GROUP_TILE), _scale_boxes(b_scale, 1, 1)
    )  # fmt: skip
    grid = min(experts * tiles_n * tiles_k, multiprocessors(a.get_device()) * PROGRAMS_PER_MULTIPROCESSOR["over_t"])
    _launch(
        gemm_over_t_kernel, grid, NUM_WARPS["over_t"], *boxes,
        out, group_ends, tokens, rows, b.shape[0], experts, tiles_n, tiles_k, num_groups, groups, STAGES["over_t"],
    )  # fmt: skip
