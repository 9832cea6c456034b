"""MXFP8 whose blocks share the largest exponent of their row: what FP8 tensor cores without MX scales can multiply.

A power-of-two scale never changes an E4M3 element's mantissa, only whether it underflows. So all blocks of a row
may carry the byte of the block with the largest amax. The result is a valid MXFP8 tensor, one fp32 scale per row
says it all, and an element differs from its own block's value only where it falls into the subnormals.

A row along T is one (feature, group of tokens): the tokens of different experts never share a scale. Along T each
group starts at a multiple of 128 columns, so that GEMM kernels, which work on tiles, meet one group in a tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxfp8_titan.format import (
    BLOCK_SIZE,
    E4M3_MAX,
    E4M3_NAN_BYTE,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    GROUP_TILE,
    round_up,
)
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


def column_amax(x: Tensor, group_ends: Tensor | None) -> Tensor:
    """(G, K) fp32: the largest magnitude of each feature in each group; 0 in an empty group, NaN kept.

    x: (T, K) fp32, bf16 or fp16; rows past the last group end are ignored
    group_ends: (G,) int32, or None for one group
    """
    bounds = _bounds(group_ends, x.shape[0])
    amax = x.new_zeros((len(bounds), x.shape[1]), dtype=torch.float32)
    for group, (start, end) in enumerate(bounds):
        if start < end:
            amax[group] = x[start:end].float().abs().amax(0)
    return amax


def quantize_aligned_along_t(x: Tensor, group_ends: Tensor | None, rounding: str) -> Aligned:
    """x in MXFP8, one scale per feature and group of tokens, written transposed.

    x: (T, K) fp32, bf16 or fp16, any strides; rows past the last group end are ignored
    group_ends: (G,) int32, any sizes, or None for one group
    returns data (K, T') float8_e4m3fn contiguous, zero where no token is (or NaN where the group's scale is):
            T' = T rounded up to 32, with group_ends 128 * G more, group g in front of column `padded_group_ends`[g];
            scale (G, K) fp32
    """
    byte = e8m0_from_amax(column_amax(x, group_ends), rounding)
    return _encode_groups(x.float(), byte, group_ends)


def requantize_aligned_along_t(x: Aligned, amax: Tensor, group_ends: Tensor | None, rounding: str) -> Aligned:
    """`quantize_aligned_along_t` of a tensor that is already in FP8 along K, by an exponent shift and a transpose.

    The scales come from the column maxima of the unquantized tensor, so they equal direct quantization's. Under
    RCEIL an element does too, unless it is subnormal in either form; under FLOOR it may saturate twice.

    x: data (T, K), scale (T,)
    amax: (G, K) fp32, `column_amax` of the tensor that x was made from
    group_ends: (G,) int32, or None for one group
    returns what `quantize_aligned_along_t` does
    """
    byte = e8m0_from_amax(amax, rounding)
    return _encode_groups(x.data.float() * x.scale.unsqueeze(-1), byte, group_ends)


def quantize_aligned_weights(ws: list[Tensor], rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights joined along N, one scale per row, and the column maxima of each expert: (data, scale, amax).

    ws: (E, N_i, K) or (N_i, K) fp32, bf16 or fp16, any strides
    returns data (E, sum N_i, K) float8_e4m3fn contiguous, scale (E, sum N_i) fp32, amax (E, K) fp32;
            (sum N_i, K), (sum N_i,) and (1, K) for 2D weights
    """
    w = torch.cat([w.float() for w in ws], -2)
    experts = w.unsqueeze(0) if w.ndim == 2 else w
    amax = torch.cat([column_amax(expert, None) for expert in experts])
    return *quantize_aligned_along_k(w, rounding), amax


def quantize_aligned_weights_along_n(ws: list[Tensor], amax: Tensor, rounding: str) -> Aligned:
    """Weights joined along N, one scale per feature of K from `amax`, written transposed.

    ws, amax: as above
    returns data (E, K, sum N_i) float8_e4m3fn contiguous, scale (E, K) fp32; (K, sum N_i) and (K,) for 2D weights
    """
    w = torch.cat([w.float() for w in ws], -2)
    byte = e8m0_from_amax(amax if w.ndim == 3 else amax[0], rounding)
    return Aligned(encode(w.mT.contiguous(), byte.unsqueeze(-1)), e8m0_to_float(byte))


def padded_group_ends(group_ends: Tensor) -> Tensor:
    """(G,) int32: ends of the groups along T when each takes up whole tiles of 128 columns, padding counted in.

    group_ends: (G,) int32
    """
    tiles = (group_ends.diff(prepend=group_ends.new_zeros(1)) + GROUP_TILE - 1) // GROUP_TILE
    return (tiles.cumsum(0) * GROUP_TILE).to(torch.int32)


def _bounds(group_ends: Tensor | None, rows: int) -> list[tuple[int, int]]:
    return [(0, rows)] if group_ends is None else group_bounds(group_ends, rows)


def _encode_groups(x: Tensor, byte: Tensor, group_ends: Tensor | None) -> Aligned:
    rows, features = x.shape
    columns = round_up(rows, BLOCK_SIZE)
    column_ends = [columns]
    if group_ends is not None:
        columns += GROUP_TILE * group_ends.shape[0]
        column_ends = padded_group_ends(group_ends).tolist()
    data = x.new_zeros((features, columns), dtype=torch.uint8)
    first = 0
    for group, (start, end) in enumerate(_bounds(group_ends, rows)):
        padding = (0, 0, 0, column_ends[group] - first - (end - start))
        encoded = encode(pad(x[start:end], padding), byte[group]).view(torch.uint8)
        data[:, first : column_ends[group]] = encoded.t()
        first = column_ends[group]
    return Aligned(data.view(torch.float8_e4m3fn), e8m0_to_float(byte))
