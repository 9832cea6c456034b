import pytest
import torch

from mxfp8_titan.backends import reference  # noqa: F401 - registers the ops
from mxfp8_titan.format import RCEIL
from mxfp8_titan.reference.gemm import gemm
from mxfp8_titan.reference.grouped_gemm import group_bounds, grouped_gemm, grouped_gemm_over_rows
from mxfp8_titan.reference.quantize import dequantize, quantize_along_k, quantize_along_t


def _ends(counts, device="cpu"):
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def test_gemm_equals_the_float64_product_of_its_dequantized_operands(device):
    a, b = (quantize_along_k(torch.randn(n, 160, device=device), RCEIL) for n in (50, 70))
    exact = dequantize(a).double() @ dequantize(b).double().t()
    out = gemm(a, b, torch.float32)
    assert (out.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("counts", [[32, 0, 64], [33, 31, 64], [0, 0, 0], [128], [1, 2, 3], [0, 0, 96, 0]])
def test_each_group_is_its_own_product(counts, device):
    x = torch.randn(160, 64, device=device)
    w = torch.randn(len(counts), 96, 64, device=device)
    out = grouped_gemm(quantize_along_k(x, RCEIL), quantize_along_k(w, RCEIL), _ends(counts, device), torch.float32)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        want = gemm(quantize_along_k(x[rows], RCEIL), quantize_along_k(w[expert], RCEIL), torch.float32)
        assert torch.equal(out[rows], want)
        start += count
    assert (out[start:] == 0).all()


@pytest.mark.parametrize("counts", [[32, 0, 64], [33, 31, 64], [0, 0, 0], [128], [1, 2, 3]])
def test_the_product_over_rows_quantizes_each_group_on_its_own(counts, device):
    dy, x = torch.randn(160, 96, device=device), torch.randn(160, 64, device=device)
    out = grouped_gemm_over_rows(dy, x, _ends(counts, device), RCEIL, torch.float32)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        want = gemm(quantize_along_t(dy[rows], RCEIL), quantize_along_t(x[rows], RCEIL), torch.float32)
        assert torch.equal(out[expert], want)
        start += count


def test_group_ends_that_are_no_group_ends_are_refused():
    assert group_bounds(_ends([3, 0, 2]), 5) == [(0, 3), (3, 3), (3, 5)]
    with pytest.raises(ValueError, match="non-decreasing ends between 0 and the 5 rows"):
        group_bounds(torch.tensor([3, 2], dtype=torch.int32), 5)
    with pytest.raises(ValueError, match="non-decreasing ends between 0 and the 5 rows"):
        group_bounds(torch.tensor([3, 6], dtype=torch.int32), 5)
    with pytest.raises(ValueError, match="non-decreasing"):
        group_bounds(torch.tensor([-1, 2], dtype=torch.int32), 5)
    with pytest.raises(TypeError, match="needs int32"):
        group_bounds(torch.tensor([1, 2]), 5)


def test_operands_that_do_not_belong_together_are_refused():
    ends = _ends([10, 10])
    with pytest.raises(ValueError, match="10 and 20 rows, need the same tokens"):
        grouped_gemm_over_rows(torch.zeros(10, 32), torch.zeros(20, 64), ends, RCEIL, torch.float32)
    with pytest.raises(ValueError, match="10 and 20 rows, need the same tokens"):
        torch.ops.mxfp8_titan.reference_dw(torch.zeros(10, 32), torch.zeros(20, 64), None, RCEIL, 1, torch.float32)
    w = quantize_along_k(torch.zeros(3, 32, 64), RCEIL)
    with pytest.raises(ValueError, match="group_ends has 2 entries, needs one for each of 3 experts"):
        grouped_gemm(quantize_along_k(torch.zeros(20, 64), RCEIL), w, ends, torch.float32)
