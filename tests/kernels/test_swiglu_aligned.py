"""SwiGLU with one scale per row gives what the reference gives for inputs within the exponential's rounding error."""

import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.kernels.swiglu_aligned import swiglu_aligned, swiglu_aligned_backward
from mxfp8_titan.reference import quantize_aligned as ref_aligned
from mxfp8_titan.reference import swiglu_aligned as ref
from mxfp8_titan.reference.quantize import e8m0_from_amax, e8m0_to_float
from mxfp8_titan.reference.swiglu import swiglu, swiglu_backward

ERROR = 2.0**-20
"""Error that a result is allowed, relative to the largest of the terms that it sums: 8 ulp of fp32."""


def inputs(device, rows, hidden):
    """dh (T, H), h13 (T, 2H) bf16, with rows and columns of very different magnitudes."""
    dh, h13 = (torch.randn(rows, width, device=device) for width in (hidden, 2 * hidden))
    h13[:, hidden:] *= torch.exp2(torch.randn(rows, hidden, device=device) * 3)
    return (dh * 0.1 * torch.exp2(torch.randn(rows, 1, device=device))).bfloat16(), (h13 * 2).bfloat16()


def brackets(dh, h13, ends):
    """(lower, upper) bound (T, ...) fp32 of dh13 and of h."""
    dh, h13 = (ref.owned(x, ends) for x in (dh, h13))
    h1, h3 = h13.chunk(2, 1)
    h = swiglu(h1, h3)
    dh1, dh3 = swiglu_backward(dh, h1, h3)
    s = torch.sigmoid(h1.float())
    terms = (dh.float() * h3.float() * s).abs() * (1 + h1.float().abs() * (1 - s))
    dh13, size = torch.cat([dh1, dh3], 1), torch.cat([terms, dh3.abs()], 1)
    return (dh13 - size * ERROR, dh13 + size * ERROR), (h - h.abs() * ERROR, h + h.abs() * ERROR)


def magnitudes(low, high):
    """The smallest and the largest magnitude of a number between low and high."""
    smallest = torch.where(low * high > 0, torch.minimum(low.abs(), high.abs()), 0)
    return smallest, torch.maximum(low.abs(), high.abs())


def check_rows(data, scale, low, high, rounding):
    """Scales lie between those of the smallest and the largest rows within the bounds, and so do elements."""
    low_byte, high_byte = (e8m0_from_amax(x.amax(1), rounding) for x in magnitudes(low, high))
    assert ((e8m0_to_float(low_byte) <= scale) & (scale <= e8m0_to_float(high_byte))).all()
    sure = low_byte == high_byte
    assert sure.float().mean() > 0.9
    low_data, high_data = (ref_aligned.encode(x, low_byte[:, None]).float()[sure] for x in (low, high))
    assert ((low_data <= data.float()[sure]) & (data.float()[sure] <= high_data)).all()
    # Few elements are that close to a boundary: the rest has one answer.
    assert (low_data != high_data).float().mean() < 1e-2


def check_amax(amax, low, high, ends):
    smallest, largest = (ref_aligned.column_amax(x, ends) for x in magnitudes(low, high))
    assert ((smallest <= amax) & (amax <= largest)).all()


def check(dh, h13, rounding, ends=None):
    data, scale, amax = swiglu_aligned(h13, rounding, ends)
    back = swiglu_aligned_backward(dh, h13, rounding, ends)
    dh13_bounds, h_bounds = brackets(dh, h13, ends)
    check_rows(data, scale, *h_bounds, rounding)
    check_amax(amax, *h_bounds, ends)
    check_rows(*back[:2], *dh13_bounds, rounding)
    check_amax(back[2], *dh13_bounds, ends)
    assert torch.equal(back[3].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(back[4], scale)


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("shape", [(33, 160), (1, 32), (70, 96)], ids=str)
def test_rows_match_the_reference_and_every_byte_is_written(device, poisoned, shape, rounding):
    check(*inputs(device, *shape), rounding)


@pytest.mark.parametrize("sizes", [[0, 0, 64], [17, 0, 30, 32], [40], [0, 3] * 16 + [5]], ids=str)
@pytest.mark.parametrize("tail", [0, 37])
def test_groups_match_the_reference_whatever_lies_past_the_last_one(device, poisoned, sizes, tail):
    dh, h13 = inputs(device, sum(sizes) + tail, 96)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    dh[sum(sizes) :], h13[sum(sizes) :] = float("nan"), float("nan")
    check(dh, h13, RCEIL, ends)
    data, scale, _ = swiglu_aligned(h13, RCEIL, ends)
    assert not data[sum(sizes) :].view(torch.uint8).any()
    assert (scale[sum(sizes) :] == 2.0**-127).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_element_makes_its_row_nan_and_no_other(device, value):
    dh, h13 = inputs(device, 34, 64)
    h13[3, 64 + 5] = value
    dh[7, 6] = value
    data, scale, amax = swiglu_aligned(h13, RCEIL)
    assert (data.view(torch.uint8)[3] == 0x7F).all()
    assert scale.isnan().nonzero().flatten().tolist() == [3]
    assert (~amax[0].isfinite()).nonzero().flatten().tolist() == [5]
    back = swiglu_aligned_backward(dh, h13, RCEIL)
    assert (back[0].view(torch.uint8)[[3, 7]] == 0x7F).all()
    assert back[1].isnan().nonzero().flatten().tolist() == [3, 7]
    assert (~back[2][0].isfinite()).nonzero().flatten().tolist() == [5, 6, 64 + 6]
    assert torch.equal(back[3].view(torch.uint8), data.view(torch.uint8))


def test_strided_inputs_are_legal(device):
    dh, h13 = inputs(device, 32, 192)
    check(dh[:, 32:96], h13[:, 64:192], RCEIL)
    check(dh[::2, :64], h13[::2, :128], RCEIL)
    check(dh.t()[:32, :16].t(), h13[:16, ::2][:, :64], RCEIL)


def test_zero_rows_are_legal(device):
    dh, h13 = inputs(device, 0, 64)
    ends = torch.zeros(3, device=device, dtype=torch.int32)
    out, back = swiglu_aligned(h13, RCEIL, ends), swiglu_aligned_backward(dh, h13, RCEIL, ends)
    assert [tuple(t.shape) for t in out] == [(0, 64), (0,), (3, 64)]
    assert [tuple(t.shape) for t in back] == [(0, 128), (0,), (3, 128), (0, 64), (0,)]
    assert not out[2].any()
    assert not back[2].any()


@pytest.mark.parametrize("rows", [0, 64])
def test_ops_pass_opcheck(device, rows):
    dh, h13 = inputs(device, rows, 64)
    ends = torch.tensor([rows // 2] * 2, device=device, dtype=torch.int32)
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu_aligned.default, (h13, RCEIL, ends))
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu_aligned.default, (h13, FLOOR))
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu_aligned_backward.default, (dh, h13, RCEIL, ends))
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu_aligned_backward.default, (dh, h13, FLOOR))


def test_wrong_arguments_are_named(device):
    dh, h13 = inputs(device, 4, 64)
    with pytest.raises(ValueError, match=r"h13 is \(4, 127\), needs \(T, 2H\)"):
        swiglu_aligned(h13[:, 1:], RCEIL)
    with pytest.raises(ValueError, match="with H at most 32768"):
        swiglu_aligned(torch.zeros(1, 2 * 32800, device=device), RCEIL)
    with pytest.raises(ValueError, match=r"dh is \(4, 32\).*needs \(4, 64\)"):
        swiglu_aligned_backward(dh[:, :32], h13, RCEIL)
    with pytest.raises(ValueError, match="rounding is 'up'"):
        swiglu_aligned(h13, "up")
    with pytest.raises(ValueError, match="dh is on meta, needs"):
        swiglu_aligned_backward(dh.to("meta"), h13, RCEIL)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 8192), (1000, 5120), (300, 1536), (64, 16384), (40, 32768)], ids=str)
@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
def test_large_inputs_match_the_reference(gpu, shape, rounding):
    check(*inputs(gpu, *shape), rounding)
    ends = torch.tensor([5, 5, shape[0] - 30], device=gpu, dtype=torch.int32)
    check(*inputs(gpu, *shape), rounding, ends)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(gpu):
    dh, h13 = inputs(gpu, 4096, 8192)
    dh, h13 = dh.repeat(33, 1), h13.repeat(33, 1)
    back = swiglu_aligned_backward(dh, h13, RCEIL)
    again = swiglu_aligned_backward(dh[-4096:], h13[-4096:], RCEIL)
    for i, out in enumerate(again):
        assert torch.equal((out if i == 2 else back[i][-4096:]).view(torch.uint8), out.view(torch.uint8))
    assert torch.equal(back[2], again[2])
    data, scale, _ = swiglu_aligned(h13, RCEIL)
    assert torch.equal(data.view(torch.uint8), back[3].view(torch.uint8))
    assert torch.equal(scale, back[4])
