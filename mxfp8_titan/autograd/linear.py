"""y = x @ w^T with y, dx and dw each a product of two MXFP8 operands.

    y  (T, N) = x_along_k  @ w_along_k^T
    dx (T, K) = dy_along_n @ w_along_n
    dw (N, K) = dy_along_t^T @ x_along_t

Each gradient that nobody asks for costs nothing: a frozen weight has no dw GEMM and no quantization for it.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.job_config import Recipe


class LinearFunction(torch.autograd.Function):
    """x (T, K), w (N, K) -> y (T, N) in `out_dtype`. Gradients have the dtypes of x and w."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, recipe: Recipe, backend: Backend, out_dtype: torch.dtype) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dw else None, w if needs_dx else None)
        ctx.recipe, ctx.backend = recipe, backend
        ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype
        return backend.linear_y(x, w, recipe.rounding, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        recipe, backend = ctx.recipe, ctx.backend
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = backend.linear_dx(dy, w, recipe.rounding, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if recipe.wgrad_in_mxfp8:
                dw = backend.linear_dw(dy, x, recipe.rounding, ctx.w_dtype)
            else:
                with torch.autocast(dy.device.type, enabled=False):
                    dw = torch.mm(dy.bfloat16().t(), x.bfloat16()).to(ctx.w_dtype)
        return dx, dw, None, None, None
