"""The SwiGLU product and its gradients with one scale per row: fp32 formulas, then aligned quantization.

h1 and h3 are the halves of h13 (T, 2H), as one GEMM with [w1; w3] writes them; their gradients are quantized as one
row, because the next GEMM contracts both. Rows past the last group end count as zeros.
"""

import torch
from torch import Tensor

from mxfp8_titan.reference.quantize_aligned import column_amax, quantize_aligned_along_k
from mxfp8_titan.reference.swiglu import swiglu, swiglu_backward


def swiglu_aligned(h13: Tensor, rounding: str, group_ends: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """h = silu(h1) * h3 in MXFP8, one scale per row: (data, scale, amax).

    h13: (T, 2H) fp32, bf16 or fp16
    group_ends: (G,) int32, or None for one group
    returns data (T, H) float8_e4m3fn, scale (T,) fp32, amax (G, H) fp32, the column maxima of each group
    """
    h = swiglu(*owned(h13, group_ends).chunk(2, 1))
    return *quantize_aligned_along_k(h, rounding), column_amax(h, group_ends)


def swiglu_aligned_backward(
    dh: Tensor, h13: Tensor, rounding: str, group_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dh13 = [dh1, dh3] in MXFP8, one scale per row, its column maxima, and h again: (data, scale, amax, data, scale).

    dh: (T, H), h13: (T, 2H), fp32, bf16 or fp16
    returns data (T, 2H), scale (T,), amax (G, 2H) of dh13; data (T, H), scale (T,) of h, as `swiglu_aligned` makes them
    """
    h1, h3 = owned(h13, group_ends).chunk(2, 1)
    dh13 = torch.cat(swiglu_backward(owned(dh, group_ends), h1, h3), 1)
    return (
        *quantize_aligned_along_k(dh13, rounding),
        column_amax(dh13, group_ends),
        *quantize_aligned_along_k(swiglu(h1, h3), rounding),
    )


def owned(x: Tensor, group_ends: Tensor | None) -> Tensor:
    """x with zeros in the rows past the last group end."""
    if group_ends is None:
        return x
    return torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < group_ends[-1], x, 0)
