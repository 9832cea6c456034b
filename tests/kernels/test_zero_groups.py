import pytest
import torch

from mxfp8_titan.kernels.zero_groups import zero_empty_groups


@pytest.mark.parametrize("shape", [(32, 64), (96, 160)])
def test_empty_groups_are_zero_and_the_others_as_before(device, shape):
    out = torch.full((4, *shape), float("nan"), device=device)
    zero_empty_groups(out, torch.tensor([0, 32, 32, 64], dtype=torch.int32, device=device))
    assert (out[[0, 2]] == 0).all()
    assert out[[1, 3]].isnan().all()


def test_nothing_to_write_is_legal(device):
    zero_empty_groups(torch.empty((1, 0, 32), device=device), torch.tensor([0], dtype=torch.int32, device=device))
