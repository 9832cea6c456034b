"""The quantization kernels equal mxfp8_titan.reference.quantize, bit for bit."""

import pytest
import torch

import mxfp8_titan.kernels.quantize as kernels
from mxfp8_titan.format import BLOCKED, FLOOR, PLAIN, RCEIL
from mxfp8_titan.reference import quantize as ref
from mxfp8_titan.reference import scale_swizzle

ROUNDINGS = (FLOOR, RCEIL)
LAYOUTS = (PLAIN, BLOCKED)


def same(out, expected):
    data, scale = out
    assert data.dtype == expected[0].dtype
    assert scale.dtype == expected[1].dtype
    assert data.shape == expected[0].shape
    assert scale.shape == expected[1].shape
    assert data.is_contiguous()
    assert scale.is_contiguous()
    return torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(
        scale.view(torch.uint8), expected[1].view(torch.uint8)
    )


def reference(quantize, x, rounding, layout, group_ends=None, swizzle_groups=None):
    """(data, scale) of the reference, with rows past the last group end taken as zeros."""
    if group_ends is not None:
        x = torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < group_ends[-1], x, 0)
    data, scale = quantize(x, rounding)
    if layout == PLAIN:
        return data, scale
    if group_ends is not None:
        return data, swizzle_groups(scale, group_ends)
    return data, (scale_swizzle.swizzle if x.ndim == 2 else scale_swizzle.swizzle_per_expert)(scale)


def reference_along_k(x, rounding, layout=PLAIN, group_ends=None):
    return reference(ref.quantize_along_k, x, rounding, layout, group_ends, scale_swizzle.swizzle_t_groups)


def reference_along_t(x, rounding, layout=PLAIN, group_ends=None):
    quantize = ref.quantize_along_t if x.ndim == 2 else ref.quantize_along_n
    return reference(quantize, x, rounding, layout, group_ends, scale_swizzle.swizzle_k_groups)


def check_all(x, rounding, layout, group_ends=None):
    along_k = reference_along_k(x, rounding, layout, group_ends)
    along_t = reference_along_t(x, rounding, layout, group_ends)
    both = kernels.quantize_both(x, rounding, layout, group_ends)
    assert same(kernels.quantize_along_k(x, rounding, layout, group_ends), along_k)
    assert same(kernels.quantize_along_t(x, rounding, layout, group_ends), along_t)
    assert same(both[:2], along_k)
    assert same(both[2:], along_t)


def edge_values():
    """Blocks of 32 whose amax sits on every edge of the two roundings."""
    tiny = [0.0, -0.0, 2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 1.1754942e-38, 6.3e-38]
    around = [
        v * 2.0**e for e in (-120, -8, 0, 1, 119) for v in (1.0, 1.75, 1.7500001, 1.875, 1.9999999, 447.0, 448.0, 449.0)
    ]
    rare = [255.9, 464.0, 480.0, 895.0, 3.4028235e38, float("inf"), float("-inf"), float("nan")]
    values = torch.tensor(tiny + around + rare, dtype=torch.float32)
    values = torch.cat([values, torch.nextafter(values, torch.tensor(0.0)), -values])
    blocks = torch.empty(2 * len(values), 32)
    blocks[: len(values)] = values[:, None]
    blocks[len(values) :] = torch.randn(len(values), 32).clamp(-2, 2) * values[:, None].abs() / 2
    blocks[len(values) :, 7] = values
    blocks[len(values) :, 9] = -0.0
    return blocks


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 128), (1, 32), (33, 160), (96, 96), (160, 288), (2, 64, 32), (3, 96, 160)])
def test_every_direction_equals_the_reference(device, shape, layout, rounding):
    x = (
        torch.randn(shape, device=device).to(torch.bfloat16)
        * torch.exp2(torch.randn(shape, device=device) * 3).bfloat16()
    )
    check_all(x, rounding, layout)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_edges_of_the_formats_equal_the_reference(device, dtype, rounding):
    x = edge_values().to(dtype).to(device)
    assert same(kernels.quantize_along_k(x, rounding), reference_along_k(x, rounding))
    x = x.t().contiguous()
    x = x[:, : x.shape[1] // 32 * 32]
    assert same(kernels.quantize_along_t(x, rounding), reference_along_t(x, rounding))
    both = kernels.quantize_both(x, rounding)
    assert same(both[:2], reference_along_k(x, rounding))
    assert same(both[2:], reference_along_t(x, rounding))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [[160], [0, 96, 32], [0, 0, 0, 256], [128, 0, 160, 32], [32, 0, 0] * 11, [32, 0, 64] * 3], ids=str
)
@pytest.mark.parametrize("tail", [0, 96])
def test_groups_equal_the_reference_whatever_lies_past_the_last_one(device, sizes, tail, layout):
    x = torch.randn(sum(sizes) + tail, 96, device=device).bfloat16()
    x[sum(sizes) :] = float("nan")
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    check_all(x, RCEIL, layout, ends)


def test_groups_along_k_may_have_any_size(device):
    x = torch.randn(140, 64, device=device).bfloat16()
    ends = torch.tensor([33, 64, 64, 130], device=device, dtype=torch.int32)
    out = kernels.quantize_along_k(x, RCEIL, BLOCKED, ends)
    assert same(out, reference_along_k(x, RCEIL, BLOCKED, ends))


def test_sizes_that_split_a_block_are_refused_in_debug_mode(device, monkeypatch):
    monkeypatch.setattr("mxfp8_titan.kernels.launch.DEBUG", True)
    x = torch.randn(128, 64, device=device).bfloat16()
    ends = torch.tensor([33, 64, 128], device=device, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[33, 64, 128\].*multiples of 32"):
        kernels.quantize_along_t(x, RCEIL, BLOCKED, ends)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_equal_the_reference(device, layout):
    base = torch.randn(2, 128, 352, device=device).bfloat16()
    for x in (
        base[0, :, 32:192],
        base[0, ::2, 1:65],
        base[0].t(),
        base[0, :, ::2][:, :160],
        base[:, ::2, 32:96],
        base.mT,
    ):
        check_all(x, RCEIL, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_rows_give_empty_data_and_zero_padding(device, layout):
    x = torch.empty(0, 64, device=device, dtype=torch.bfloat16)
    check_all(x, RCEIL, layout)
    check_all(x, RCEIL, layout, torch.zeros(3, device=device, dtype=torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_written(device, layout, poisoned):
    check_all(torch.randn(70, 96, device=device), RCEIL, layout)
    check_all(torch.randn(2, 64, 96, device=device), RCEIL, layout)
    ends = torch.tensor([64, 64, 96], device=device, dtype=torch.int32)
    check_all(torch.randn(160, 96, device=device), RCEIL, layout, ends)


@pytest.mark.parametrize("name", ["quantize_along_k", "quantize_along_t", "quantize_both"])
def test_ops_pass_opcheck(device, name):
    op = getattr(torch.ops.mxfp8_titan, name).default
    ends = torch.tensor([64, 96], device=device, dtype=torch.int32)
    x = torch.randn(128, 64, device=device).bfloat16()
    for layout in LAYOUTS:
        torch.library.opcheck(op, (x, RCEIL, layout, ends))
        torch.library.opcheck(op, (x.t()[:, ::2], RCEIL, layout))
        torch.library.opcheck(op, (torch.randn(2, 96, 64, device=device), FLOOR, layout))


def test_wrong_arguments_are_named(device):
    x = torch.randn(64, 48, device=device)
    with pytest.raises(ValueError, match="K is 48, needs a multiple of 32"):
        kernels.quantize_along_k(x, RCEIL)
    with pytest.raises(ValueError, match="N of w .* is 48"):
        kernels.quantize_along_t(torch.randn(2, 48, 64, device=device), RCEIL)
    with pytest.raises(ValueError, match="rounding is 'ceil'"):
        kernels.quantize_along_t(x, "ceil")
    with pytest.raises(ValueError, match="scale_layout is 'tiled'"):
        kernels.quantize_along_t(x, RCEIL, "tiled")
    with pytest.raises(TypeError, match="group_ends is torch.int64, needs int32"):
        kernels.quantize_along_t(x, RCEIL, PLAIN, torch.tensor([64], device=device))
    with pytest.raises(TypeError, match=r"x is torch.float64"):
        kernels.quantize_along_t(x.double(), RCEIL)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(524288 + 128, 4128), (64, 8192, 5120)], ids=str)
def test_more_than_2_to_the_31_elements(gpu, shape):
    x = torch.randn(shape[-2:], device=gpu, dtype=torch.bfloat16).expand(shape).contiguous()
    for op, expected in (
        (kernels.quantize_along_k, reference_along_k),
        (kernels.quantize_along_t, reference_along_t),
    ):
        data, scale = op(x, RCEIL)
        if x.ndim == 3:
            assert same((data[-1], scale[-1]), expected(x[-1], RCEIL))
        elif op is kernels.quantize_along_k:
            assert same((data[-256:], scale[-256:]), expected(x[-256:], RCEIL))
        else:
            assert same((data[:, -256:].contiguous(), scale[:, -8:].contiguous()), expected(x[-256:], RCEIL))


@pytest.mark.gpu
def test_two_million_rows(gpu):
    x = torch.randn(2_200_000, 64, device=gpu, dtype=torch.bfloat16)
    for layout in LAYOUTS:
        check_all(x, RCEIL, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2080), (1088, 7168), (8, 2048, 1024)], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_inputs_equal_the_reference(gpu, shape, rounding, layout):
    x = torch.randn(shape, device=gpu) * torch.exp2(torch.randn(shape, device=gpu) * 6)
    check_all(x.bfloat16(), rounding, layout)


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu(gpu):
    x = torch.randn(512, 256, device=gpu, dtype=torch.bfloat16)
    ends = torch.tensor([128, 512], device=gpu, dtype=torch.int32)
    kernels.quantize_both(x, RCEIL, BLOCKED, ends)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.quantize_both(x, RCEIL, BLOCKED, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
