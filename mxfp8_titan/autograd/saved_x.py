"""x quantized for forward, and what backward makes of the saved part of it an operand of dw from."""

from torch import Tensor

from mxfp8_titan.backends.interface import Backend, Operand, Tokens
from mxfp8_titan.job_config import Recipe


def quantize_x(
    backend: Backend, x: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool, saves_x: bool
) -> Tokens:
    """x (T, K) as the left operand of y, and as `dw` what autograd is to save for `x_for_dw`: nothing unless for_dw.

    saves_x: whether to save x itself, because something else does
    """
    if for_dw and saves_x:
        rows, kept = backend.quantize_saved_tokens(x, group_ends, recipe)
        return Tokens(rows, (x, *kept))
    return backend.quantize_tokens(x, group_ends, recipe, for_dw)


def x_for_dw(
    backend: Backend, saved: tuple[Tensor, ...], group_ends: Tensor | None, recipe: Recipe, saves_x: bool
) -> Operand:
    """x as an operand of dw, from what `quantize_x` with the same `saves_x` gave to save."""
    if saves_x:
        x, *kept = saved
        return backend.quantize_saved_tokens_for_dw(x, tuple(kept), group_ends, recipe)
    return saved
