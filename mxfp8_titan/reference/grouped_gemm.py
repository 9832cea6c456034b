"""Grouped GEMMs of MXFP8 operands: one product per expert, over the rows that belong to it.

Groups may have any size, zero included. Rows past the last group end influence nothing and come out as zeros.
The group sizes are read on the host, which waits for the device: this is the definition, not the fast path.
"""

import torch
from torch import Tensor

from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.quantize import Quantized, quantize_along_k, quantize_along_t


def group_bounds(group_ends: Tensor, rows: int) -> list[tuple[int, int]]:
    """(start, end) of each group, on the host.

    group_ends: (E,) int32, non-decreasing, the last one <= rows
    Raises: TypeError for another dtype, ValueError when the ends decrease or leave [0, rows].
    """
    if group_ends.dtype != torch.int32:
        raise TypeError(f"group_ends is {group_ends.dtype}, needs int32: cumsum(..., dtype=torch.int32)")
    ends = group_ends.tolist()
    starts = [0, *ends[:-1]]
    if any(end < start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > rows):
        raise ValueError(
            f"group_ends is {ends}, needs non-decreasing ends between 0 and the {rows} rows of the operand"
        )
    return list(zip(starts, ends, strict=True))


def grouped_gemm(a: Tensor, b: Quantized, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """Rows of each group times that expert's matrix: out[rows of e] = quantized(a[rows of e]) @ b[e]^T.

    a: (T, K) fp32, bf16 or fp16, quantized here along K
    b: data (E, N, K), scale (E, N, K / 32)
    group_ends: (E,) int32
    returns (T, N), zeros past the last group end
    """
    out = a.new_zeros((a.shape[0], b.data.shape[1]), dtype=out_dtype)
    for expert, (start, end) in enumerate(group_bounds(group_ends, a.shape[0])):
        if start < end:
            a_expert = quantize_along_k(a[start:end], rounding)
            out[start:end] = gemm(a_expert, Quantized(b.data[expert], b.scale[expert]), out_dtype)
    return out


def grouped_gemm_over_rows(a: Tensor, b: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """One (N, K) product per group, contracted over the group's rows: a[rows of e]^T @ b[rows of e].

    Both are quantized here along their rows, each group on its own, so that no block spans two experts.

    a: (T, N), b: (T, K) fp32, bf16 or fp16
    group_ends: (E,) int32
    returns (E, N, K), zeros for an empty group
    """
    out = a.new_zeros((group_ends.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)
    for expert, (start, end) in enumerate(group_bounds(group_ends, a.shape[0])):
        if start < end:
            a_expert = quantize_along_t(a[start:end], rounding)
            out[expert] = gemm(a_expert, quantize_along_t(b[start:end], rounding), out_dtype)
    return out
