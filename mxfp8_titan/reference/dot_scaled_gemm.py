"""GEMMs of MXFP8 operands whose scales are blocked, as tensor cores read them: unswizzled, then reference.gemm.

Groups along T may have any size for `gemm_of_rows`, and multiples of 32 for `gemm_over_t`.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE
from mxfp8_titan.reference.gemm import dequantize_for_matmul, gemm, matmul_in_fp32
from mxfp8_titan.reference.grouped_gemm import group_bounds, grouped_gemm
from mxfp8_titan.reference.quantize import Quantized
from mxfp8_titan.reference.scale_swizzle import unswizzle, unswizzle_k_groups, unswizzle_per_expert, unswizzle_t_groups


def gemm_of_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """a @ b^T (T, N), or a[rows of e] @ b[e]^T for each group with zeros past the last one.

    a: (T, K) float8_e4m3fn; a_scale: its blocked scales, rows split by the groups
    b: (N, K) or (E, N, K) float8_e4m3fn; b_scale: its blocked scales, one matrix per expert
    """
    cols = a.shape[1] // BLOCK_SIZE
    if group_ends is None:
        left = Quantized(a, unswizzle(a_scale, a.shape[0], cols))
        return gemm(left, Quantized(b, unswizzle(b_scale, b.shape[0], cols)), out_dtype)
    left = Quantized(a, unswizzle_t_groups(a_scale, group_ends, a.shape[0], cols))
    right = Quantized(b, unswizzle_per_expert(b_scale, b.shape[1], cols))
    return grouped_gemm(left, right, group_ends, out_dtype)


def gemm_over_t(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, group_ends: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """a @ b^T (N, K), or one such product over the columns of each group (E, N, K), zeros for an empty one.

    a: (N, T), b: (K, T) float8_e4m3fn; a_scale, b_scale: their blocked scales, columns split by the groups
    """
    cols = a.shape[1] // BLOCK_SIZE
    if group_ends is None:
        left = Quantized(a, unswizzle(a_scale, a.shape[0], cols))
        return gemm(left, Quantized(b, unswizzle(b_scale, b.shape[0], cols)), out_dtype)
    left, right = (
        dequantize_for_matmul(Quantized(data, unswizzle_k_groups(scale, group_ends, data.shape[0], cols)))
        for data, scale in ((a, a_scale), (b, b_scale))
    )
    out = left.new_zeros((group_ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)
    for expert, (start, end) in enumerate(group_bounds(group_ends, a.shape[1])):
        if start < end:
            out[expert] = matmul_in_fp32(left[:, start:end], right[:, start:end], out_dtype)
    return out
