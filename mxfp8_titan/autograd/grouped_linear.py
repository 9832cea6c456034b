"""y = x @ w[e]^T for the rows of each expert e, with y, dx and dw each a product of two MXFP8 operands.

    y  (T, N)    = x_along_k  @ w_along_k[e]^T
    dx (T, K)    = dy_along_n @ w_along_n[e]
    dw (E, N, K) = dy_along_t^T @ x_along_t, contracted over the rows of e

Rows past group_ends[-1] come out as zeros in y and dx and contribute to no dw, whatever they hold.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.job_config import Recipe


class GroupedLinearFunction(torch.autograd.Function):
    """x (T, K), w (E, N, K), group_ends (E,) int32 -> y (T, N) in `out_dtype`. Gradients have the dtypes of x and w."""

    @staticmethod
    def forward(
        ctx, x: Tensor, w: Tensor, group_ends: Tensor, recipe: Recipe, backend: Backend, out_dtype: torch.dtype
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dw else None, w if needs_dx else None, group_ends)
        ctx.recipe, ctx.backend = recipe, backend
        ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype
        return backend.grouped_y(x, w, group_ends, recipe.rounding, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, w, group_ends = ctx.saved_tensors
        recipe, backend = ctx.recipe, ctx.backend
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = backend.grouped_dx(dy, w, group_ends, recipe.rounding, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if recipe.wgrad_in_mxfp8:
                dw = backend.grouped_dw(dy, x, group_ends, recipe.rounding, ctx.w_dtype)
            else:
                # The product torchtitan itself runs in bf16.
                dy_t = dy.bfloat16().contiguous().t()
                dw = F.grouped_mm(dy_t, x.bfloat16().contiguous(), offs=group_ends).to(ctx.w_dtype)
        return dx, dw, None, None, None, None
