"""The SwiGLU kernels give what the reference gives for inputs within the rounding error of the exponential."""

import pytest
import torch

from mxfp8_titan.format import BLOCKED, FLOOR, PLAIN, RCEIL
from mxfp8_titan.kernels.swiglu import swiglu, swiglu_backward
from mxfp8_titan.reference import quantize as ref
from mxfp8_titan.reference import scale_swizzle
from mxfp8_titan.reference import swiglu as ref_swiglu

ERROR = 2.0**-20
"""Relative error of the product that the kernel is allowed: 8 ulp of fp32, far below E4M3's 2**-4."""


def inputs(device, *shape):
    return [(torch.randn(shape, device=device) * scale).bfloat16() for scale in (0.1, 2, 1)]


def check_between(data, scale, h, rounding):
    """Scales and elements lie between those of h shrunk and of h grown by ERROR."""
    low, high = (ref.quantize_along_k(h * (1 + sign * ERROR), rounding) for sign in (-1, 1))
    byte, low_byte, high_byte = (s.view(torch.uint8).int() for s in (scale, low.scale, high.scale))
    assert ((low_byte <= byte) & (byte <= high_byte)).all()
    same_scale = ((low_byte == byte) & (byte == high_byte)).repeat_interleave(32, -1)
    value, low_value, high_value = (d.float().abs() for d in (data, low.data, high.data))
    assert (((low_value <= value) & (value <= high_value)) | ~same_scale).all()
    # Few elements are that close to a boundary: the rest has one answer.
    assert (data.view(torch.uint8) != low.data.view(torch.uint8)).float().mean() < 1e-3


def check(outs, h, rounding, layout, ends=None):
    """outs: data, scale along K, data, scale along T of h."""
    data_k, scale_k, data_t, scale_t = outs
    if layout == BLOCKED and ends is None:
        scale_k = scale_swizzle.unswizzle(scale_k, h.shape[0], h.shape[1] // 32)
        scale_t = scale_swizzle.unswizzle(scale_t, h.shape[1], -(-h.shape[0] // 32))
    elif layout == BLOCKED:
        scale_k = scale_swizzle.unswizzle_t_groups(scale_k, ends, h.shape[0], h.shape[1] // 32)
        scale_t = scale_swizzle.unswizzle_k_groups(scale_t, ends, h.shape[1], h.shape[0] // 32)
    check_between(data_k, scale_k, h, rounding)
    check_between(data_t, scale_t, torch.nn.functional.pad(h, (0, 0, 0, -h.shape[0] % 32)).t(), rounding)


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
@pytest.mark.parametrize("shape", [(128, 128), (33, 160)], ids=str)
def test_both_directions_match_the_reference(device, shape, layout, rounding):
    dh, h1, h3 = inputs(device, *shape)
    check(swiglu(h1, h3, rounding, True, True, layout), ref_swiglu.swiglu(h1, h3), rounding, layout)
    outs = swiglu_backward(dh, h1, h3, rounding, True, True, layout)
    dh1, dh3 = ref_swiglu.swiglu_backward(dh, h1, h3)
    check(outs[:4], dh1, rounding, layout)
    check(outs[4:], dh3, rounding, layout)


def test_groups_match_the_reference_whatever_lies_past_the_last_one(device):
    tensors = inputs(device, 224, 96)
    ends = torch.tensor([96, 96, 160], device=device, dtype=torch.int32)
    for tensor in tensors:
        tensor[160:] = float("nan")
    zeroed = [torch.where(torch.arange(224, device=device)[:, None] < 160, tensor, 0) for tensor in tensors]
    for layout in (PLAIN, BLOCKED):
        outs = swiglu(*tensors[1:], RCEIL, True, True, layout, ends)
        check(outs, ref_swiglu.swiglu(*zeroed[1:]), RCEIL, layout, ends)


def test_one_direction_equals_that_part_of_both_and_every_byte_is_written(device, poisoned):
    dh, h1, h3 = inputs(device, 70, 96)
    both, both_back = swiglu(h1, h3, RCEIL, True, True), swiglu_backward(dh, h1, h3, RCEIL, True, True)
    along_k, along_t = swiglu(h1, h3, RCEIL), swiglu(h1, h3, RCEIL, False, True)
    back_k = swiglu_backward(dh, h1, h3, RCEIL)
    for a, b in zip([*both, *both_back[:2], *both_back[4:6]], [*along_k, *along_t, *back_k], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    check(both, ref_swiglu.swiglu(h1, h3), RCEIL, PLAIN)


def test_halves_of_one_tensor_are_legal(device):
    _, h1, h3 = inputs(device, 64, 96)
    halves = torch.cat([h1, h3], 1).chunk(2, 1)
    for a, b in zip(swiglu(*halves, RCEIL, True, True), swiglu(h1, h3, RCEIL, True, True), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("rows", [0, 64])
def test_ops_pass_opcheck(device, rows):
    dh, h1, h3 = inputs(device, rows, 64)
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu.default, (h1, h3, RCEIL, True, True, BLOCKED))
    torch.library.opcheck(torch.ops.mxfp8_titan.swiglu_backward.default, (dh, h1, h3, RCEIL))


def test_wrong_arguments_are_named(device):
    _, h1, h3 = inputs(device, 64, 48)
    with pytest.raises(ValueError, match="hidden dim of h1 is 48"):
        swiglu(h1, h3, RCEIL)
    with pytest.raises(ValueError, match=r"h3 is \(32, 48\), h1 is \(64, 48\)"):
        swiglu(h1, h3[:32], RCEIL)
    with pytest.raises(ValueError, match="both False"):
        swiglu(h1, h3, RCEIL, False, False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_large_inputs_match_the_reference(gpu, layout):
    test_both_directions_match_the_reference(gpu, (4096, 8192), layout, RCEIL)
