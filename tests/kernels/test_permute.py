import pytest
import torch

from mxfp8_titan.kernels import permute
from mxfp8_titan.reference import permute as reference
from tests.kernels.conftest import INTERPRETED


def _moves(tokens, features, top_k, device, dtype=torch.bfloat16, strided=False):
    slot = torch.randperm(tokens * top_k, device=device)
    row = torch.empty_like(slot)
    row[slot] = torch.arange(tokens * top_k, device=device)
    width = features + 8 if strided else features
    x = torch.randn(tokens, width, device=device).to(dtype)[:, :features]
    rows = torch.randn(tokens * top_k, width, device=device).to(dtype)[:, :features]
    scale = torch.rand(tokens * top_k, device=device)
    return x, rows, scale, slot, row


def _skip_where_casts_truncate(dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("runs on any NVIDIA GPU: the interpreter truncates fp32 to bf16, where the GPU rounds")


CASES = [(33, 96, 1, False), (7, 2050, 2, False), (5, 64, 3, True), (0, 64, 1, False), (1, 5120, 4, True)]


@pytest.mark.parametrize(("tokens", "features", "top_k", "strided"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gathered_rows_equal_the_reference_bit_for_bit(tokens, features, top_k, strided, dtype, device, poisoned):
    _skip_where_casts_truncate(dtype)
    x, _, scale, slot, _ = _moves(tokens, features, top_k, device, dtype, strided)
    for how in (None, scale):
        assert torch.equal(permute.gather_rows(x, slot, top_k, how), reference.gather_rows(x, slot, top_k, how))


@pytest.mark.parametrize(("tokens", "features", "top_k", "strided"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_summed_rows_equal_the_reference_but_for_the_order_of_sums(
    tokens, features, top_k, strided, dtype, device, poisoned
):
    _skip_where_casts_truncate(dtype)
    x, rows, scale, _, row = _moves(tokens, features, top_k, device, dtype, strided)
    for how, base in ((None, x), (scale, None)):
        got = permute.sum_rows(rows, row, top_k, how, base)
        want = reference.sum_rows(rows, row, top_k, how, base)
        if top_k == 1:
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("tokens", "features", "top_k", "strided"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_equal_the_reference_s(tokens, features, top_k, strided, dtype, device):
    _skip_where_casts_truncate(dtype)
    x, rows, scale, _, row = _moves(tokens, features, top_k, device, dtype, strided)
    dx, dscale = permute.gather_rows_backward(rows, x, row, top_k, scale)
    want_dx, want_dscale = reference.gather_rows_backward(rows, x, row, top_k, scale)
    torch.testing.assert_close(dx, want_dx)
    # Sums of `features` products in two orders: each addition rounds by at most 2**-24 of what has been added up.
    magnitudes = (rows[row].float() * x.float().repeat_interleave(top_k, 0)).abs().sum(1)
    bound = torch.empty_like(magnitudes).index_copy_(0, row, 2 * features * 2.0**-24 * magnitudes)
    assert ((dscale - want_dscale).abs() <= bound).all()


def test_a_permutation_of_another_size_or_dtype_is_refused(device):
    x, rows, scale, slot, row = _moves(4, 64, 2, device)
    with pytest.raises(ValueError, match=r"the permutation is torch.int64 \(8,\), needs int64 \(4,\)"):
        permute.gather_rows(x, slot, 1, None)
    with pytest.raises(ValueError, match="needs int64"):
        permute.sum_rows(rows, row.int(), 2, None, None)
    with pytest.raises(TypeError, match="scale is torch.float64"):
        permute.gather_rows(x, slot, 2, scale.double())
    with pytest.raises(ValueError, match="base is torch.bfloat16"):
        permute.sum_rows(rows, row, 2, None, x[:2])
    with pytest.raises(ValueError, match=r"drows is \(8, 32\), needs \(8, 64\)"):
        permute.gather_rows_backward(rows[:, :32], x, row, 2, scale)
    with pytest.raises(TypeError, match="x is torch.int64"):
        permute.gather_rows(x.long(), slot, 2, None)


def test_a_tensor_on_another_device_is_refused(device):
    x, rows, scale, slot, row = _moves(4, 64, 2, device)
    with pytest.raises(ValueError, match=f"the permutation is on meta, needs {device}.*, where x is"):
        permute.gather_rows(x, slot.to("meta"), 2, None)
    with pytest.raises(ValueError, match="scale is on meta"):
        permute.gather_rows(x, slot, 2, scale.to("meta"))
    with pytest.raises(ValueError, match="base is on meta"):
        permute.sum_rows(rows, row, 2, None, x.to("meta"))
    with pytest.raises(ValueError, match="drows is on meta"):
        permute.gather_rows_backward(rows.to("meta"), x, row, 2, scale)
