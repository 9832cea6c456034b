"""Weights joined along N equal mxfp8_titan.reference.quantize_aligned, bit for bit."""

import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.kernels.quantize_aligned_weights import quantize_aligned_weights, quantize_aligned_weights_along_n
from mxfp8_titan.reference import quantize_aligned as ref
from tests.kernels.test_quantize_aligned import same, spread

PARTS = [
    [(64, 160)],
    [(1, 96), (31, 96)],
    [(1, 32, 40)],
    [(3, 96, 64), (3, 64, 64)],
    [(33, 17, 32), (33, 0, 32), (33, 15, 32)],
]


def check(ws, rounding):
    expected = ref.quantize_aligned_weights(ws, rounding)
    assert same(quantize_aligned_weights(ws, rounding), expected)
    amax = expected[2]
    assert same(
        quantize_aligned_weights_along_n(ws, amax, rounding),
        ref.quantize_aligned_weights_along_n(ws, amax, rounding),
    )


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("shapes", PARTS, ids=str)
def test_joined_weights_equal_the_reference_and_every_byte_is_written(device, poisoned, shapes, rounding):
    check([spread(shape, device) for shape in shapes], rounding)


def test_strided_and_fp32_weights_equal_the_reference(device):
    base = spread((2, 64, 192), device)
    check([base[:, :, 32:96], base[:, ::2, 1:65], base[:, :, 64:128].mT.contiguous().mT], RCEIL)
    check([base[..., :64].float(), base[..., 128:].float()], RCEIL)


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 449.0, float("inf"), float("nan")])
def test_rare_values_equal_the_reference(device, value):
    ws = [torch.randn(2, 32, 64, device=device) for _ in range(2)]
    ws[0][1, 5, 7] = value
    ws[1][0, 20] = value
    ws[1][1, :, 50] = value
    check(ws, RCEIL)


def test_the_maxima_are_those_of_all_parts(device):
    small = torch.full((2, 32, 32), 0.5, device=device)
    amax = quantize_aligned_weights([small, small * 4, small], RCEIL)[2]
    assert torch.equal(amax, torch.full((2, 32), 2.0, device=device))


@pytest.mark.parametrize("shapes", [[(2, 0, 64)], [(0, 32, 64)], [(0, 64)]], ids=str)
def test_weights_without_elements_are_legal(device, shapes):
    ws = [torch.empty(shape, device=device) for shape in shapes]
    data, scale, amax = quantize_aligned_weights(ws, RCEIL)
    assert data.shape == ws[0].shape
    assert scale.shape == ws[0].shape[:-1]
    assert not amax.any()
    assert quantize_aligned_weights_along_n(ws, amax, RCEIL)[0].shape == ws[0].mT.shape


@pytest.mark.parametrize("shapes", [[(48, 64), (16, 64)], [(2, 32, 64), (2, 64, 64)]], ids=str)
def test_ops_pass_opcheck(device, shapes):
    ws = [spread(shape, device) for shape in shapes]
    torch.library.opcheck(torch.ops.mxfp8_titan.quantize_aligned_weights.default, (ws, RCEIL))
    amax = quantize_aligned_weights(ws, RCEIL)[2]
    torch.library.opcheck(torch.ops.mxfp8_titan.quantize_aligned_weights_along_n.default, (ws, amax, RCEIL))


def test_wrong_arguments_are_named(device):
    w = torch.randn(2, 32, 64, device=device)
    with pytest.raises(ValueError, match="ws is empty"):
        quantize_aligned_weights([], RCEIL)
    with pytest.raises(ValueError, match="need the same experts, K and device"):
        quantize_aligned_weights([w, w[..., :32]], RCEIL)
    with pytest.raises(ValueError, match="need the same experts, K and device"):
        quantize_aligned_weights([w, w[0]], RCEIL)
    with pytest.raises(ValueError, match="N of all parts is 33"):
        quantize_aligned_weights_along_n([w, w[:, :1]], w[:, 0], RCEIL)
    with pytest.raises(ValueError, match=r"amax is \(2, 32\), needs \(2, 64\)"):
        quantize_aligned_weights_along_n([w], w[:, 0, :32], RCEIL)
    with pytest.raises(ValueError, match="amax is on meta, needs .*, where ws is"):
        quantize_aligned_weights_along_n([w], w[:, 0].to("meta"), RCEIL)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [[(3, 2048, 5120)] * 2, [(1000, 7168), (24, 7168)], [(64, 32768)]], ids=str)
@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
def test_large_weights_equal_the_reference(gpu, shapes, rounding):
    check([spread(shape, gpu) for shape in shapes], rounding)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(gpu):
    ws = [torch.randn((1, 4096, 4128), device=gpu, dtype=torch.bfloat16).repeat(65, 1, 1) for _ in range(2)]
    last = [w[-1:] for w in ws]
    data, scale, amax = quantize_aligned_weights(ws, RCEIL)
    assert same((data[-1:], scale[-1:], amax[-1:]), ref.quantize_aligned_weights(last, RCEIL))
    del data
    along_n, scale = quantize_aligned_weights_along_n(ws, amax, RCEIL)
    assert same((along_n[-1:], scale[-1:]), ref.quantize_aligned_weights_along_n(last, amax[-1:], RCEIL))
