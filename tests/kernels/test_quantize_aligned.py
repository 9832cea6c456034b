"""The aligned kernels, along K and along T, equal mxfp8_titan.reference.quantize_aligned, bit for bit."""

import pytest
import torch

import mxfp8_titan.kernels.quantize_aligned as along_k
import mxfp8_titan.kernels.quantize_aligned_t as along_t
from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.reference import quantize_aligned as ref

ROUNDINGS = (FLOOR, RCEIL)
SHAPES = [(33, 160), (1, 32), (130, 32), (2, 32, 96)]


def spread(shape, device):
    """Rows and columns of very different magnitudes, so that alignment pushes elements into the subnormals."""
    x = torch.randn(shape, device=device) * torch.exp2(torch.randn(shape, device=device) * 4)
    x.view(-1)[:: x.numel() // 5 + 1] = 0
    return x.bfloat16()


def equal_bits(a, b):
    """Bits are equal; a NaN maximum may be any NaN."""
    if a.dtype == torch.float32:
        a, b = (torch.where(t.isnan(), float("nan"), t) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same(out, expected):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and equal_bits(a, b)
        for a, b in zip(out, expected, strict=True)
    )


def reference_amax(x, ends=None):
    if x.ndim == 3:
        return torch.cat([ref.column_amax(w, None) for w in x])
    return ref.column_amax(x, ends)


def reference_along_t(x, rounding, ends=None):
    if x.ndim == 3:
        each = [ref.quantize_aligned_along_t(w, None, rounding) for w in x]
        return torch.stack([e.data for e in each]), torch.cat([e.scale for e in each])
    return ref.quantize_aligned_along_t(x, ends, rounding)


def reference_requantize(quantized, amax, rounding, ends=None):
    data, scale = quantized
    if data.ndim == 3:
        each = [
            ref.requantize_aligned_along_t(ref.Aligned(d, s), a[None], None, rounding)
            for d, s, a in zip(data, scale, amax, strict=True)
        ]
        return torch.stack([e.data for e in each]), torch.cat([e.scale for e in each])
    return ref.requantize_aligned_along_t(ref.Aligned(data, scale), amax, ends, rounding)


def owned(x, ends):
    """x with rows past the last group end taken as zeros."""
    return torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < ends[-1], x, 0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_directions_equal_the_reference(device, shape, rounding):
    x = spread(shape, device)
    expected = ref.quantize_aligned_along_k(x, rounding)
    amax = reference_amax(x)
    assert same(along_k.quantize_aligned_along_k(x, rounding), expected)
    assert same(along_k.quantize_aligned_along_k_with_amax(x, rounding), (*expected, amax))
    assert same((along_t.column_amax(x),), (amax,))
    assert same(along_t.quantize_aligned_along_t(x, rounding), reference_along_t(x, rounding))
    assert same(along_t.quantize_aligned_along_t(x, rounding, None, amax), reference_along_t(x, rounding))
    assert same(
        along_t.requantize_aligned_along_t(*expected, amax, rounding),
        reference_requantize(expected, amax, rounding),
    )


@pytest.mark.parametrize("sizes", [[0, 0, 64], [1, 0, 130, 33], [128], [0, 3] * 16 + [5]], ids=str)
@pytest.mark.parametrize("tail", [0, 32])
def test_groups_equal_the_reference_whatever_lies_past_the_last_one(device, sizes, tail):
    x = spread((sum(sizes) + tail, 96), device)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    zeroed = owned(x, ends)
    x[sum(sizes) :] = float("nan")
    expected = ref.quantize_aligned_along_k(zeroed, RCEIL)
    amax = ref.column_amax(zeroed, ends)
    assert same(along_k.quantize_aligned_along_k(x, RCEIL, ends), expected)
    assert same(along_k.quantize_aligned_along_k_with_amax(x, RCEIL, ends), (*expected, amax))
    direct = ref.quantize_aligned_along_t(zeroed, ends, RCEIL)
    assert same(along_t.quantize_aligned_along_t(x, RCEIL, ends), direct)
    assert same(along_t.quantize_aligned_along_t(x, RCEIL, ends, amax), direct)
    assert same(
        along_t.requantize_aligned_along_t(*expected, amax, RCEIL, ends),
        reference_requantize(expected, amax, RCEIL, ends),
    )


@pytest.mark.parametrize("sizes", [[0], [1], [128, 129, 0, 127], [40] * 33], ids=str)
def test_padded_ends_equal_the_reference(device, sizes):
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    assert torch.equal(along_t.padded_group_ends(ends), ref.padded_group_ends(ends))


def test_column_maxima_follow_groups_of_any_size(device):
    x = spread((75, 64), device)
    ends = torch.tensor([1, 1, 18, 50, 51, 70], device=device, dtype=torch.int32)
    out = along_k.quantize_aligned_along_k_with_amax(x, RCEIL, ends)
    assert torch.equal(out[2], ref.column_amax(x, ends))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("value", [0.0, 2.0**-149, 2.0**-126, 449.0, 2.0**127, float("inf"), float("nan")])
def test_rare_values_equal_the_reference(device, value, rounding):
    x = torch.randn(32, 64, device=device)
    x[5, 7] = value
    x[20] = value
    x[:, 50] = value
    ends = torch.tensor([7, 30], device=device, dtype=torch.int32)
    assert same(along_t.quantize_aligned_along_t(x, rounding, ends), ref.quantize_aligned_along_t(x, ends, rounding))
    expected = ref.quantize_aligned_along_k(x, rounding)
    amax = reference_amax(x)
    assert same(along_k.quantize_aligned_along_k_with_amax(x, rounding), (*expected, amax))
    assert same(along_t.quantize_aligned_along_t(x, rounding), reference_along_t(x, rounding))
    assert same(along_t.quantize_aligned_along_t(x, rounding, None, amax), reference_along_t(x, rounding))
    assert same(
        along_t.requantize_aligned_along_t(*expected, amax, rounding),
        reference_requantize(expected, amax, rounding),
    )


def test_strided_inputs_equal_the_reference(device):
    base = spread((2, 64, 192), device)
    for x in (base[0, :, 32:192], base[0, ::2, 1:65], base[0].t(), base[:, ::2, 32:96], base.mT):
        assert same(along_k.quantize_aligned_along_k(x, RCEIL), ref.quantize_aligned_along_k(x, RCEIL))
        assert same(along_t.quantize_aligned_along_t(x, RCEIL), reference_along_t(x, RCEIL))


def test_zero_rows_are_legal(device):
    x = torch.empty(0, 64, device=device, dtype=torch.bfloat16)
    ends = torch.zeros(3, device=device, dtype=torch.int32)
    data, scale, amax = along_k.quantize_aligned_along_k_with_amax(x, RCEIL, ends)
    assert data.shape == (0, 64)
    assert torch.equal(amax, torch.zeros(3, 64, device=device))
    out = along_t.requantize_aligned_along_t(data, scale, amax, RCEIL, ends)
    assert same(out, ref.quantize_aligned_along_t(x, ends, RCEIL))


def test_every_byte_is_written(device, poisoned):
    x = spread((160, 96), device)
    ends = torch.tensor([64, 64, 96], device=device, dtype=torch.int32)
    zeroed = owned(x, ends)
    assert same(along_k.quantize_aligned_along_k(x, RCEIL, ends), ref.quantize_aligned_along_k(zeroed, RCEIL))
    assert same(along_t.quantize_aligned_along_t(x, RCEIL, ends), ref.quantize_aligned_along_t(zeroed, ends, RCEIL))
    assert same(along_t.quantize_aligned_along_t(x[:70], RCEIL), reference_along_t(x[:70], RCEIL))


@pytest.mark.parametrize(
    "name", ["quantize_aligned_along_k", "quantize_aligned_along_k_with_amax", "quantize_aligned_along_t"]
)
def test_ops_pass_opcheck(device, name):
    op = getattr(torch.ops.mxfp8_titan, name).default
    x = spread((64, 64), device)
    torch.library.opcheck(op, (x, RCEIL, torch.tensor([32, 32], device=device, dtype=torch.int32)))
    torch.library.opcheck(op, (x.t()[:, ::2], RCEIL))
    torch.library.opcheck(op, (spread((2, 32, 64), device), FLOOR))


def test_padded_ends_pass_opcheck(device):
    ends = torch.tensor([32, 64], device=device, dtype=torch.int32)
    torch.library.opcheck(torch.ops.mxfp8_titan.padded_group_ends.default, (ends,))


def test_requantize_passes_opcheck(device):
    ends = torch.tensor([32, 64], device=device, dtype=torch.int32)
    args = along_k.quantize_aligned_along_k_with_amax(spread((96, 64), device), RCEIL, ends)
    # test_schema compares inputs before and after by arithmetic that PyTorch lacks for FP8.
    torch.library.opcheck(
        torch.ops.mxfp8_titan.requantize_aligned_along_t.default,
        (*args, RCEIL, ends),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_wrong_arguments_are_named(device):
    x = torch.randn(4, 32800, device=device)
    with pytest.raises(ValueError, match="K is 32800, needs at most 32768"):
        along_k.quantize_aligned_along_k(x, RCEIL)
    data, scale = along_k.quantize_aligned_along_k(x[:, :64], RCEIL)
    with pytest.raises(ValueError, match=r"amax is \(2, 64\), data \(4, 64\) needs \(1, 64\)"):
        along_t.requantize_aligned_along_t(data, scale, torch.zeros(2, 64, device=device), RCEIL)
    with pytest.raises(ValueError, match=r"amax is \(2, 64\), x \(4, 64\) needs \(1, 64\)"):
        along_t.quantize_aligned_along_t(x[:, :64], RCEIL, None, torch.zeros(2, 64, device=device))
    with pytest.raises(TypeError, match=r"amax is torch\.int32, needs float32"):
        along_t.quantize_aligned_along_t(x[:, :64], RCEIL, None, torch.zeros(1, 64, device=device, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"scale is \(3,\), data \(4, 64\) needs \(4,\)"):
        along_t.requantize_aligned_along_t(data, scale[:3], torch.zeros(1, 64, device=device), RCEIL)
    with pytest.raises(TypeError, match="need float8_e4m3fn"):
        along_t.requantize_aligned_along_t(x, scale, scale, RCEIL)
    ends = torch.tensor(64, device=device, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"group_ends is \(\), needs one contiguous dim"):
        along_t.quantize_aligned_along_t(x, RCEIL, ends)
    with pytest.raises(ValueError, match="rounding is 'up'"):
        along_t.quantize_aligned_along_t(x, "up")
    amax = torch.zeros(1, 64, device=device)
    with pytest.raises(ValueError, match=r"group_ends is \(\), needs one contiguous dim"):
        along_t.requantize_aligned_along_t(data, scale, amax, RCEIL, ends)
    with pytest.raises(ValueError, match="scale is on meta, needs .*, where data is"):
        along_t.requantize_aligned_along_t(data, scale.to("meta"), amax, RCEIL)
    with pytest.raises(ValueError, match="amax is on meta, needs .*, where data is"):
        along_t.requantize_aligned_along_t(data, scale, amax.to("meta"), RCEIL)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 5120), (1088, 7168), (4, 2048, 1024), (64, 32768)], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_large_inputs_equal_the_reference(gpu, shape, rounding):
    test_both_directions_equal_the_reference(gpu, shape, rounding)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(gpu):
    x = torch.randn((8192, 4128), device=gpu, dtype=torch.bfloat16).repeat(65, 1)
    data, scale, amax = along_k.quantize_aligned_along_k_with_amax(x, RCEIL)
    assert same((data[-256:], scale[-256:]), ref.quantize_aligned_along_k(x[-256:], RCEIL))
    assert torch.equal(amax, reference_amax(x[:8192]))
    transposed, _ = along_t.requantize_aligned_along_t(data, scale, amax, RCEIL)
    expected = reference_requantize((data[-256:], scale[-256:]), amax, RCEIL)
    assert torch.equal(transposed[:, -256:].view(torch.uint8), expected[0].view(torch.uint8))
