"""MXFP8 quantization and its inverse.

For each block of 32:  b = E8M0 byte of amax,  element = E4M3(x * 2**(127 - b)),  saturating at +-448.
A block that holds an Inf or a NaN becomes byte 255 with every element NaN (0x7f).

The exponent is taken from the integer bits of the fp32 amax: no log2, whose rounding moves blocks at powers of
two, and no bf16 cast first, which would round an amax up to the next power.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxfp8_titan.format import (
    BLOCK_SIZE,
    E4M3_MAX,
    E4M3_MAX_EXPONENT,
    E4M3_NAN_BYTE,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    FLOOR,
    FP32_MANTISSA_OF_448,
    ROUNDINGS,
    round_up,
)


class Quantized(NamedTuple):
    """A tensor in MXFP8; blocks run along data's last dim.

    data: (..., K) float8_e4m3fn
    scale: (..., K / 32) float8_e8m0fnu; x ~ data * scale
    """

    data: Tensor
    scale: Tensor


def e8m0_from_amax(amax: Tensor, rounding: str) -> Tensor:
    """E8M0 bytes (same dims, uint8) of block maxima.

    FLOOR: max(e - 8, 0) with e the biased fp32 exponent of amax.  RCEIL: one more where amax > 448 * 2**k, that is
    where its mantissa exceeds 1.75.

    amax: any dims, fp32, non-negative; Inf and NaN give 255.
    Raises: ValueError for an unknown rounding.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}, needs one of {', '.join(ROUNDINGS)}")
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    byte = exponent - E4M3_MAX_EXPONENT
    if rounding != FLOOR:
        byte = byte + ((bits & 0x7FFFFF) > FP32_MANTISSA_OF_448).int()
    byte = torch.where(exponent == 255, E8M0_NAN_BYTE, byte.clamp_min(0))
    return byte.to(torch.uint8)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """2**(b - 127) for E8M0 bytes b (uint8 or float8_e8m0fnu), fp32; 255 gives NaN, 0 gives 2**-127."""
    byte = scale.view(torch.uint8).int()
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    bits = torch.where(byte == E8M0_NAN_BYTE, 0x7FC00000, bits)
    return bits.view(torch.float32)


def quantize_along_k(x: Tensor, rounding: str) -> Quantized:
    """x in MXFP8, blocks of 32 along its last dim.

    x: (..., K) fp32, bf16 or fp16, any strides; K a multiple of 32
    returns data (..., K) float8_e4m3fn contiguous, scale (..., K / 32) float8_e8m0fnu contiguous
    Raises: ValueError when K is not a multiple of 32, TypeError for another dtype.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x is {x.dtype}, needs float32, bfloat16 or float16")
    if x.shape[-1] % BLOCK_SIZE != 0:
        raise ValueError(
            f"the quantized dim has {x.shape[-1]} elements, needs a multiple of {BLOCK_SIZE} (one MX block)"
        )
    blocks = x.float().contiguous().unflatten(-1, (-1, BLOCK_SIZE))
    # amax keeps NaN on CPU and CUDA; an empty dim has no amax, so it is given its own shape.
    amax = blocks.abs().amax(-1) if x.numel() else blocks.new_zeros(blocks.shape[:-1])
    byte = e8m0_from_amax(amax, rounding)
    multiplier = ((2 * E8M0_BIAS - byte.int()) << 23).view(torch.float32).unsqueeze(-1)
    # Clamped before the cast: torch 2.11 turns values beyond 464 into NaN, 2.12 saturates them.
    data = (blocks * multiplier).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    is_nan = (byte == E8M0_NAN_BYTE).unsqueeze(-1)
    data = torch.where(is_nan, E4M3_NAN_BYTE, data.view(torch.uint8)).view(torch.float8_e4m3fn)
    return Quantized(data.flatten(-2), byte.view(torch.float8_e8m0fnu))


def quantize_along_t(x: Tensor, rounding: str) -> Quantized:
    """x in MXFP8, blocks of 32 along its rows, written transposed.

    T is padded with zero rows to T' = the next multiple of 32, which leaves any product over T unchanged.

    x: (T, K) fp32, bf16 or fp16, any strides
    returns data (K, T') float8_e4m3fn contiguous, scale (K, T' / 32) float8_e8m0fnu contiguous
    Raises: TypeError for another dtype.
    """
    rows = x.shape[0]
    padded = pad(x, (0, 0, 0, round_up(rows, BLOCK_SIZE) - rows))
    return quantize_along_k(padded.t(), rounding)


def quantize_along_n(w: Tensor, rounding: str) -> Quantized:
    """w in MXFP8, blocks of 32 along its out features: the operand of dx = dy @ w.

    w: (..., N, K) fp32, bf16 or fp16, any strides; N a multiple of 32
    returns data (..., K, N) float8_e4m3fn contiguous, scale (..., K, N / 32) float8_e8m0fnu contiguous
    Raises: ValueError when N is not a multiple of 32, TypeError for another dtype.
    """
    return quantize_along_k(w.mT, rounding)


def dequantize(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """data * scale, block by block, in `dtype` (fp32 is exact; bf16 is too, down to 2**-133).

    x: data (..., K), scale (..., K / 32)
    """
    blocks = x.data.to(dtype).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * e8m0_to_float(x.scale).to(dtype).unsqueeze(-1)).flatten(-2)
