import pytest
import torch

from mxfp8_titan.autograd.permute import CombineFunction, DispatchFunction
from mxfp8_titan.backends import permutation


def _permutation(rows, device):
    slot = torch.randperm(rows, device=device)
    row = torch.empty_like(slot)
    row[slot] = torch.arange(rows, device=device)
    return slot, row


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gradients_of_dispatch_are_those_of_indexing(top_k, device):
    slot, row = _permutation(12 * top_k, device)
    x, scale = torch.randn(12, 64, device=device), torch.rand(12 * top_k, device=device)
    dy = torch.randn(12 * top_k, 64, device=device)
    results = []
    for move in (
        lambda x, s: DispatchFunction.apply(x, s, slot, row, top_k),
        lambda x, s: x[slot // top_k] * s[:, None],
    ):
        leaves = x.clone().requires_grad_(), scale.clone().requires_grad_()
        y = move(*leaves)
        y.backward(dy)
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("with_base", [True, False])
def test_gradients_of_combine_are_those_of_a_scatter_and_a_sum(top_k, with_base, device):
    slot, row = _permutation(12 * top_k, device)
    rows, base = torch.randn(12 * top_k, 64, device=device), torch.randn(12, 64, device=device)
    dy = torch.randn(12, 64, device=device)
    results = []
    for move in (
        lambda r, b: CombineFunction.apply(r, b, slot, row, top_k),
        lambda r, b: (0 if b is None else b) + torch.zeros_like(r).index_copy(0, slot, r).view(-1, top_k, 64).sum(1),
    ):
        leaves = rows.clone().requires_grad_(), base.clone().requires_grad_() if with_base else None
        y = move(*leaves)
        y.backward(dy)
        results.append((y.detach(), leaves[0].grad, *([leaves[1].grad] if with_base else [])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_the_ops_pass_torch_s_own_check(device):
    slot, row = _permutation(12, device)
    x, rows, scale = (torch.randn(shape, device=device) for shape in ((6, 64), (12, 64), (12,)))
    torch.library.opcheck(permutation.gather_rows, (x, slot, 2, scale))
    torch.library.opcheck(permutation.gather_rows, (x, slot, 2, None))
    for base in (x, torch.randn(64, 6, device=device).t()):
        torch.library.opcheck(permutation.sum_rows, (rows, row, 2, None, base))
    torch.library.opcheck(permutation.gather_rows_backward, (rows, x, row, 2, scale))
