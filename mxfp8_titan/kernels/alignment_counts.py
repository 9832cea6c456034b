"""What aligned exponents do to a tensor, in a sample of its rows. Reference: mxfp8_titan.reference.alignment_counts.

A program a sampled row, and nothing is summed over rows here: no atomics, no zeros to write first, one small launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import ALIGNMENT_COUNTS, BLOCK_SIZE, PHASE_BITS
from mxfp8_titan.kernels.e4m3 import e8m0_from_bits, inv_scale_from_e8m0, magnitude_bits, to_e4m3, to_fp32
from mxfp8_titan.kernels.launch import check_blocks, check_choices, check_groups, check_source, launch

BLOCKS, NUM_WARPS = 64, 4
"""Blocks of 32 that a program holds at once, warps."""

_BLOCK_SIZE = tl.constexpr(BLOCK_SIZE)
_COUNTS = tl.constexpr(ALIGNMENT_COUNTS)
_PHASE_BITS, _PHASE_MASK = tl.constexpr(PHASE_BITS), tl.constexpr((1 << PHASE_BITS) - 1)


@triton.jit
def alignment_counts_kernel(
    x_ptr, out_ptr, phase_ptr, group_ends_ptr, rows, N, K, stride_xe, stride_xt, stride_xk, num_groups, samples,
    ROUNDING: tl.constexpr, GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program counts in one sampled row, which it reads twice: for its scale, then block by block.

    x is `rows` rows, N of each expert. A program whose row does not exist writes zeros. Features past K are masked.
    """
    number = tl.program_id(0).to(tl.int64)
    rows = tl.cast(rows, tl.int64)
    if GROUPS:
        rows = tl.minimum(tl.load(group_ends_ptr + num_groups - 1).to(tl.int64), rows)
    phase = tl.load(phase_ptr) & _PHASE_MASK
    shares = tl.cast(samples, tl.int64) << _PHASE_BITS
    row = tl.where(rows <= samples, number, ((number << _PHASE_BITS) + phase) * rows // shares)
    exists = number < rows
    x_ptr += row // N * stride_xe + row % N * stride_xt
    offs_k = tl.arange(0, BLOCKS)[:, None] * _BLOCK_SIZE + tl.arange(0, _BLOCK_SIZE)[None, :]

    amax = tl.zeros([BLOCKS, _BLOCK_SIZE], tl.int32)
    for start in range(0, K, BLOCKS * _BLOCK_SIZE):
        k = start + offs_k
        x = to_fp32(tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=(k < K) & exists, other=0.0))
        amax = tl.maximum(amax, magnitude_bits(x))
    inv_scale = inv_scale_from_e8m0(e8m0_from_bits(tl.max(tl.max(amax, 1), 0), ROUNDING))

    underflows = tl.zeros([BLOCKS], tl.int32)
    zero_blocks = tl.zeros([BLOCKS], tl.int32)
    saturated = tl.zeros([BLOCKS], tl.int32)
    for start in range(0, K, BLOCKS * _BLOCK_SIZE):
        k = start + offs_k
        x = to_fp32(tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=(k < K) & exists, other=0.0))
        block_amax = tl.max(magnitude_bits(x), 1)
        own_inv_scale = inv_scale_from_e8m0(e8m0_from_bits(block_amax, ROUNDING))
        own = _magnitude(to_e4m3(x * own_inv_scale[:, None]))
        aligned = _magnitude(to_e4m3(x * inv_scale))
        underflows += tl.sum(((aligned == 0) & (own != 0)).to(tl.int32), 1)
        zero_blocks += ((tl.max(aligned, 1) == 0) & (block_amax != 0)).to(tl.int32)
        # 0x7e is 448, 0x7f NaN.
        saturated += tl.sum((aligned == 0x7E).to(tl.int32), 1)

    out_ptr += number * _COUNTS
    tl.store(out_ptr, tl.where(exists, K, 0).to(tl.float32))
    tl.store(out_ptr + 1, tl.sum(underflows, 0).to(tl.float32))
    tl.store(out_ptr + 2, tl.sum(zero_blocks, 0).to(tl.float32))
    tl.store(out_ptr + 3, tl.sum(saturated, 0).to(tl.float32))


@triton.jit
def _magnitude(e4m3):
    """The byte of an E4M3 number (int32) without its sign."""
    return e4m3.to(tl.uint8, bitcast=True).to(tl.int32) & 0x7F


def alignment_counts(x: Tensor, group_ends: Tensor | None, phase: Tensor, rounding: str, samples: int) -> Tensor:
    """(samples, 4) fp32 counts. Arguments as in the reference."""
    check_source(x, "x", (2, 3))
    check_blocks(x.shape[-1], "K")
    check_choices(rounding)
    num_groups, _ = check_groups(group_ends, x, x.shape[0])
    if phase.dtype != torch.int64 or phase.ndim or phase.device != x.device:
        raise ValueError(f"phase is {phase.dtype} {tuple(phase.shape)} on {phase.device}, needs a 0-dim int64 on x's")
    per_expert, features = x.shape[-2:]
    experts, stride_xe = (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)
    rows = experts * per_expert
    out = x.new_empty((samples, ALIGNMENT_COUNTS), dtype=torch.float32)
    if rows == 0 or features == 0:
        return out.zero_()
    launch(
        alignment_counts_kernel, samples, (x, out, phase, group_ends),
        (rows, per_expert, features, stride_xe, x.stride(-2), x.stride(-1), num_groups, samples),
        (rounding, group_ends is not None, BLOCKS), NUM_WARPS,
    )  # fmt: skip
    return out
