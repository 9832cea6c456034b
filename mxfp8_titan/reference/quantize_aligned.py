"""MXFP8 whose blocks share the largest exponent of their row: what FP8 tensor cores without MX scales can multiply.

A power-of-two scale never changes an E4M3 element's mantissa, only whether it underflows. So all blocks of a row
may carry the byte of the block with the largest amax. The result is a valid MXFP8 tensor, one fp32 scale per row
says it all, and an element differs from its own block's value only where it falls into the subnormals.

A row along T is one (feature, group of tokens): the tokens of different experts never share a scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, E4M3_MAX, E4M3_NAN_BYTE, E8M0_BIAS, E8M0_NAN_BYTE, round_up
from mxfp8_titan.reference.grouped_gemm import group_bounds
from mxfp8_titan.reference.quantize import e8m0_from_amax, e8m0_to_float


class Aligned(NamedTuple):
    """A tensor in MXFP8 with one scale per row.

    data: (..., K) float8_e4m3fn
    scale: (...,) fp32, a power of two or NaN; x ~ data * scale.  Along T: (G, K), one per group and feature.
    """

    data: Tensor
    scale: Tensor


def encode(x: Tensor, byte: Tensor) -> Tensor:
    """x * 2**(127 - byte) as E4M3, saturating at +-448; NaN and byte 255 give 0x7f.

    x: fp32
    byte: uint8, broadcast against x
    """
    multiplier = ((2 * E8M0_BIAS - byte.int()) << 23).view(torch.float32)
    scaled = (x * multiplier).clamp(-E4M3_MAX, E4M3_MAX)
    is_nan = scaled.isnan() | (byte == E8M0_NAN_BYTE)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(is_nan, E4M3_NAN_BYTE, data).view(torch.float8_e4m3fn)


def quantize_aligned_along_k(x: Tensor, rounding: str) -> Aligned:
    """x in MXFP8, one scale per row.

    x: (..., K) fp32, bf16 or fp16, any strides
    returns data (..., K) float8_e4m3fn contiguous, scale (...,) fp32
    """
    amax = x.float().abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1], dtype=torch.float32)
    byte = e8m0_from_amax(amax, rounding)
    return Aligned(encode(x.float().contiguous(), byte.unsqueeze(-1)), e8m0_to_float(byte))


def column_amax(x: Tensor, group_ends: Tensor) -> Tensor:
    """(G, K) fp32: the largest magnitude of each feature in each group; 0 in an empty group, NaN kept.

    x: (T, K) fp32, bf16 or fp16; rows past the last group end are ignored
    group_ends: (G,) int32
    """
    amax = x.new_zeros((group_ends.shape[0], x.shape[1]), dtype=torch.float32)
    for group, (start, end) in enumerate(group_bounds(group_ends, x.shape[0])):
        if start < end:
            amax[group] = x[start:end].float().abs().amax(0)
    return amax


def quantize_aligned_along_t(x: Tensor, group_ends: Tensor, rounding: str) -> Aligned:
    """x in MXFP8, one scale per feature and group of tokens, written transposed.

    x: (T, K) fp32, bf16 or fp16, any strides; rows past the last group end are ignored
    group_ends: (G,) int32
    returns data (K, T') float8_e4m3fn contiguous, T' = T rounded up to 32, zero past the last group end;
            scale (G, K) fp32
    """
    byte = e8m0_from_amax(column_amax(x, group_ends), rounding)
    return _encode_groups(x.float(), byte, group_ends)


def requantize_aligned_along_t(x: Aligned, amax: Tensor, group_ends: Tensor, rounding: str) -> Aligned:
    """`quantize_aligned_along_t` of a tensor that is already in FP8 along K, by an exponent shift and a transpose.

    The scales come from the column maxima of the unquantized tensor, so they equal direct quantization's. Under
    RCEIL an element does too, unless it is subnormal in either form; under FLOOR it may saturate twice.

    x: data (T, K), scale (T,)
    amax: (G, K) fp32, `column_amax` of the tensor that x was made from
    group_ends: (G,) int32
    returns data (K, T') float8_e4m3fn contiguous, scale (G, K) fp32
    """
    byte = e8m0_from_amax(amax, rounding)
    return _encode_groups(x.data.float() * x.scale.unsqueeze(-1), byte, group_ends)


def _encode_groups(x: Tensor, byte: Tensor, group_ends: Tensor) -> Aligned:
    rows, features = x.shape
    data = x.new_zeros((features, round_up(rows, BLOCK_SIZE)), dtype=torch.uint8)
    for group, (start, end) in enumerate(group_bounds(group_ends, rows)):
        data[:, start:end] = encode(x[start:end], byte[group]).view(torch.uint8).t()
    return Aligned(data.view(torch.float8_e4m3fn), e8m0_to_float(byte))
