"""The SwiGLU product and its gradient in fp32, quantized without a bf16 copy in between.

forward    h   = silu(h1) * h3                     silu(a) = a * s,  s = 1 / (1 + exp(-a))
backward   dh1 = dh * h3 * s * (1 + h1 * (1 - s))
           dh3 = dh * h1 * s
"""

import torch
from torch import Tensor


def swiglu(h1: Tensor, h3: Tensor) -> Tensor:
    """silu(h1) * h3 (T, N) fp32.

    h1, h3: (T, N) fp32, bf16 or fp16
    """
    a = h1.float()
    return a * torch.sigmoid(a) * h3.float()


def swiglu_backward(dh: Tensor, h1: Tensor, h3: Tensor) -> tuple[Tensor, Tensor]:
    """(dh1, dh3), both (T, N) fp32: the gradients of `swiglu`.

    dh, h1, h3: (T, N) fp32, bf16 or fp16
    """
    grad, a, b = dh.float(), h1.float(), h3.float()
    s = torch.sigmoid(a)
    return grad * b * s * (1 + a * (1 - s)), grad * a * s
