"""Weights in MXFP8 with one scale per 32 x 32 square: both layouts hold the same elements.

Square scales make the operands of y and dx two views of one rounding: w_along_n is w_along_k transposed, element by
element, which 1 x 32 blocks cannot give.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE
from mxfp8_titan.reference.quantize import e8m0_from_amax
from mxfp8_titan.reference.quantize_aligned import encode


class Square(NamedTuple):
    """A weight and its transpose in MXFP8 with square blocks.

    along_k: (..., N, K) float8_e4m3fn
    along_n: (..., K, N) float8_e4m3fn
    scale: (..., N / 32, K / 32) float8_e8m0fnu
    """

    along_k: Tensor
    along_n: Tensor
    scale: Tensor

    def scale_along_k(self) -> Tensor:
        """(..., N, K / 32): the scale of each 1 x 32 block of along_k."""
        return repeat_rows(self.scale)

    def scale_along_n(self) -> Tensor:
        """(..., K, N / 32): the scale of each 1 x 32 block of along_n."""
        return repeat_rows(self.scale.mT)


def repeat_rows(scale: Tensor) -> Tensor:
    """scale (..., R, C) with each row 32 times in a row (..., 32 R, C)."""
    return scale.view(torch.uint8).repeat_interleave(BLOCK_SIZE, dim=-2).view(scale.dtype)


def quantize_32x32_both(w: Tensor, rounding: str) -> Square:
    """w and its transpose in MXFP8, one scale per 32 x 32 square.

    w: (..., N, K) fp32, bf16 or fp16, any strides; N and K multiples of 32
    Raises: ValueError when they are not.
    """
    if w.shape[-1] % BLOCK_SIZE or w.shape[-2] % BLOCK_SIZE:
        raise ValueError(f"w is {tuple(w.shape)}, needs its last two dims to be multiples of {BLOCK_SIZE}")
    squares = w.float().unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))
    byte = e8m0_from_amax(squares.abs().amax((-3, -1)), rounding)
    data = encode(squares, byte.unsqueeze(-2).unsqueeze(-1)).view(torch.uint8).flatten(-2).flatten(-3, -2)
    return Square(
        data.contiguous().view(torch.float8_e4m3fn),
        data.mT.contiguous().view(torch.float8_e4m3fn),
        byte.contiguous().view(torch.float8_e8m0fnu),
    )
