"""Rows of tokens to the order of experts, and back. Reference: mxfp8_titan.reference.permute.

Gathers only, in both directions: nothing is accumulated in memory, so results do not depend on the order of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.launch import (
    ceil_div,
    check_same_device,
    check_source,
    launch,
    next_power_of_2,
    with_whole_rows,
)

BLOCK, NUM_WARPS = 2048, 4
"""Features per program, or per step of a program that takes a whole row, and warps."""


@triton.jit
def gather_rows_kernel(
    x_ptr, slot_ptr, scale_ptr, out_ptr, K, stride_xt, blocks,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program moves BLOCK features of one row; `blocks` programs a row. Features past K are masked."""
    r = (tl.program_id(0) // blocks).to(tl.int64)
    k = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(slot_ptr + r) // TOP_K
    x = tl.load(x_ptr + token * stride_xt + k, mask=k < K, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * tl.load(scale_ptr + r)).to(x.dtype)
    tl.store(out_ptr + r * K + k, x, mask=k < K)


@triton.jit
def sum_rows_kernel(
    rows_ptr, row_ptr, scale_ptr, base_ptr, out_ptr, K, stride_rt, stride_bt, blocks,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums BLOCK features of one token's rows; `blocks` programs a token. Features past K are masked."""
    t = (tl.program_id(0) // blocks).to(tl.int64)
    k = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        r = tl.load(row_ptr + t * TOP_K + choice)
        x = tl.load(rows_ptr + r * stride_rt + k, mask=k < K, other=0.0).to(tl.float32)
        if SCALED:
            x *= tl.load(scale_ptr + r)
        total += x
    out = total.to(out_ptr.dtype.element_ty)
    if BASED:
        base = tl.load(base_ptr + t * stride_bt + k, mask=k < K, other=0.0)
        out = (base.to(tl.float32) + out.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * K + k, out, mask=k < K)


@triton.jit
def gather_rows_backward_kernel(
    drows_ptr, x_ptr, row_ptr, scale_ptr, dx_ptr, dscale_ptr, K, stride_rt, stride_xt,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes one token: its dx and the dscale of its rows. CHOICES is TOP_K rounded up to a power of two.

    Features past K are masked.
    """
    t = tl.program_id(0).to(tl.int64)
    dots = tl.zeros([CHOICES, BLOCK], tl.float32)
    choice = tl.arange(0, CHOICES)
    r = tl.load(row_ptr + t * TOP_K + choice, mask=choice < TOP_K, other=0)
    scale = tl.load(scale_ptr + r, mask=choice < TOP_K, other=0.0)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + t * stride_xt + k, mask=k < K, other=0.0).to(tl.float32)
        mask = (choice < TOP_K)[:, None] & (k < K)[None]
        drows = tl.load(drows_ptr + r[:, None] * stride_rt + k[None], mask=mask, other=0.0).to(tl.float32)
        dots += drows * x[None]
        dx = tl.sum(drows * scale[:, None], 0)
        tl.store(dx_ptr + t * K + k, dx.to(dx_ptr.dtype.element_ty), mask=k < K)
    tl.store(dscale_ptr + r, tl.sum(dots, 1), mask=choice < TOP_K)


def _check(x: Tensor, name: str, index: Tensor, top_k: int, scale: Tensor | None, tokens: int) -> None:
    """Raises: ValueError or TypeError for what the reference's arguments don't allow."""
    check_source(x, name, (2,))
    check_same_device(index, "the permutation", x, name)
    if index.dtype != torch.int64 or index.shape != (tokens * top_k,):
        raise ValueError(
            f"the permutation is {index.dtype} {tuple(index.shape)}, needs int64 ({tokens * top_k},): "
            f"{tokens} tokens, top_k {top_k}"
        )
    if scale is None:
        return
    if scale.dtype != torch.float32 or scale.shape != index.shape:
        raise TypeError(f"scale is {scale.dtype} {tuple(scale.shape)}, needs float32 {tuple(index.shape)}")
    check_same_device(scale, "scale", x, name)


def gather_rows(x: Tensor, slot: Tensor, top_k: int, scale: Tensor | None) -> Tensor:
    """x[slot // top_k] * scale (R, K), in x's dtype. Arguments as in the reference."""
    _check(x, "x", slot, top_k, scale, x.shape[0])
    x = with_whole_rows(x)
    out = x.new_empty((slot.shape[0], x.shape[1]))
    if out.numel():
        blocks = ceil_div(x.shape[1], BLOCK)
        launch(
            gather_rows_kernel, out.shape[0] * blocks,
            (x, slot.contiguous(), None if scale is None else scale.contiguous(), out),
            (x.shape[1], x.stride(0), blocks), (top_k, scale is not None, BLOCK), NUM_WARPS,
        )  # fmt: skip
    return out


def sum_rows(rows: Tensor, row: Tensor, top_k: int, scale: Tensor | None, base: Tensor | None) -> Tensor:
    """base + sum over choices of (rows * scale)[row] (T, K), in rows' dtype. Arguments as in the reference."""
    _check(rows, "rows", row, top_k, scale, rows.shape[0] // top_k)
    shape = (rows.shape[0] // top_k, rows.shape[1])
    if base is not None:
        if base.shape != shape or base.dtype != rows.dtype:
            raise ValueError(f"base is {base.dtype} {tuple(base.shape)}, needs {rows.dtype} {shape}")
        check_same_device(base, "base", rows, "rows")
        base = with_whole_rows(base)
    rows = with_whole_rows(rows)
    out = rows.new_empty(shape)
    if out.numel():
        blocks = ceil_div(rows.shape[1], BLOCK)
        launch(
            sum_rows_kernel, out.shape[0] * blocks,
            (rows, row.contiguous(), None if scale is None else scale.contiguous(), base, out),
            (rows.shape[1], rows.stride(0), 0 if base is None else base.stride(0), blocks),
            (top_k, scale is not None, base is not None, BLOCK), NUM_WARPS,
        )  # fmt: skip
    return out


def gather_rows_backward(drows: Tensor, x: Tensor, row: Tensor, top_k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dscale), the gradients of `gather_rows`. Arguments as in the reference."""
    _check(x, "x", row, top_k, scale, x.shape[0])
    check_source(drows, "drows", (2,))
    check_same_device(drows, "drows", x, "x")
    if drows.shape != (row.shape[0], x.shape[1]):
        raise ValueError(f"drows is {tuple(drows.shape)}, needs {(row.shape[0], x.shape[1])}")
    drows, x = with_whole_rows(drows), with_whole_rows(x)
    dx, dscale = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(scale)
    if dx.numel():
        choices = next_power_of_2(top_k)
        launch(
            gather_rows_backward_kernel, x.shape[0],
            (drows, x, row.contiguous(), scale.contiguous(), dx, dscale),
            (x.shape[1], drows.stride(0), x.stride(0)), (top_k, choices, max(BLOCK // choices, 128)), NUM_WARPS,
        )  # fmt: skip
    return dx, dscale
