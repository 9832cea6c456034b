"""Emulation: MXFP8 operands made and multiplied in plain PyTorch, on any device.

The ops are opaque to torch.compile. Traced through, the quantizer's block reshapes break Inductor's CPU code
generation, which also has no C++ type for E8M0 (seen on torch 2.11 and 2.13).
"""

import torch
from torch import Tensor

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.grouped_gemm import check_same_rows, grouped_gemm, grouped_gemm_over_rows
from mxfp8_titan.reference.quantize import quantize_along_k, quantize_along_n, quantize_along_t


@torch.library.custom_op("mxfp8_titan::reference_linear_y", mutates_args=())
def linear_y(x: Tensor, w: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """x_along_k @ w_along_k^T (T, N)."""
    return gemm(quantize_along_k(x, rounding), quantize_along_k(w, rounding), out_dtype)


@linear_y.register_fake
def _(x: Tensor, w: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_linear_dx", mutates_args=())
def linear_dx(dy: Tensor, w: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """dy_along_n @ w_along_n (T, K)."""
    return gemm(quantize_along_k(dy, rounding), quantize_along_n(w, rounding), out_dtype)


@linear_dx.register_fake
def _(dy: Tensor, w: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[0], w.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_linear_dw", mutates_args=())
def linear_dw(dy: Tensor, x: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """dy_along_t^T @ x_along_t (N, K)."""
    check_same_rows(dy, x)
    return gemm(quantize_along_t(dy, rounding), quantize_along_t(x, rounding), out_dtype)


@linear_dw.register_fake
def _(dy: Tensor, x: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_grouped_y", mutates_args=())
def grouped_y(x: Tensor, w: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """x_along_k @ w_along_k[e]^T for the rows of each expert e (T, N)."""
    return grouped_gemm(quantize_along_k(x, rounding), quantize_along_k(w, rounding), group_ends, out_dtype)


@grouped_y.register_fake
def _(x: Tensor, w: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_grouped_dx", mutates_args=())
def grouped_dx(dy: Tensor, w: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """dy_along_n @ w_along_n[e] for the rows of each expert e (T, K)."""
    return grouped_gemm(quantize_along_k(dy, rounding), quantize_along_n(w, rounding), group_ends, out_dtype)


@grouped_dx.register_fake
def _(dy: Tensor, w: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[0], w.shape[2]), dtype=out_dtype)


@torch.library.custom_op("mxfp8_titan::reference_grouped_dw", mutates_args=())
def grouped_dw(dy: Tensor, x: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """dy_along_t^T @ x_along_t over the rows of each expert (E, N, K)."""
    return grouped_gemm_over_rows(dy, x, group_ends, rounding, out_dtype)


@grouped_dw.register_fake
def _(dy: Tensor, x: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((group_ends.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)


_ops = torch.ops.mxfp8_titan

REFERENCE = Backend(
    name="reference",
    home="mxfp8_titan.backends.reference:REFERENCE",
    linear_y=_ops.reference_linear_y.default,
    linear_dx=_ops.reference_linear_dx.default,
    linear_dw=_ops.reference_linear_dw.default,
    grouped_y=_ops.reference_grouped_y.default,
    grouped_dx=_ops.reference_grouped_dx.default,
    grouped_dw=_ops.reference_grouped_dw.default,
)
