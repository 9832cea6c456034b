"""Tokens to the order of experts and back, with gradients that are gathers too.

PyTorch's own backward of x[index] sorts the indices and adds, because it does not know that they are a permutation.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.backends.permutation import gather_rows, gather_rows_backward, sum_rows


class DispatchFunction(torch.autograd.Function):
    """x (T, K), scale (R,) fp32 -> x[slot // top_k] * scale (R, K): each row for one expert, scored.

    slot: (R,) int64, the number token * top_k + choice of each row; row: (R,) int64, its inverse; R = T * top_k
    """

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, slot: Tensor, row: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(x, scale, row)
        ctx.top_k = top_k
        return gather_rows(x, slot, top_k, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows: Tensor):
        x, scale, row = ctx.saved_tensors
        dx, dscale = gather_rows_backward(drows, x, row, ctx.top_k, scale)
        return dx, dscale, None, None, None


class CombineFunction(torch.autograd.Function):
    """rows (R, K), base (T, K) or None -> base + the sum of each token's rows (T, K)."""

    @staticmethod
    def forward(ctx, rows: Tensor, base: Tensor | None, slot: Tensor, row: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.top_k = top_k
        return sum_rows(rows, row, top_k, None, base)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        (slot,) = ctx.saved_tensors
        drows = gather_rows(dout, slot, ctx.top_k, None) if ctx.needs_input_grad[0] else None
        return drows, dout if ctx.needs_input_grad[1] else None, None, None, None
