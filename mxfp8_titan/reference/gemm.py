"""GEMM of two MXFP8 operands, dequantized first and accumulated in fp32."""

import torch
from torch import Tensor

from mxfp8_titan.reference.quantize import Quantized, dequantize


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """a @ b^T (M, N) in `out_dtype`, rounded once from the fp32 accumulator.

    a: data (M, K), scale (M, K / 32)
    b: data (N, K), scale (N, K / 32)
    """
    return matmul_in_fp32(dequantize_for_matmul(a), dequantize_for_matmul(b), out_dtype)


def dequantize_for_matmul(q: Quantized) -> Tensor:
    """`q` as the dtype that `matmul_in_fp32` takes on its device: fp32 on a CPU, bf16 on CUDA.

    bf16 holds every E4M3 element times a power of two exactly, down to 2**-133, so that emulation runs on the
    tensor cores.
    """
    return dequantize(q, torch.bfloat16 if q.data.is_cuda else torch.float32)


def matmul_in_fp32(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b^T of two operands from `dequantize_for_matmul`, accumulated in fp32 and rounded once to `out_dtype`.

    a: (M, K), b: (N, K)
    """
    # An op sees the caller's autocast, which would cast its operands.
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda:
            return torch.mm(a, b.t(), out_dtype=torch.float32).to(out_dtype)
        return torch.mm(a, b.t()).to(out_dtype)
