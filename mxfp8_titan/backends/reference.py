"""Emulation: MXFP8 operands made and multiplied in plain PyTorch, on any device.

Operands stay unquantized until they are multiplied. The three products are opaque to torch.compile: traced through,
the quantizer's block reshapes break Inductor's CPU code generation, which also has no C++ type for E8M0 (seen on
torch 2.11 and 2.13).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_titan.backends.interface import Backend, Operand, SavedTokens, Tokens, Weights
from mxfp8_titan.job_config import Recipe
from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.grouped_gemm import check_same_rows, grouped_gemm, grouped_gemm_over_rows
from mxfp8_titan.reference.quantize import Quantized, quantize_along_k, quantize_along_n, quantize_along_t


@torch.library.custom_op("mxfp8_titan::reference_y", mutates_args=())
def reference_y(
    x: Tensor, ws: list[Tensor], group_ends: Tensor | None, rounding: str, out_dtype: torch.dtype
) -> Tensor:
    """x_along_k @ w_along_k^T (T, N), for the rows of each expert if there are groups."""
    return _rows_times(x, quantize_along_k(_joined(ws), rounding), group_ends, rounding, out_dtype)


@reference_y.register_fake
def _(x: Tensor, ws: list[Tensor], group_ends: Tensor | None, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], sum(w.shape[-2] for w in ws)), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_dx", mutates_args=())
def reference_dx(
    dy: Tensor, ws: list[Tensor], group_ends: Tensor | None, rounding: str, out_dtype: torch.dtype
) -> Tensor:
    """dy_along_n @ w_along_n (T, K), for the rows of each expert if there are groups."""
    return _rows_times(dy, quantize_along_n(_joined(ws), rounding), group_ends, rounding, out_dtype)


@reference_dx.register_fake
def _(dy: Tensor, ws: list[Tensor], group_ends: Tensor | None, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[0], ws[0].shape[-1]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_dw", mutates_args=())
def reference_dw(
    dy: Tensor, x: Tensor, group_ends: Tensor | None, rounding: str, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    """dy_along_t^T @ x_along_t (N, K), over the rows of each expert if there are groups, cut along N."""
    check_same_rows(dy, x)
    if group_ends is None:
        dw = gemm(quantize_along_t(dy, rounding), quantize_along_t(x, rounding), out_dtype)
    else:
        dw = grouped_gemm_over_rows(dy, x, group_ends, rounding, out_dtype)
    return [dw] if parts == 1 else [part.clone() for part in dw.chunk(parts, -2)]


@reference_dw.register_fake
def _(
    dy: Tensor, x: Tensor, group_ends: Tensor | None, rounding: str, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    experts = () if group_ends is None else (group_ends.shape[0],)
    return [x.new_empty((*experts, dy.shape[1] // parts, x.shape[1]), dtype=out_dtype) for _ in range(parts)]


def _joined(ws: list[Tensor]) -> Tensor:
    """The weights as one, along N; a single one is not copied."""
    return ws[0] if len(ws) == 1 else torch.cat(ws, -2)


def _rows_times(x: Tensor, w: Quantized, group_ends: Tensor | None, rounding: str, out_dtype: torch.dtype) -> Tensor:
    x_along_k = quantize_along_k(x, rounding)
    if group_ends is None:
        return gemm(x_along_k, w, out_dtype)
    return grouped_gemm(x_along_k, w, group_ends, out_dtype)


def _tokens(x: Tensor, for_dw: bool) -> Tokens:
    return Tokens((x,), (x,) if for_dw else ())


def _y(rows: Operand, weights: Operand, group_ends: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    return torch.ops.mxfp8_titan.reference_y(*rows, list(weights), group_ends, recipe.rounding, out_dtype)


def _dx(rows: Operand, weights: Operand, group_ends: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    return torch.ops.mxfp8_titan.reference_dx(*rows, list(weights), group_ends, recipe.rounding, out_dtype)


def _dw(
    dy: Operand, x: Operand, group_ends: Tensor | None, recipe: Recipe, parts: int, out_dtype: torch.dtype
) -> list[Tensor]:
    return torch.ops.mxfp8_titan.reference_dw(*dy, *x, group_ends, recipe.rounding, parts, out_dtype)


def _swiglu(h13: Tensor, group_ends: Tensor | None, recipe: Recipe, for_dw: bool) -> tuple[Tokens, Operand]:
    h1, h3 = h13.chunk(2, -1)
    return _tokens(F.silu(h1) * h3, for_dw), ()


def _swiglu_backward(
    dh: Tensor, h13: Tensor, kept: Operand, group_ends: Tensor | None, recipe: Recipe, for_dw13: bool
) -> tuple[Tokens, Operand]:
    """In the steps and roundings of PyTorch's own backward of `F.silu(h1) * h3`."""
    h1, h3 = h13.chunk(2, -1)
    silu = F.silu(h1)
    dh13 = torch.cat((torch.ops.aten.silu_backward(dh * h3, h1), dh * silu), -1)
    return _tokens(dh13, for_dw13), (silu * h3,)


REFERENCE = Backend(
    name="reference",
    home="mxfp8_titan.backends.reference:REFERENCE",
    group_alignment=1,
    quantize_tokens=lambda x, group_ends, recipe, for_dw: _tokens(x, for_dw),
    quantize_saved_tokens=lambda x, group_ends, recipe: SavedTokens((x,), ()),
    quantize_saved_tokens_for_dw=lambda x, kept, group_ends, recipe: (x,),
    quantize_weights=lambda ws, recipe, for_dx: Weights(tuple(ws), ()),
    quantize_weights_for_dx=lambda ws, kept, recipe: tuple(ws),
    y=_y,
    dx=_dx,
    dw=_dw,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    saved_ops=(torch.ops.mxfp8_titan.reference_y.default,),
)
