"""What aligned exponents do to a tensor, counted in a sample of its rows.

A row's blocks of 32 share the row's largest exponent (reference.quantize_aligned). That costs an element nothing
unless it falls into the subnormals or below; what falls below is what these counts are about.
"""

import torch
from torch import Tensor

from mxfp8_titan.format import ALIGNMENT_COUNTS, BLOCK_SIZE, E4M3_MAX, PHASE_BITS
from mxfp8_titan.reference.quantize import quantize_along_k
from mxfp8_titan.reference.quantize_aligned import quantize_aligned_along_k


def sampled_rows(rows: int, samples: int, phase: int) -> Tensor:
    """(min(rows, samples),) int64: all rows when they are few, else one out of each of `samples` equal shares.

    phase: which one, in steps of 1 / 2**16 of a share; only its lower 16 bits count. Over all phases every row is drawn
            equally often.
    """
    number = torch.arange(min(rows, samples))
    if rows <= samples:
        return number
    return ((number << PHASE_BITS) + phase % (1 << PHASE_BITS)) * rows // (samples << PHASE_BITS)


def alignment_counts(x: Tensor, group_ends: Tensor | None, phase: Tensor, rounding: str, samples: int) -> Tensor:
    """(samples, 4) fp32, one line for each sampled row and zeros for those that x lacks:

        elements    K
        underflows  elements that the row's scale makes zero and their own block's would not
        zero blocks blocks of 32 that become zeros though x has something there
        saturated   elements that become +-448

    x: (T, K) or (E, N, K) fp32, bf16 or fp16, any strides; K a multiple of 32
    group_ends: (G,) int32, or None. Rows from the last one on are not sampled.
    phase: 0-dim int64, see `sampled_rows`
    Raises: ValueError when K is not a multiple of 32.
    """
    x = x.flatten(0, -2)
    rows = x.shape[0] if group_ends is None else min(int(group_ends[-1]), x.shape[0])
    picked = x[sampled_rows(rows, samples, int(phase)).to(x.device)].float()
    # Checks K and the rounding too.
    own = quantize_along_k(picked, rounding).data.float()
    aligned = quantize_aligned_along_k(picked, rounding).data.float()
    is_zero = aligned == 0
    zero_blocks = _blocks(is_zero).all(-1) & _blocks(picked != 0).any(-1)
    counts = (
        torch.ones_like(is_zero),
        is_zero & (own != 0),
        zero_blocks,
        aligned.abs() == E4M3_MAX,
    )
    out = x.new_zeros((samples, ALIGNMENT_COUNTS), dtype=torch.float32)
    out[: len(picked)] = torch.stack([count.sum(1) for count in counts], 1).float()
    return out


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, BLOCK_SIZE))
