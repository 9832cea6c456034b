"""GEMMs of operands with one scale per row, dequantized first and accumulated in fp32.

Group sizes are read on the host, which waits for the device: this is the definition, not the fast path.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import GROUP_TILE, round_up
from mxfp8_titan.reference.gemm import matmul_in_fp32
from mxfp8_titan.reference.grouped_gemm import group_bounds
from mxfp8_titan.reference.quantize_aligned import Aligned


def dequantize_rows(data: Tensor, scale: Tensor) -> Tensor:
    """data * scale (..., K) as the dtype that `matmul_in_fp32` takes on its device: fp32 on a CPU, bf16 on CUDA.

    bf16 holds every E4M3 element times a power of two exactly, down to 2**-133.

    data: (..., K) float8_e4m3fn; scale: (...,) fp32
    """
    return (data.float() * scale.unsqueeze(-1)).to(torch.bfloat16 if data.is_cuda else torch.float32)


def aligned_gemm(
    a: Aligned, b: Aligned, group_ends: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Rows of each group times that expert's matrix: out[rows of e] = a[rows of e] @ b[e]^T.

    a: data (T, K), scale (T,)
    b: data (E, N, K), scale (E, N); without group_ends (N, K) and (N,)
    group_ends: (E,) int32. Rows past the last end may hold anything.
    returns (T, N) in out_dtype, zeros past the last group end
    """
    if group_ends is None:
        return matmul_in_fp32(dequantize_rows(*a), dequantize_rows(*b), out_dtype)
    rows = a.data.shape[0]
    out = a.scale.new_zeros((rows, b.data.shape[1]), dtype=out_dtype)
    for expert, (start, end) in enumerate(group_bounds(group_ends, rows)):
        if start < end:
            left = dequantize_rows(a.data[start:end], a.scale[start:end])
            out[start:end] = matmul_in_fp32(left, dequantize_rows(b.data[expert], b.scale[expert]), out_dtype)
    return out


def padded_bounds(group_ends: Tensor, columns: int) -> list[tuple[int, int]]:
    """(first, last + 1) column of each group where tokens are padded: groups start at multiples of 128, on the host.

    group_ends: (G,) int32, ends in tokens, without padding
    columns: of the padded operand
    """
    bounds, first = [], 0
    for start, end in group_bounds(group_ends, columns):
        last = first + round_up(end - start, GROUP_TILE)
        bounds.append((first, last))
        first = last
    return bounds


def aligned_gemm_over_t(
    a: Aligned, b: Aligned, group_ends: Tensor | None = None, parts: int = 1, out_dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """One product per group, contracted over its tokens: out[e] = a @ b^T over the columns of e.

    a: data (N, T'), scale (G, N)
    b: data (K, T'), scale (G, K)
    group_ends: (G,) int32, ends in tokens; columns are padded as `padded_bounds` says, with zeros. Columns after the
            last group may hold anything. None for one group, all columns, scales (N,) or (1, N) and (K,) or (1, K)
    returns `parts` tensors (G, N / parts, K) in out_dtype, rows of N in order; two dims without group_ends
    """
    columns = a.data.shape[1]
    bounds = [(0, columns)] if group_ends is None else padded_bounds(group_ends, columns)
    scales_a, scales_b = (x.scale.reshape(len(bounds), -1) for x in (a, b))
    out = a.scale.new_zeros((len(bounds), a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    for group, (first, last) in enumerate(bounds):
        if first < last:
            left = dequantize_rows(a.data[:, first:last], scales_a[group])
            right = dequantize_rows(b.data[:, first:last], scales_b[group])
            out[group] = matmul_in_fp32(left, right, out_dtype)
    if group_ends is None:
        out = out[0]
    return [part.contiguous() for part in out.chunk(parts, -2)]
