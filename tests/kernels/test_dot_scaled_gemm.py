"""The block-scaled GEMMs equal the reference up to the order of fp32 sums: interpreted, emulated or native."""

import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.kernels.dot_scaled_gemm import gemm_of_rows, gemm_over_t
from mxfp8_titan.reference import dot_scaled_gemm as ref
from mxfp8_titan.reference.gemm import dequantize_for_matmul
from mxfp8_titan.reference.quantize import quantize_along_k
from mxfp8_titan.reference.scale_swizzle import swizzle, swizzle_k_groups, swizzle_per_expert, swizzle_t_groups

ERROR = 2.0**-18
"""Of the sum of the products' magnitudes; one fp32 addition costs 2**-24."""

SIZES = {
    "one": [96],
    "uneven": [0, 160, 32],
    "nothing": [0, 0, 0],
    "33": [32 * (i % 3 == 1) for i in range(33)],
    "256": [32 * (i % 29 == 3) for i in range(256)],
}
"""Tokens of each group; 64 rows more belong to nobody."""


def group_ends(sizes, device):
    return torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def operand(device, *shape):
    """A tensor whose rows and blocks differ in magnitude, so that a scale in the wrong place shows."""
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), device=device))
    return x * torch.exp2(torch.randint(-6, 7, (shape[-1] // 32,), device=device)).repeat_interleave(32)


def check(out, want, magnitudes):
    assert ((out - want).abs() <= ERROR * magnitudes).all()
    assert torch.isfinite(out).all()


def rows_case(device, sizes, n, k, rounding=RCEIL):
    """(pair of operands, group ends, reference, sum of magnitudes)."""
    tokens = sum(sizes or [200]) + (64 if sizes else 0)
    ends = group_ends(sizes, device) if sizes else None
    a = quantize_along_k(operand(device, tokens, k), rounding)
    b = quantize_along_k(operand(device, *([len(sizes)] if sizes else []), n, k), rounding)
    if sizes:
        scales = swizzle_t_groups(a.scale, ends), swizzle_per_expert(b.scale)
        a.data[ends[-1] :].view(torch.uint8).fill_(0x7F)
    else:
        scales = swizzle(a.scale), swizzle(b.scale)
    pair = a.data, scales[0], b.data, scales[1]
    left, right = dequantize_for_matmul(a).float().abs(), dequantize_for_matmul(b).float().abs()
    bound = left.nan_to_num(0) @ right.mT.reshape(-1, k, n).sum(0) if sizes else left @ right.mT
    return pair, ends, ref.gemm_of_rows(*pair, ends, torch.float32), bound


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("k", [96, 160, 1376])
def test_dense_rows_match_the_reference(device, k, rounding):
    pair, _, want, bound = rows_case(device, None, 288, k, rounding)
    out = torch.full_like(want, float("nan"))
    gemm_of_rows([pair], None, out)
    check(out, want, bound)


@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [("one", 160, 96), ("uneven", 288, 160), ("nothing", 32, 96), ("33", 32, 96), ("256", 32, 96)],
)
def test_rows_of_groups_match_the_reference_with_zeros_past_the_last(device, sizes, n, k):
    pair, ends, want, bound = rows_case(device, SIZES[sizes], n, k)
    out = torch.full_like(want, float("nan"))
    gemm_of_rows([pair], ends, out)
    check(out, want, bound)
    assert (out[ends[-1] :] == 0).all()


def test_groups_of_any_size_match_the_reference(device):
    pair, ends, want, bound = rows_case(device, [1, 0, 130, 7], 96, 96)
    out = torch.full_like(want, float("nan"))
    gemm_of_rows([pair], ends, out)
    check(out, want, bound)


def test_products_of_two_pairs_are_added_and_the_output_may_be_a_slice(device):
    (first, ends, want, bound), (second, _, more, more_bound) = (
        rows_case(device, SIZES["uneven"], 64, 160) for _ in range(2)
    )
    wide = torch.full((want.shape[0], 160), float("nan"), device=device)
    gemm_of_rows([first, second], ends, wide[:, 32:96])
    check(wide[:, 32:96], want + more, bound + more_bound)
    assert wide[:, :32].isnan().all()
    assert wide[:, 96:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_is_rounded_once(device, dtype):
    pair, _, want, _ = rows_case(device, None, 32, 96)
    out, exact = torch.empty_like(want, dtype=dtype), torch.empty_like(want)
    gemm_of_rows([pair], None, out)
    gemm_of_rows([pair], None, exact)
    torch.testing.assert_close(out, exact.to(dtype), rtol=0, atol=0, equal_nan=True)


def over_t_case(device, sizes, n, k):
    tokens = sum(sizes) + 64 if sizes else 224
    ends = group_ends(sizes, device) if sizes else None
    a, b = (quantize_along_k(operand(device, rows, tokens), RCEIL) for rows in (n, k))
    if sizes:
        # As the quantizers write it: zeros past the last group.
        for data in (a.data, b.data):
            data[:, ends[-1] :].view(torch.uint8).zero_()
    scales = [swizzle_k_groups(q.scale, ends) if sizes else swizzle(q.scale) for q in (a, b)]
    operands = a.data, scales[0], b.data, scales[1]
    bound = dequantize_for_matmul(a).float().abs() @ dequantize_for_matmul(b).float().abs().t()
    return operands, ends, ref.gemm_over_t(*operands, ends, torch.float32), bound


@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [(None, 96, 160), ("one", 160, 96), ("uneven", 96, 1376), ("nothing", 32, 32), ("33", 32, 160), ("256", 32, 32)],
)
def test_products_over_tokens_match_the_reference(device, sizes, n, k):
    operands, ends, want, bound = over_t_case(device, SIZES.get(sizes), n, k)
    out = torch.full_like(want, float("nan"))
    gemm_over_t(*operands, ends, out)
    check(out, want, bound)


def test_a_nan_of_one_group_stays_out_of_the_others(device):
    operands, ends, _, bound = over_t_case(device, [160, 96, 32], 32, 64)
    a, _, b, _ = operands
    for data in (a, b):
        data[:, 160:256].view(torch.uint8).fill_(0x7F)
    out = torch.empty((3, 32, 64), device=device)
    gemm_over_t(*operands, ends, out)
    check(out[[0, 2]], ref.gemm_over_t(*operands, ends, torch.float32)[[0, 2]], bound)
    assert out[1].isnan().all()


def test_no_tokens_give_zeros(device):
    a = torch.empty((32, 0), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((128, 0), dtype=torch.float8_e8m0fnu, device=device)
    out = torch.full((32, 32), float("nan"), device=device)
    gemm_over_t(a, scale, a, scale, None, out)
    assert (out == 0).all()
    b_scale = torch.empty((128, 4), dtype=torch.float8_e8m0fnu, device=device)
    gemm_of_rows([(a.t(), scale, out.to(a.dtype), b_scale)], None, out[:0])


def test_wrong_operands_are_named(device):
    pair, ends, want, _ = rows_case(device, SIZES["uneven"], 64, 96)
    a, a_scale, b, b_scale = pair
    with pytest.raises(ValueError, match=r"group_ends has 2 entries"):
        gemm_of_rows([pair], ends[:2], want)
    with pytest.raises(ValueError, match=r"b is \(3, 64, 96\) with strides .* contiguous"):
        gemm_of_rows([(a, a_scale, b.mT.contiguous().mT, b_scale)], ends, want)
    with pytest.raises(ValueError, match=r"out is \(64, 256\) .* needs \(256, 64\)"):
        gemm_of_rows([pair], ends, want.t())
    with pytest.raises(TypeError, match=r"a is torch.float32"):
        gemm_of_rows([(a.float(), a_scale, b, b_scale)], ends, want)
    with pytest.raises(TypeError, match=r"out is torch.float64"):
        gemm_of_rows([pair], ends, want.double())
    with pytest.raises(ValueError, match=r"b is on meta, needs .*, where out is"):
        gemm_of_rows([(a, a_scale, b.to("meta"), b_scale)], ends, want)


def test_scales_of_another_layout_dtype_or_size_are_named(device):
    (a, a_scale, b, b_scale), ends, want, _ = rows_case(device, SIZES["uneven"], 64, 96)
    with pytest.raises(TypeError, match=r"a_scale is torch.uint8, needs float8_e8m0fnu"):
        gemm_of_rows([(a, a_scale.view(torch.uint8), b, b_scale)], ends, want)
    with pytest.raises(ValueError, match=r"b_scale is .* needs 1536 contiguous bytes in the blocked layout"):
        gemm_of_rows([(a, a_scale, b, b_scale[:1])], ends, want)
    with pytest.raises(ValueError, match=r"a_scale is \(640, 4\) with strides \(1, 640\), needs 2560 contiguous"):
        gemm_of_rows([(a, a_scale.t().contiguous().t(), b, b_scale)], ends, want)
    (a, a_scale, b, b_scale), ends, want, _ = over_t_case(device, SIZES["uneven"], 96, 160)
    with pytest.raises(ValueError, match=r"b_scale is .* needs 5120 contiguous bytes"):
        gemm_over_t(a, a_scale, b, a_scale, ends, want)
    with pytest.raises(ValueError, match=r"a_scale is on meta"):
        gemm_over_t(a, a_scale.to("meta"), b, b_scale, ends, want)


@pytest.mark.gpu
def test_large_operands_match_the_reference(gpu):
    pair, ends, want, bound = rows_case(gpu, [2048, 0, 4096, 1056], 2048, 5120)
    out = torch.full_like(want, float("nan"))
    gemm_of_rows([pair], ends, out)
    check(out, want, bound * 4)
    operands, ends, want, bound = over_t_case(gpu, [2048, 0, 4096, 1056], 2048, 1536)
    out = torch.full_like(want, float("nan"))
    gemm_over_t(*operands, ends, out)
    check(out, want, bound * 4)
