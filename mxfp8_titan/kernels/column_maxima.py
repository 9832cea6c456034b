"""Column maxima of row-wise kernels: each program leaves its own in scratch memory, one small launch merges them.

Atomic maxima would need no second launch, but an H200 does about 100 of them per nanosecond, all of them at the end of
the kernel, when every program is done. Written and read again, the same words cost less, amax needs no zeros first, and
the launch that wrote those is the one that merges.

Programs are dealt to groups on the device, as many to each as its size asks for, and share its rows equally.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.kernels.launch import ceil_div, launch, new_tensor

MAX_PROGRAMS = 8
"""On a multiprocessor: few, since each leaves a whole row of maxima."""

MIN_ROWS = 16
"""Fewest rows of a program."""

ROWS, COLUMNS, NUM_WARPS = (32, 16), (32, 128), 4
"""Maxima that the merging kernel holds at once, of one group and of several, which have fewer programs each; warps."""


@triton.jit
def programs_of_groups(programs, T, group_ends_ptr, num_groups, GROUPS: tl.constexpr):
    """(start, end, count) (GROUPS,): each group's rows, and how many of the programs work on it, 0 on an empty one.

    A group of n rows gets ceil(n / rows). Of 16 values for `rows`, from that which would do without a remainder to
    that which does for any groups, the smallest is taken with which the programs suffice.
    """
    number = tl.arange(0, GROUPS)
    exists = number < num_groups
    end = tl.minimum(tl.load(group_ends_ptr + number, mask=exists, other=0), T)
    start = tl.minimum(tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0), T)
    size = tl.where(exists, end - start, 0)
    rows = tl.cdiv(tl.sum(size, 0), programs - tl.arange(0, 16) * num_groups // 15)
    rows = tl.maximum(rows, 1)
    wanted = tl.sum(tl.cdiv(size[None, :], rows[:, None]), 1)
    count = tl.cdiv(size, tl.min(tl.where(wanted <= programs, rows, tl.maximum(T, 1)), 0))
    return start, end, count


@triton.jit
def share_of(program, programs, T, group_ends_ptr, num_groups, GROUPS: tl.constexpr):
    """(first, end, owned): the rows that a program works on, none perhaps, and how many rows are in any group.

    Without GROUPS there is one group of T rows.
    """
    if GROUPS > 0:
        start, end, count = programs_of_groups(programs, T, group_ends_ptr, num_groups, GROUPS)
        last = tl.cumsum(count, 0)
        mine = (last - count <= program) & (program < last)
        start = tl.sum(tl.where(mine, start, 0), 0)
        end = tl.sum(tl.where(mine, end, 0), 0)
        base = tl.sum(tl.where(mine, last - count, 0), 0)
        each = tl.cdiv(end - start, tl.maximum(tl.sum(tl.where(mine, count, 0), 0), 1))
        first = start + (program - base) * each
        owned = tl.minimum(tl.load(group_ends_ptr + num_groups - 1), T)
        return first, tl.minimum(first + each, end), owned
    else:  # noqa: RET505 - one branch is compiled
        each = tl.cdiv(T, programs)
        return program * each, tl.minimum(program * each + each, T), T


@triton.jit
def store_maxima(partial_ptr, bits, start, K, SIZE: tl.constexpr):
    """Leaves the maxima of columns `start` on, as the bits (SIZE,) of fp32 numbers."""
    k = start + tl.arange(0, SIZE)
    tl.store(partial_ptr + k, bits, mask=k < K)


@triton.jit
def merge_maxima_kernel(
    partial_ptr, amax_ptr, group_ends_ptr, T, K, programs, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program merges the maxima of COLUMNS features of one group; the grid is groups x such pieces.

    Without GROUPS, each group has `programs` rows of its own.
    """
    tiles_k = tl.cdiv(K, COLUMNS)
    group = tl.program_id(0) // tiles_k
    if GROUPS > 0:
        _, _, counts = programs_of_groups(programs, T, group_ends_ptr, num_groups, GROUPS)
        number = tl.arange(0, GROUPS)
        first = tl.sum(tl.where(number < group, counts, 0), 0)
        count = tl.sum(tl.where(number == group, counts, 0), 0)
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


def programs_for(
    multiprocessors: int, rows: int, experts: int, num_groups: int, bytes_on_their_way: int, wanted: int
) -> int:
    """Programs of an expert, or of all groups, so that those on a multiprocessor wait for about `wanted` bytes at once.

    bytes_on_their_way: of one program
    """
    programs = min(max(wanted // bytes_on_their_way, 1), MAX_PROGRAMS) * multiprocessors
    programs = min(max(programs // experts, 1), ceil_div(rows, MIN_ROWS))
    if num_groups:
        # More than there are groups, since programs_of_groups divides by the difference.
        return programs if programs >= 2 * num_groups else max(programs // 2, 1) + num_groups
    # Each has rows then: what a program without any would leave, no one would have written.
    return ceil_div(rows, ceil_div(rows, programs))


def new_partial(x: Tensor, programs: int, features: int) -> Tensor:
    """Scratch for the maxima."""
    return new_tensor(x, (programs, features), torch.int32)


def merge_maxima(
    partial: Tensor, amax: Tensor, group_ends: Tensor | None, tokens: int, programs: int, groups: tuple[int, int]
) -> None:
    """Fills amax (G, K) fp32, zeros for empty groups.

    partial: (programs, K) int32, bits of fp32 numbers; (G * programs, K) without group_ends
    groups: as launch.check_groups returns them
    """
    num_amax, features = amax.shape
    columns = COLUMNS[num_amax > 1]
    grid = num_amax * ceil_div(features, columns)
    if grid:
        launch(
            merge_maxima_kernel,
            grid,
            (partial, amax, group_ends),
            (tokens, features, programs, groups[0]),
            (groups[1], ROWS[num_amax > 1], columns),
            NUM_WARPS,
        )
