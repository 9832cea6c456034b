"""Zeros in the dw of groups without tokens, which a grouped GEMM may not write. Reference: tensor[sizes == 0] = 0.

No op of its own: it changes a tensor in place, so it is called inside the op that has just made that tensor.
"""

import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.launch import ceil_div, check_groups, check_source, launch

BLOCK, NUM_WARPS, PROGRAMS = 2048, 4, 64
"""Elements that a program writes at once, warps, programs per group."""

MAX_ELEMENTS = 2**31 - 1 - PROGRAMS * BLOCK
"""Of a group, so that the offset after the last one still is an int32."""


@triton.jit
def zero_groups_kernel(out_ptr, group_ends_ptr, elements, programs, BLOCK: tl.constexpr):
    """One program writes every `programs`-th BLOCK of its group's elements if the group is empty, else nothing."""
    group = tl.program_id(0) // programs
    begin = tl.load(group_ends_ptr + group - 1, mask=group > 0, other=0)
    if begin == tl.load(group_ends_ptr + group):
        start = group.to(tl.int64) * elements
        for first in range((tl.program_id(0) % programs) * BLOCK, elements, programs * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(out_ptr + start + at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=at < elements)


def zero_empty_groups(out: Tensor, group_ends: Tensor) -> None:
    """Writes zeros into out[e] of every group e without tokens, in place, without a wait for the device.

    out: (E, N, K) fp32, bf16 or fp16 contiguous, N * K at most MAX_ELEMENTS
    group_ends: (E,) int32
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    check_source(out, "out", (3,))
    if not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, needs to be contiguous")
    num_groups, _ = check_groups(group_ends, out, 2**31 - 1)
    if num_groups != out.shape[0]:
        raise ValueError(f"out is {tuple(out.shape)}, group_ends has {num_groups} entries: it needs one a matrix")
    elements = out.shape[1] * out.shape[2]
    if elements > MAX_ELEMENTS:
        raise ValueError(f"out is {tuple(out.shape)}, needs at most {MAX_ELEMENTS} elements a group: offsets are int32")
    programs = min(ceil_div(elements, BLOCK), PROGRAMS)
    if num_groups * programs:
        launch(zero_groups_kernel, num_groups * programs, (out, group_ends), (elements, programs), (BLOCK,), NUM_WARPS)
