"""Grouped GEMMs of MXFP8 operands: one product per expert, over the rows that belong to it.

Groups may have any size, zero included. Rows past the last group end influence nothing and come out as zeros.
The group sizes are read on the host, which waits for the device: this is the definition, not the fast path.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, round_up
from mxfp8_titan.reference.gemm import dequantize_for_matmul, matmul_in_fp32
from mxfp8_titan.reference.quantize import Quantized, quantize_along_t


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


def check_same_rows(a: Tensor, b: Tensor) -> None:
    """Padding to whole blocks would hide operands that do not belong together.

    Raises: ValueError when a (T, N) and b (T, K) have different T.
    """
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"the operands have {a.shape[0]} and {b.shape[0]} rows, need the same tokens in both")


def grouped_gemm(a: Quantized, b: Quantized, group_ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Rows of each group times that expert's matrix: out[rows of e] = a[rows of e] @ b[e]^T.

    a: data (T, K), scale (T, K / 32)
    b: data (E, N, K), scale (E, N, K / 32)
    group_ends: (E,) int32
    returns (T, N), zeros past the last group end
    Raises: ValueError when group_ends has not one entry an expert, and as `group_bounds` does.
    """
    if group_ends.shape[0] != b.data.shape[0]:
        raise ValueError(
            f"group_ends has {group_ends.shape[0]} entries, needs one for each of {b.data.shape[0]} experts"
        )
    rows = a.data.shape[0]
    left, right = dequantize_for_matmul(a), dequantize_for_matmul(b)
    out = left.new_zeros((rows, b.data.shape[1]), dtype=out_dtype)
    for expert, (start, end) in enumerate(group_bounds(group_ends, rows)):
        if start < end:
            out[start:end] = matmul_in_fp32(left[start:end], right[expert], out_dtype)
    return out


def grouped_gemm_over_rows(a: Tensor, b: Tensor, group_ends: Tensor, rounding: str, out_dtype: torch.dtype) -> Tensor:
    """One (N, K) product per group, contracted over the group's rows: a[rows of e]^T @ b[rows of e].

    Both are quantized here along their rows, each group padded to whole blocks, so that no block spans two experts.

    a: (T, N), b: (T, K) fp32, bf16 or fp16
    group_ends: (E,) int32
    returns (E, N, K), zeros for an empty group
    Raises: ValueError when the row counts differ, and as `group_bounds` does.
    """
    check_same_rows(a, b)
    bounds = group_bounds(group_ends, a.shape[0])
    left, right = (dequantize_for_matmul(quantize_along_t(_pad_groups(x, bounds), rounding)) for x in (a, b))
    out = a.new_zeros((len(bounds), a.shape[1], b.shape[1]), dtype=out_dtype)
    first = 0
    for expert, (start, end) in enumerate(bounds):
        if start < end:
            padded = slice(first, first + round_up(end - start, BLOCK_SIZE))
            out[expert] = matmul_in_fp32(left[:, padded], right[:, padded], out_dtype)
            first = padded.stop
    return out


def _pad_groups(x: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
    """The groups of x (T, K) one after another, each with zero rows up to a multiple of 32."""
    rows = sum(round_up(end - start, BLOCK_SIZE) for start, end in bounds)
    out = x.new_zeros((rows, x.shape[1]))
    first = 0
    for start, end in bounds:
        out[first : first + end - start] = x[start:end]
        first += round_up(end - start, BLOCK_SIZE)
    return out
