"""Column maxima of row-wise kernels: each program leaves its own in scratch memory, one small launch merges them.

Atomic maxima would need no second launch, but an H200 does about 100 of them per nanosecond, all of them at the end of
the kernel, when every program is done: 8 to 20 % of the kernel's time. Written and read again, the same words cost 2 %,
amax needs no zeros first, and the launch that wrote those is the one that merges.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.launch import ceil_div, launch

PROGRAMS = 264
"""Programs that gather maxima, two on each of 132 multiprocessors: few, since each leaves a whole row of them."""

MIN_ROWS = 16
"""Fewest rows of such a program."""

ROWS, COLUMNS, NUM_WARPS = 32, 64, 4
"""Maxima that the merging kernel holds at once, warps."""


@triton.jit
def merge_maxima_kernel(
    partial_ptr, amax_ptr, group_ends_ptr, K, rows_per_program, programs, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program merges the maxima of COLUMNS features of one group; the grid is groups x such pieces.

    With GROUPS, a group's programs are as many as `groups.find_group` counts; without, each group has `programs`.
    """
    tiles_k = tl.cdiv(K, COLUMNS)
    group = tl.program_id(0) // tiles_k
    if GROUPS > 0:
        number = tl.arange(0, GROUPS)
        exists = number < num_groups
        ends = tl.load(group_ends_ptr + number, mask=exists, other=0)
        starts = tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0)
        programs_of = (ends - starts + rows_per_program - 1) // rows_per_program
        first = tl.sum(tl.where(number < group, programs_of, 0), 0)
        count = tl.sum(tl.where(number == group, programs_of, 0), 0)
    else:
        first = group * programs
        count = programs
    row = tl.arange(0, ROWS)[:, None]
    k = tl.program_id(0) % tiles_k * COLUMNS + tl.arange(0, COLUMNS)
    bits_ptr = partial_ptr + first.to(tl.int64) * K + k[None, :]
    maxima = tl.zeros([ROWS, COLUMNS], tl.int32)
    for i in range(0, count, ROWS):
        mask = (i + row < count) & (k[None, :] < K)
        maxima = tl.maximum(maxima, tl.load(bits_ptr + (i + row).to(tl.int64) * K, mask=mask, other=0))
    out = tl.max(maxima, 0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + group.to(tl.int64) * K + k, out, mask=k < K)


@triton.jit
def store_maxima(partial_ptr, number, bits, start, K, SIZE: tl.constexpr):
    """Leaves the maxima of columns `start` on, as the bits (SIZE,) of fp32 numbers, in row `number` (int64)."""
    k = start + tl.arange(0, SIZE)
    tl.store(partial_ptr + number * K + k, bits, mask=k < K)


def share_rows(rows: int, experts: int, num_groups: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """(rows per program, programs of an expert), so that about `programs` of them do all experts or groups.

    A program's rows lie in one expert and one group.
    """
    wanted = max(programs - num_groups, programs // 4) if num_groups else max(programs // experts, 1)
    each = max(min(max(ceil_div(rows, wanted), MIN_ROWS), rows), 1)
    return each, ceil_div(rows, each) + num_groups


def merge_maxima(
    partial: Tensor, amax: Tensor, group_ends: Tensor | None, rows_per_program: int, programs: int,
    num_groups: int, groups: int,
) -> None:  # fmt: skip
    """Fills amax (G, K) fp32, zeros for empty groups.

    partial: (programs of all experts, K) int32, bits of fp32 numbers
    programs: of an expert, or of all groups
    num_groups, groups: as launch.check_groups returns them
    """
    features = amax.shape[1]
    grid = amax.shape[0] * ceil_div(features, COLUMNS)
    if grid:
        launch(
            merge_maxima_kernel,
            grid,
            (partial, amax, group_ends),
            (features, rows_per_program, programs, num_groups),
            (groups, ROWS, COLUMNS),
            NUM_WARPS,
        )


def new_partial(x: Tensor, programs: int, features: int) -> Tensor:
    """Scratch for the maxima of `programs` programs."""
    return x.new_empty((programs, features), dtype=torch.int32)
