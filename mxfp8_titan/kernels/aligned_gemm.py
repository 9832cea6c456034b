"""FP8 GEMMs of operands with one scale per row, for Hopper. Reference: mxfp8_titan.reference.aligned_gemm.

    aligned_gemm          rows of each group times that expert's matrix: y and dx
    aligned_gemm_over_t   one product per group, contracted over its tokens: dw

The kernel, and why it has this form, is in kernels.aligned_gemm_kernel. Nothing here waits for the device.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from mxfp8_titan.format import BLOCK_SIZE, GROUP_TILE
from mxfp8_titan.kernels.aligned_gemm_kernel import aligned_gemm_kernel
from mxfp8_titan.kernels.launch import ceil_div, check_groups, multiprocessors, register_op
from mxfp8_titan.kernels.tensor_map import Boxes, launch_with_boxes

TILE_M, TILE_N = 128, 256
"""Rows and columns of an output tile."""

STAGES = {torch.bfloat16: 4, torch.float32: 3}
"""Operand tiles of 48 KiB on their way at once. Beside them, 227 KiB hold 64 x 128 outputs of two groups of warps."""

BAND = 16
"""Tiles along M that are worked on together, for reuse in the L2 cache."""

BOX_BYTES = 128
"""Width of the boxes of 32 rows that are written, and of the swizzle in shared memory."""

REGISTERS = 240
"""Registers of a thread that multiplies: 128 for sums, 64 for a partial sum, 48 for the rest."""

NUM_WARPS = 4

OPERAND_LAYOUT = NVMMASharedLayout(BOX_BYTES, 8, 2)
OUT_LAYOUTS = {torch.bfloat16: NVMMASharedLayout(BOX_BYTES, 16, 2), torch.float32: NVMMASharedLayout(BOX_BYTES, 32, 2)}


def _check_operands(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, scale_shapes: tuple[tuple, tuple], out_dtype: torch.dtype
) -> None:
    if out_dtype not in STAGES:
        raise TypeError(f"out_dtype is {out_dtype}, needs torch.bfloat16 or torch.float32")
    for name, data, scale, shape in (("a", a, a_scale, scale_shapes[0]), ("b", b, b_scale, scale_shapes[1])):
        if (
            data.dtype is torch.float8_e4m3fn
            and scale.dtype is torch.float32
            and scale.shape == shape
            and data.is_contiguous()
            and scale.is_contiguous()
            and data.get_device() == scale.get_device() == a.get_device()
            and data.data_ptr() % 16 == 0
        ):
            continue
        if data.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
            raise TypeError(
                f"{name}, {name}_scale are {data.dtype}, {scale.dtype}, need torch.float8_e4m3fn, torch.float32"
            )
        if scale.shape != shape:
            raise ValueError(f"{name}_scale is {tuple(scale.shape)}, needs {shape} for {name} {tuple(data.shape)}")
        if data.device != a.device or scale.device != a.device:
            raise ValueError(f"{name}, {name}_scale are on {data.device}, {scale.device}, need {a.device}, where a is")
        raise ValueError(
            f"{name}, {name}_scale have strides {data.stride()}, {scale.stride()}, need contiguous tensors, "
            f"{name} 16-byte aligned: call .contiguous()"
        )


def _check_multiple(size: int, name: str) -> None:
    if size == 0 or size % BLOCK_SIZE:
        raise ValueError(f"{name} is {size}, needs a multiple of {BLOCK_SIZE}, above 0")


def _check_device(a: Tensor) -> None:
    if not a.is_cuda:
        raise ValueError(
            f"a is on {a.device}, needs a CUDA device: this is a Gluon kernel for Hopper, which the interpreter cannot "
            "run either. Elsewhere use mxfp8_titan.reference.aligned_gemm"
        )


def _launch(
    over_t: bool, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, group_ends: Tensor | None,
    most_tiles: int, sizes: tuple[int, ...],
) -> None:  # fmt: skip
    """a, b: (..., contracted dim). out: (..., columns). Their other dims are one for the copy engine.

    sizes: the fields of kernels.aligned_gemm_kernel.Sizes
    """
    depth, cols = a.shape[-1], out.shape[-1]
    box_n = BOX_BYTES // out.element_size()
    launch_with_boxes(
        aligned_gemm_kernel,
        min(multiprocessors(a.get_device()), most_tiles),
        (
            Boxes(a, (a.numel() // depth, depth), (depth, 1), (TILE_M, GROUP_TILE), OPERAND_LAYOUT),
            Boxes(b, (b.numel() // depth, depth), (depth, 1), (TILE_N, GROUP_TILE), OPERAND_LAYOUT),
            Boxes(out, (out.numel() // cols, cols), (cols, 1), (BLOCK_SIZE, box_n), OUT_LAYOUTS[out.dtype]),
        ),
        (a_scale, b_scale, group_ends, out),
        sizes,
        (over_t, TILE_M, TILE_N, STAGES[out.dtype], BAND, REGISTERS),
        NUM_WARPS,
    )  # fmt: skip


def aligned_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """Rows of each group times that expert's matrix: out[rows of e] = (a * a_scale) @ (b[e] * b_scale[e])^T.

    Accumulated in fp32 every 128 elements of K, rounded once.

    a: (T, K) float8_e4m3fn contiguous; a_scale: (T,) fp32
    b: (E, N, K) float8_e4m3fn contiguous; b_scale: (E, N) fp32. Without group_ends (N, K) and (N,)
    group_ends: (E,) int32, any sizes. Rows past the last end may hold anything.
    returns (T, N) bf16 or fp32, zeros past the last group end
    Raises: ValueError or TypeError for what the arguments above don't allow, and unless K and N are multiples of 32.
    """
    dims = 2 if group_ends is None else 3
    if a.ndim != 2 or b.ndim != dims or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"a, b are {tuple(a.shape)}, {tuple(b.shape)}, need (T, K) and "
            + ("(N, K) without group_ends" if dims == 2 else "(E, N, K) with group_ends")
        )
    _check_operands(a, a_scale, b, b_scale, (a.shape[:1], b.shape[:-1]), out_dtype)
    (tokens, depth), cols = a.shape, b.shape[-2]
    _check_multiple(depth, "K")
    _check_multiple(cols, "N")
    num_groups, _ = check_groups(group_ends, a, tokens)
    if num_groups and num_groups != b.shape[0]:
        raise ValueError(f"group_ends has {num_groups} entries, needs one for each of {b.shape[0]} experts")
    _check_device(a)
    out = a.new_empty((tokens, cols), dtype=out_dtype)
    if tokens:
        tiles = (ceil_div(tokens, TILE_M) + num_groups) * ceil_div(cols, TILE_N)
        sizes = (tokens, tokens, cols, depth, 0, 0, num_groups, num_groups)
        _launch(False, a, a_scale, b, b_scale, out, group_ends, tiles, sizes)
    return out


def aligned_gemm_over_t(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None = None, parts: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:  # fmt: skip
    """One product per group, contracted over its tokens: out[e] = (a * a_scale[e]) @ (b * b_scale[e])^T there.

    Accumulated in fp32 every 128 tokens, rounded once. Tokens are columns, padded: a group starts at the next
    multiple of 128 after the one before it, the columns between hold zeros, and those after the last group anything.

    a: (N, T') float8_e4m3fn contiguous; a_scale: (E, N) fp32.  b: (K, T'); b_scale: (E, K)
    group_ends: (E,) int32, ends in tokens, without that padding. None for one group: all T' columns, scales (N,) or
            (1, N), (K,) or (1, K)
    returns `parts` tensors (E, N / parts, K) bf16 or fp32, contiguous, rows of N in order, zeros for an empty group;
            two dims without group_ends
    Raises: ValueError or TypeError for what the arguments above don't allow, and unless N / parts, K and T' are
            multiples of 32.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a, b are {tuple(a.shape)}, {tuple(b.shape)}, need (N, T') and (K, T')")
    (rows, tokens), cols = a.shape, b.shape[0]
    num_groups, _ = check_groups(group_ends, a, tokens)
    experts = num_groups or 1
    if group_ends is None:
        a_scale, b_scale = a_scale.reshape(1, -1), b_scale.reshape(1, -1)
    _check_operands(a, a_scale, b, b_scale, ((experts, rows), (experts, cols)), out_dtype)
    if parts < 1 or rows % parts:
        raise ValueError(f"parts is {parts}, needs a divisor of N, which is {rows}")
    rows //= parts
    _check_multiple(rows, "N / parts")
    _check_multiple(cols, "K")
    if tokens % BLOCK_SIZE:
        raise ValueError(f"T' is {tokens}, needs a multiple of {BLOCK_SIZE}: fill it up with zeros")
    _check_device(a)
    out = _allocate_over_t(a, b, group_ends, parts, out_dtype)
    if tokens == 0:
        return [part.zero_() for part in out]
    tiles = experts * ceil_div(rows, TILE_M) * ceil_div(cols, TILE_N)
    for i, part in enumerate(out):
        sizes = (tokens, rows, cols, 0, i * rows, a.shape[0], num_groups, experts - 1)
        _launch(True, a, a_scale, b, b_scale, part, group_ends, tiles, sizes)
    return out


def _allocate_over_t(
    a: Tensor, b: Tensor, group_ends: Tensor | None, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    shape = (a.shape[0] // parts, b.shape[0])
    if group_ends is not None:
        shape = (group_ends.shape[0], *shape)
    return [a.new_empty(shape, dtype=out_dtype) for _ in range(parts)]


OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? group_ends=None"
register_op(
    f"aligned_gemm({OPERANDS}, ScalarType out_dtype=bfloat16) -> Tensor",
    aligned_gemm,
    lambda a, a_scale, b, b_scale, group_ends=None, out_dtype=torch.bfloat16: a.new_empty(
        (a.shape[0], b.shape[-2]), dtype=out_dtype
    ),
)
register_op(
    f"aligned_gemm_over_t({OPERANDS}, int parts=1, ScalarType out_dtype=bfloat16) -> Tensor[]",
    aligned_gemm_over_t,
    lambda a, a_scale, b, b_scale, group_ends=None, parts=1, out_dtype=torch.bfloat16: _allocate_over_t(
        a, b, group_ends, parts, out_dtype
    ),
)
