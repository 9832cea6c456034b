import pytest
import torch

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import RCEIL
from mxfp8_titan.job_config import Recipe
from tests.oracles import RCEIL_RECIPE, SQNR_BUDGETS, sqnr


def _forward_backward(x, w, dy, counts, recipe=RCEIL_RECIPE):
    ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = LinearFunction.apply(x, w, ends, recipe, REFERENCE, x.dtype)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def _data(t, n, k, experts, device, dtype=torch.float32):
    return (torch.randn(*shape, device=device).to(dtype) for shape in ((t, k), (experts, n, k), (t, n)))


@pytest.mark.parametrize(("recipe", "budget"), SQNR_BUDGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sqnr_of_y_dx_and_dw_on_normal_data_meets_the_budget(recipe, budget, dtype, device):
    counts = [256, 0, 480, 32]
    x, w, dy = _data(768, 256, 512, 4, device, dtype)
    y, dx, dw = _forward_backward(x, w, dy, counts, recipe)
    start = 0
    exact_y, exact_dx, exact_dw = (
        torch.zeros_like(y).double(),
        torch.zeros_like(dx).double(),
        torch.zeros_like(dw).double(),
    )
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        exact_y[rows] = x[rows].double() @ w[expert].double().t()
        exact_dx[rows] = dy[rows].double() @ w[expert].double()
        exact_dw[expert] = dy[rows].double().t() @ x[rows].double()
        start += count
    assert min(sqnr(y, exact_y), sqnr(dx, exact_dx), sqnr(dw, exact_dw)) >= budget


@pytest.mark.parametrize("counts", [[32, 0, 64], [33, 31, 64], [0, 0, 0], [8, 16, 64], [0, 0, 0, 160], [1] * 33])
def test_each_group_equals_a_dense_layer_of_its_own(counts, device):
    x, w, dy = _data(160, 64, 96, len(counts), device)
    y, dx, dw = _forward_backward(x, w, dy, counts)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        xe, we = x[rows].detach().requires_grad_(), w[expert].detach().requires_grad_()
        ye = LinearFunction.apply(xe, we, None, RCEIL_RECIPE, REFERENCE, torch.float32)
        ye.backward(dy[rows])
        assert torch.equal(y[rows], ye)
        assert torch.equal(dx[rows], xe.grad)
        assert torch.equal(dw[expert], we.grad)
        start += count
    assert (y[start:] == 0).all()
    assert (dx[start:] == 0).all()


@pytest.mark.parametrize("wgrad_in_mxfp8", [True, False])
@pytest.mark.parametrize("garbage", [float("nan"), 1e30, 448.0, float("inf")])
def test_rows_past_the_last_group_influence_nothing(garbage, wgrad_in_mxfp8, device):
    recipe = Recipe("mxfp8_emulated_rceil", RCEIL, wgrad_in_mxfp8=wgrad_in_mxfp8)
    counts = [64, 0, 32]
    x, w, dy = _data(544, 64, 96, 3, device, torch.bfloat16)
    x[96:], dy[96:] = 0, 0
    clean = _forward_backward(x, w, dy, counts, recipe)
    x[96:], dy[96:] = garbage, garbage
    dirty = _forward_backward(x, w, dy, counts, recipe)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert (dirty[0][96:] == 0).all()


@pytest.mark.parametrize("wgrad_in_mxfp8", [True, False])
def test_idle_experts_get_zero_gradients_and_not_none(wgrad_in_mxfp8, device):
    recipe = Recipe("mxfp8_emulated_rceil", RCEIL, wgrad_in_mxfp8=wgrad_in_mxfp8)
    x, w, dy = _data(32, 32, 32, 256, device, torch.bfloat16)
    # Freed memory full of NaN is what an unwritten gradient would be made of.
    del_me = torch.full((256, 32, 32), float("nan"), device=device)
    del del_me
    _, _, dw = _forward_backward(x, w, dy, [32] + [0] * 255, recipe)
    assert (dw[1:] == 0).all()
    assert dw[0].abs().sum() > 0


def test_no_tokens_at_all_give_empty_outputs_and_zero_weight_gradients(device):
    x, w, dy = _data(0, 64, 96, 16, device)
    y, dx, dw = _forward_backward(x, w, dy, [0] * 16)
    assert (y.shape, dx.shape) == ((0, 64), (0, 96))
    assert (dw == 0).all()


@pytest.mark.parametrize("dy_of", [lambda t, n: torch.randn(n, t).t(), lambda t, n: torch.randn(1, 1).expand(t, n)])
def test_a_gradient_of_any_strides_gives_the_contiguous_one_s_result(dy_of, device):
    x, w, _ = _data(96, 64, 96, 3, device)
    dy = dy_of(96, 64).to(device)
    counts = [32, 0, 64]
    strided, contiguous = _forward_backward(x, w, dy, counts), _forward_backward(x, w, dy.contiguous(), counts)
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


def test_frozen_experts_have_no_weight_gradient(device):
    x, w, dy = _data(64, 64, 96, 2, device)
    x.requires_grad_()
    ends = torch.tensor([32, 64], dtype=torch.int32, device=device)
    LinearFunction.apply(x, w, ends, RCEIL_RECIPE, REFERENCE, x.dtype).backward(dy)
    assert x.grad is not None
    assert w.grad is None
