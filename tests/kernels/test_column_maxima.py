"""How rows are dealt to programs. That maxima are right, the tests of the kernels that gather them show."""

import pytest
import torch
import triton
import triton.language as tl

from mxfp8_titan.kernels.column_maxima import programs_for, share_of
from mxfp8_titan.kernels.launch import ceil_div, launch, next_power_of_2


@triton.jit
def shares_kernel(group_ends_ptr, out_ptr, programs, T, num_groups, GROUPS: tl.constexpr):
    """One program writes (first, end) of its share."""
    program = tl.program_id(0)
    first, end, _ = share_of(program, programs, T, group_ends_ptr, num_groups, GROUPS)
    tl.store(out_ptr + 2 * program, first)
    tl.store(out_ptr + 2 * program + 1, end)


def shares(device, sizes, programs, tokens):
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    out = torch.full((programs, 2), -1, device=device, dtype=torch.int32)
    launch(shares_kernel, programs, (ends, out), (programs, tokens, len(sizes)), (next_power_of_2(len(sizes)),), 4)
    return out.tolist()


@pytest.mark.parametrize("sizes", [[4096], [256] * 16, [0, 100, 0, 3000, 1, 0], [33] * 33, [0, 0]], ids=str)
@pytest.mark.parametrize("tail", [0, 500])
def test_each_row_of_a_group_has_one_program_and_no_program_has_two_groups(device, sizes, tail):
    tokens = sum(sizes) + tail
    programs = programs_for(132, tokens, 1, len(sizes), 1, 1)
    given = shares(device, sizes, programs, tokens)
    owner = [0] * sum(sizes)
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    for first, end in given:
        assert len(set(group_of[first:end])) <= 1
        for row in range(first, end):
            owner[row] += 1
    assert owner == [1] * sum(sizes)


def test_equal_groups_get_equal_shares(device):
    sizes = [end - first for first, end in shares(device, [256] * 16, 132, 4096)]
    assert sorted(sizes) == [0] * 4 + [32] * 128


MULTIPROCESSORS = [2, 114, 132, 148]
"""What the interpreter counts with, and what an H100 PCIe, an H200 and a B200 have."""


@pytest.mark.parametrize("count", MULTIPROCESSORS)
@pytest.mark.parametrize("groups", [1, 2, 7, 300])
def test_there_are_more_programs_than_groups(groups, count):
    assert all(programs_for(count, rows, 1, groups, 1, 1) > groups for rows in (1, 15, 17, 100, 4096, 131073))


@pytest.mark.parametrize("count", MULTIPROCESSORS)
@pytest.mark.parametrize("experts", [1, 3, 300])
def test_without_groups_every_program_has_rows(experts, count):
    for rows in (1, 15, 17, 100, 2048, 4096, 4225, 131073):
        programs = programs_for(count, rows, experts, 0, 32 * 1024, 64 * 1024)
        each = ceil_div(rows, programs)
        assert (programs - 1) * each < rows <= programs * each
