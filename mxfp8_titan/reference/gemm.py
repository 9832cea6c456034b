"""GEMM of two MXFP8 operands, dequantized first and accumulated in fp32."""

import torch
from torch import Tensor

from mxfp8_titan.reference.quantize import Quantized, dequantize


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """a @ b^T (M, N) in `out_dtype`, rounded once from the fp32 accumulator.

    On CUDA the operands are multiplied as bf16, which holds every E4M3 element times a power of two exactly
    (down to 2**-133), so that emulation runs on the tensor cores; the sums stay fp32.

    a: data (M, K), scale (M, K / 32)
    b: data (N, K), scale (N, K / 32)
    """
    if a.data.is_cuda:
        left, right = dequantize(a, torch.bfloat16), dequantize(b, torch.bfloat16)
        return torch.mm(left, right.t(), out_dtype=torch.float32).to(out_dtype)
    return torch.mm(dequantize(a), dequantize(b).t()).to(out_dtype)
