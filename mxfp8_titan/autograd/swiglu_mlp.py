"""y = h @ w2^T with h = silu(x @ w1^T) * (x @ w3^T), its nine GEMMs of MXFP8 operands asked for as six.

    h13 = x_along_k @ [w1; w3]_along_k^T                 dh   = dy_along_n @ w2_along_n, dh13 from it
    y   = h_along_k @ w2_along_k^T                       dx   = dh13_along_n @ [w1; w3]_along_n
                                                         [dw1; dw3] = dh13_along_t^T @ x_along_t
                                                         dw2 = dy_along_t^T @ h_along_t

x, dy and dh13 are quantized once each, h once in forward; backward makes h again from h13, which is cheaper than to
save it. Whether w1 and w3 really are one product is the backend's choice. Dense layers (w 2D) and experts (w 3D with
groups of tokens) alike.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp8_titan.autograd.saved_x import quantize_x, x_for_dw
from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.job_config import Recipe


class SwiGLUMLPFunction(torch.autograd.Function):
    """x (T, K), w1 and w3 (H, K) or (E, H, K), w2 (K, H) or (E, K, H) -> y (T, K) in `out_dtype`.

    group_ends: None or (E,) int32. Gradients have the dtypes of x and of each weight. All products are MXFP8 ones,
    also dw. saves_x: as LinearFunction's.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group_ends: Tensor | None,
        recipe: Recipe, backend: Backend, out_dtype: torch.dtype, saves_x: bool = False,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw1, needs_dw2, needs_dw3 = ctx.needs_input_grad[:4]
        needs_dh = needs_dx or needs_dw1 or needs_dw3
        tokens = quantize_x(backend, x, group_ends, recipe, needs_dw1 or needs_dw3, saves_x)
        w13 = backend.quantize_weights([w1, w3], recipe, needs_dx)
        h13 = backend.y(tokens.rows, w13.y, group_ends, recipe, out_dtype)
        h, h_kept = backend.swiglu(h13, group_ends, recipe, needs_dw2)
        w2_operands = backend.quantize_weights([w2], recipe, needs_dh)
        ctx.save_for_backward(group_ends, h13, w1, w2, w3, *tokens.dw, *h_kept, *w13.kept, *w2_operands.kept)
        ctx.counts = [len(part) for part in (tokens.dw, h_kept, w13.kept, w2_operands.kept)]
        ctx.recipe, ctx.backend, ctx.saves_x = recipe, backend, saves_x
        ctx.out_dtype, ctx.x_dtype = out_dtype, x.dtype
        return backend.y(h.rows, w2_operands.y, group_ends, recipe, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        needs_dx, needs_dw1, needs_dw2, needs_dw3 = ctx.needs_input_grad[:4]
        needs_dw13 = needs_dw1 or needs_dw3
        backend, recipe = ctx.backend, ctx.recipe
        group_ends, h13, w1, w2, w3, *rest = ctx.saved_tensors
        # With many tokens h13 is the largest tensor here, and need not outlive its use below. Where the graph is kept
        # for a second backward this clears nothing; a compiled backward frees what it has used by itself.
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        parts = []
        for count in ctx.counts:
            parts.append(tuple(rest[:count]))
            rest = rest[count:]
        x, h_kept, w13_kept, w2_kept = parts
        dx = dw1 = dw2 = dw3 = None

        tokens = backend.quantize_tokens(dy, group_ends, recipe, needs_dw2)
        if needs_dx or needs_dw13:
            w2_for_dx = backend.quantize_weights_for_dx([w2], w2_kept, recipe)
            dh = backend.dx(tokens.rows, w2_for_dx, group_ends, recipe, ctx.out_dtype)
            dh13, h = backend.swiglu_backward(dh, h13, h_kept, group_ends, recipe, needs_dw13)
            # Each operand lives until its last product.
            del dh, w2_for_dx
        else:
            h = backend.swiglu(h13, group_ends, recipe, True)[0].dw
        del h13
        if needs_dw2:
            (dw2,) = backend.dw(tokens.dw, h, group_ends, recipe, 1, w2.dtype)
        del tokens, h
        if needs_dx:
            w13_for_dx = backend.quantize_weights_for_dx([w1, w3], w13_kept, recipe)
            dx = backend.dx(dh13.rows, w13_for_dx, group_ends, recipe, ctx.x_dtype)
            del w13_for_dx
        if needs_dw13:
            x = x_for_dw(backend, x, group_ends, recipe, ctx.saves_x)
            dw1, dw3 = backend.dw(dh13.dw, x, group_ends, recipe, 2, w1.dtype)
        grads = (dx, dw1 if needs_dw1 else None, dw2, dw3 if needs_dw3 else None)
        return *grads, None, None, None, None, None
