import pytest
import torch

from mxfp8_titan.autograd.linear import LinearFunction
from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import RCEIL
from mxfp8_titan.job_config import Recipe
from mxfp8_titan.reference.quantize import dequantize, quantize_along_k, quantize_along_n, quantize_along_t
from tests.oracles import FLOOR_RECIPE, RCEIL_RECIPE, SQNR_BUDGETS, sqnr


def _forward_backward(x, w, dy, recipe=RCEIL_RECIPE, out_dtype=None):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = LinearFunction.apply(x, w, None, recipe, REFERENCE, out_dtype or x.dtype)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def _data(t, n, k, device, dtype=torch.float32):
    return (torch.randn(*shape, device=device).to(dtype) for shape in ((t, k), (n, k), (t, n)))


@pytest.mark.parametrize(("recipe", "budget"), SQNR_BUDGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sqnr_of_y_dx_and_dw_on_normal_data_meets_the_budget(recipe, budget, dtype, device):
    x, w, dy = _data(768, 512, 1024, device, dtype)
    y, dx, dw = _forward_backward(x, w, dy, recipe)
    assert sqnr(y, x.double() @ w.double().t()) >= budget
    assert sqnr(dx, dy.double() @ w.double()) >= budget
    assert sqnr(dw, dy.double().t() @ x.double()) >= budget


def test_the_budget_would_catch_e5m2_gradients(device):
    _, w, dy = _data(768, 512, 1024, device)
    e5m2 = dy.to(torch.float8_e5m2).float()
    w_along_n = dequantize(quantize_along_n(w, RCEIL)).t()
    assert sqnr(e5m2 @ w_along_n, dy.double() @ w.double()) < 25


@pytest.mark.parametrize("recipe", [RCEIL_RECIPE, FLOOR_RECIPE])
def test_each_product_equals_the_float64_product_of_its_own_operands(recipe, device):
    x, w, dy = _data(64, 96, 160, device)
    y, dx, dw = _forward_backward(x, w, dy, recipe)
    along = {q.__name__: lambda v, q=q: dequantize(q(v, recipe.rounding)).double()
             for q in (quantize_along_k, quantize_along_n, quantize_along_t)}  # fmt: skip
    exact_y = along["quantize_along_k"](x) @ along["quantize_along_k"](w).t()
    exact_dx = along["quantize_along_k"](dy) @ along["quantize_along_n"](w).t()
    exact_dw = along["quantize_along_t"](dy) @ along["quantize_along_t"](x).t()
    for got, exact in ((y, exact_y), (dx, exact_dx), (dw, exact_dw)):
        assert (got.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("t", [0, 1, 31, 33, 50, 96])
def test_any_number_of_tokens_gives_finite_gradients_of_the_right_shape(t, device):
    x, w, dy = _data(t, 32, 64, device)
    y, dx, dw = _forward_backward(x, w, dy)
    assert (y.shape, dx.shape, dw.shape) == ((t, 32), (t, 64), (32, 64))
    assert all(v.isfinite().all() for v in (y, dx, dw))
    exact = (dequantize(quantize_along_t(v, RCEIL)).double() for v in (dy, x))
    exact_dw = next(exact) @ next(exact).t()
    assert (dw.double() - exact_dw).norm() <= 1e-6 * exact_dw.norm()


@pytest.mark.parametrize(
    "dy_of",
    [
        lambda t, n: torch.randn(n, t).t(),
        lambda t, n: torch.randn(t, 2 * n)[:, ::2],
        lambda t, n: torch.randn(1, 1).expand(t, n),
        lambda t, n: torch.randn(t, 1).expand(t, n),
        lambda t, n: torch.randn(t + 1, n + 3)[1:, 3:],
    ],
)
def test_a_gradient_of_any_strides_gives_the_contiguous_one_s_result(dy_of, device):
    x, w, _ = _data(64, 96, 160, device)
    dy = dy_of(64, 96).to(device)
    strided, contiguous = _forward_backward(x, w, dy), _forward_backward(x, w, dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


def test_an_unaligned_weight_slice_gives_its_copy_s_result(device):
    x, _, dy = _data(64, 96, 160, device)
    w = torch.randn(97, 161, device=device)[1:, 1:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(_forward_backward(x, w, dy), _forward_backward(x, w.contiguous(), dy), strict=True)
    )


class _Counting:
    """A backend that notes which of its GEMMs ran."""

    def __init__(self):
        self.ran = []

    def __getattr__(self, name):
        self.ran.append(name)
        return getattr(REFERENCE, name)


@pytest.mark.parametrize(
    ("x_needs", "w_needs", "expected"),
    [
        (True, True, {"quantize_weights_for_dx", "dx", "dw"}),
        (True, False, {"quantize_weights_for_dx", "dx"}),
        (False, True, {"dw"}),
    ],
)
def test_a_gradient_that_nobody_asks_for_costs_no_gemm(x_needs, w_needs, expected):
    backend = _Counting()
    x = torch.randn(32, 64, requires_grad=x_needs)
    w = torch.randn(96, 64, requires_grad=w_needs)
    LinearFunction.apply(x, w, None, RCEIL_RECIPE, backend, x.dtype).sum().backward()
    assert set(backend.ran) == {"quantize_tokens", "quantize_weights", "y"} | expected
    assert (x.grad is not None, w.grad is not None) == (x_needs, w_needs)


def test_bf16_wgrad_is_the_unquantized_product(device):
    x, w, dy = _data(96, 64, 32, device, torch.bfloat16)
    recipe = Recipe("mxfp8_emulated_rceil", RCEIL, wgrad_in_mxfp8=False)
    _, _, dw = _forward_backward(x, w, dy, recipe)
    assert torch.equal(dw, dy.t() @ x)


def test_gradients_have_the_dtypes_of_what_they_belong_to(device):
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(96, 64, device=device)
    y, dx, dw = _forward_backward(x, w, torch.randn(32, 96, device=device).bfloat16(), out_dtype=torch.bfloat16)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_output_row_they_belong_to_and_no_other(bad, device):
    x, w, dy = _data(4, 32, 64, device)
    x[1, 5] = bad
    y, _, _ = _forward_backward(x, w, dy)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_a_second_derivative_is_refused():
    x = torch.randn(32, 64, requires_grad=True)
    y = LinearFunction.apply(x, torch.randn(32, 64), None, RCEIL_RECIPE, REFERENCE, x.dtype)
    (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
