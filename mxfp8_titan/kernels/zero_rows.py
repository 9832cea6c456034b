"""Zeros in the rows past the last group, which a grouped GEMM does not write. Reference: tensor[group_ends[-1]:] = 0.

No op of its own: it changes a tensor in place, so it is called inside the op that has just made that tensor.
"""

import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.launch import ceil_div, check_groups, check_source, launch

BLOCK, NUM_WARPS, PROGRAMS = 2048, 4, 528
"""Elements that a program writes at once, warps, programs: four on each of 132 multiprocessors."""


@triton.jit
def zero_rows_kernel(out_ptr, group_ends_ptr, T, N, num_groups, programs, BLOCK: tl.constexpr):
    """One program writes every `programs`-th BLOCK of the elements past the last group; none when there are none."""
    start = tl.load(group_ends_ptr + num_groups - 1).to(tl.int64) * N
    left = tl.cast(T, tl.int64) * N - start
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, left, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + start + at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=at < left)


def zero_rows_past(out: Tensor, group_ends: Tensor) -> None:
    """Writes zeros into rows group_ends[-1] and on of `out`, in place, without a wait for the device.

    out: (T, N) fp32, bf16 or fp16 contiguous
    group_ends: (G,) int32
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(out, "out", (2,))
    if not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, needs contiguous rows")
    rows, features = out.shape
    num_groups, _ = check_groups(group_ends, out, rows)
    programs = min(ceil_div(rows * features, BLOCK), PROGRAMS)
    if programs:
        launch(
            zero_rows_kernel, programs, (out, group_ends), (rows, features, num_groups, programs), (BLOCK,), NUM_WARPS
        )
