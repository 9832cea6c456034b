"""y = x @ w^T with y, dx and dw each a product of two MXFP8 operands.

    dense    y  (T, N)    = x_along_k  @ w_along_k^T
             dx (T, K)    = dy_along_n @ w_along_n
             dw (N, K)    = dy_along_t^T @ x_along_t
    grouped  the same for the rows of each expert e, with w[e] and dw[e]: w and dw are (E, N, K)

x is quantized once for y and dw, dy once for dx and dw; an x that something else saves for backward anyway is saved as
it is and quantized again for dw. Each gradient that nobody asks for costs nothing: a frozen weight has no dw GEMM and
no quantization for it. Rows past group_ends[-1] come out as zeros in y and dx and
contribute to no dw, whatever they hold.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.autograd.saved_x import quantize_x, x_for_dw
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.job_config import Recipe


class LinearFunction(torch.autograd.Function):
    """x (T, K), w (N, K) or (E, N, K), group_ends None or (E,) int32 -> y (T, N) in `out_dtype`.

    saves_x: whether to save x, because something else does, rather than what is made of it for dw
    Gradients have the dtypes of x and w.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, w: Tensor, group_ends: Tensor | None, recipe: Recipe, backend: Backend,
        out_dtype: torch.dtype, saves_x: bool = False,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        mxfp8_dw = needs_dw and recipe.wgrad_in_mxfp8
        tokens = quantize_x(backend, x, group_ends, recipe, mxfp8_dw, saves_x)
        for_dw = tokens.dw if mxfp8_dw else (x,) if needs_dw else ()
        weights = backend.quantize_weights([w], recipe, needs_dx)
        for_dx = (w, *weights.kept) if needs_dx else ()
        ctx.save_for_backward(group_ends, *for_dw, *for_dx)
        ctx.saved_for_dw = len(for_dw)
        ctx.recipe, ctx.backend, ctx.saves_x = recipe, backend, saves_x
        ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype
        return backend.y(tokens.rows, weights.y, group_ends, recipe, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        recipe, backend = ctx.recipe, ctx.backend
        group_ends, *saved = ctx.saved_tensors
        x, for_dx = saved[: ctx.saved_for_dw], saved[ctx.saved_for_dw :]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        mxfp8_dw = needs_dw and recipe.wgrad_in_mxfp8
        dx = dw = None
        if needs_dx or mxfp8_dw:
            tokens = backend.quantize_tokens(dy, group_ends, recipe, mxfp8_dw)
        if needs_dx:
            w, *kept = for_dx
            weights = backend.quantize_weights_for_dx([w], tuple(kept), recipe)
            dx = backend.dx(tokens.rows, weights, group_ends, recipe, ctx.x_dtype)
        if mxfp8_dw:
            x = x_for_dw(backend, tuple(x), group_ends, recipe, ctx.saves_x)
            (dw,) = backend.dw(tokens.dw, x, group_ends, recipe, 1, ctx.w_dtype)
        elif needs_dw:
            dw = _dw_in_bf16(dy, *x, group_ends).to(ctx.w_dtype)
        return dx, dw, None, None, None, None, None


def _dw_in_bf16(dy: Tensor, x: Tensor, group_ends: Tensor | None) -> Tensor:
    """The product torchtitan itself runs in bf16."""
    with torch.autocast(dy.device.type, enabled=False):
        if group_ends is None:
            return torch.mm(dy.bfloat16().t(), x.bfloat16())
        return F.grouped_mm(dy.bfloat16().contiguous().t(), x.bfloat16().contiguous(), offs=group_ends)
