"""Rows past the last group become zeros, and no other element changes."""

import pytest
import torch

from mxfp8_titan.kernels.zero_rows import BLOCK, PROGRAMS, zero_rows_past


def ends_of(device, *ends):
    return torch.tensor(ends, device=device, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [[0], [3, 3, 5], [40], [39]], ids=str)
@pytest.mark.parametrize("features", [1, 33, 64])
def test_rows_past_the_last_group_become_zeros(device, dtype, ends, features):
    out = torch.full((40, features), float("nan"), device=device, dtype=dtype)
    out[: ends[-1]] = torch.randn(ends[-1], features, device=device).to(dtype)
    expected = out.clone()
    expected[ends[-1] :] = 0
    zero_rows_past(out, ends_of(device, *ends))
    assert torch.equal(out, expected)


def test_a_program_takes_several_blocks(device, monkeypatch):
    monkeypatch.setattr("mxfp8_titan.kernels.zero_rows.PROGRAMS", 2)
    out = torch.ones(4 * BLOCK, 2, device=device)
    zero_rows_past(out, ends_of(device, 3))
    assert out[:3].all()
    assert not out[3:].any()


def test_no_rows_are_legal(device):
    zero_rows_past(torch.empty(0, 8, device=device), ends_of(device, 0, 0))


def test_wrong_arguments_are_named(device):
    with pytest.raises(ValueError, match="needs contiguous rows"):
        zero_rows_past(torch.empty(8, 8, device=device)[:, ::2], ends_of(device, 0))
    with pytest.raises(TypeError, match="out is torch.int32"):
        zero_rows_past(torch.empty(8, 8, device=device, dtype=torch.int32), ends_of(device, 0))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(gpu):
    out = torch.ones(2**16 + 64, 2**15 + 8, device=gpu, dtype=torch.bfloat16)
    zero_rows_past(out, ends_of(gpu, 7, 2**16 - 2))
    assert out[2**16 - 3].all()
    assert not out[2**16 - 2 :].any()
    assert out.numel() > 2**31 + BLOCK * PROGRAMS
    zero_rows_past(out, ends_of(gpu, 1))
    assert out[0].all()
    assert not out[1:].any()
