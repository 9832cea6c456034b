import pytest
import torch

from mxfp8_titan.kernels import zero_groups
from mxfp8_titan.kernels.zero_groups import zero_empty_groups


@pytest.mark.parametrize("shape", [(32, 64), (96, 160)])
def test_empty_groups_are_zero_and_the_others_as_before(device, shape):
    out = torch.full((4, *shape), float("nan"), device=device)
    zero_empty_groups(out, torch.tensor([0, 32, 32, 64], dtype=torch.int32, device=device))
    assert (out[[0, 2]] == 0).all()
    assert out[[1, 3]].isnan().all()


def test_nothing_to_write_is_legal(device):
    zero_empty_groups(torch.empty((1, 0, 32), device=device), torch.tensor([0], dtype=torch.int32, device=device))


def test_wrong_arguments_are_named(device, monkeypatch):
    out, ends = torch.zeros(2, 32, 64, device=device), torch.tensor([0, 32], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out is \(2, 32, 64\), group_ends has 3 entries"):
        zero_empty_groups(out, torch.tensor([0, 32, 32], dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="needs to be contiguous"):
        zero_empty_groups(out.mT, ends)
    monkeypatch.setattr(zero_groups, "MAX_ELEMENTS", 2047)
    with pytest.raises(ValueError, match="needs at most 2047 elements a group"):
        zero_empty_groups(out, ends)
