"""The 32x32 kernel equals mxfp8_titan.reference.quantize_32x32, bit for bit."""

import pytest
import torch

from mxfp8_titan.format import BLOCKED, FLOOR, PLAIN, RCEIL
from mxfp8_titan.kernels.quantize_32x32 import quantize_32x32_both
from mxfp8_titan.reference import quantize_32x32 as ref
from mxfp8_titan.reference import scale_swizzle


def expected(w, rounding, layout):
    square = ref.quantize_32x32_both(w, rounding)
    if layout == PLAIN:
        return square.along_k, square.along_n, square.scale, square.scale.new_empty(0)
    swizzle = scale_swizzle.swizzle if w.ndim == 2 else scale_swizzle.swizzle_per_expert
    return square.along_k, square.along_n, swizzle(square.scale_along_k()), swizzle(square.scale_along_n())


def same(out, answer):
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.is_contiguous()
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(out, answer, strict=True)
    )


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
@pytest.mark.parametrize("shape", [(128, 128), (32, 32), (96, 160), (2, 64, 96), (3, 160, 32)], ids=str)
def test_equals_the_reference(device, shape, layout, rounding):
    w = (torch.randn(shape, device=device) * torch.exp2(torch.randn(shape, device=device) * 5)).bfloat16()
    assert same(quantize_32x32_both(w, rounding, layout), expected(w, rounding, layout))


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("value", [0.0, 2.0**-149, 449.0, 2.0**127, float("inf"), float("nan")])
def test_rare_values_equal_the_reference(device, value, rounding):
    w = torch.zeros(96, 96, device=device)
    w[33, 70] = value
    w[:32] = value
    assert same(quantize_32x32_both(w, rounding), expected(w, rounding, PLAIN))


@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_strided_weights_equal_the_reference_and_every_byte_is_written(device, layout, poisoned):
    base = torch.randn(2, 128, 192, device=device).bfloat16()
    for w in (base[0, :96, 32:96], base[0].t(), base[:, ::2, 1:65], base.mT, base[:0]):
        assert same(quantize_32x32_both(w, RCEIL, layout), expected(w, RCEIL, layout))


def test_passes_opcheck(device):
    op = torch.ops.mxfp8_titan.quantize_32x32_both.default
    torch.library.opcheck(op, (torch.randn(64, 96, device=device), RCEIL))
    torch.library.opcheck(op, (torch.randn(2, 64, 96, device=device).mT, FLOOR, BLOCKED))


def test_sizes_that_split_a_square_are_refused(device):
    with pytest.raises(ValueError, match="N is 48, needs a multiple of 32"):
        quantize_32x32_both(torch.zeros(48, 64, device=device), RCEIL)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_large_weights_equal_the_reference(gpu, layout):
    w = torch.randn(4, 2048, 5120, device=gpu, dtype=torch.bfloat16)
    assert same(quantize_32x32_both(w, RCEIL, layout), expected(w, RCEIL, layout))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(gpu):
    w = torch.randn(8192, 5120, device=gpu, dtype=torch.bfloat16).expand(64, -1, -1)
    out = quantize_32x32_both(w, RCEIL)
    assert same([t[-1] for t in out[:3]], expected(w[-1], RCEIL, PLAIN)[:3])
