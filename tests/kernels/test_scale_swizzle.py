"""The swizzle kernels and their inverses equal mxfp8_titan.reference.scale_swizzle, byte for byte."""

import pytest
import torch

import mxfp8_titan.kernels.scale_swizzle as kernels
import mxfp8_titan.kernels.scale_unswizzle as inverse
from mxfp8_titan.reference import scale_swizzle as ref

SHAPES = [(1, 1), (128, 4), (132, 40), (260, 13)]
GROUPS = [[64], [0, 96, 32], [32] * 5, [1056, 0, 160], [0] * 9]


def random_scales(device, *shape):
    return torch.randint(1, 255, shape, dtype=torch.uint8, device=device)


def ends_of(sizes, device):
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def layouts(scale):
    """The same scales row-major, column-major, as slices that start anywhere, and with no dim contiguous."""
    yield scale
    yield scale.mT.contiguous().mT
    rows, cols = scale.shape[-2:]
    wide = torch.zeros((*scale.shape[:-2], rows, cols + 7), dtype=scale.dtype, device=scale.device)
    wide[..., 3 : 3 + cols] = scale
    yield wide[..., 3 : 3 + cols]
    tall = torch.zeros((*scale.shape[:-2], cols, 2 * rows), dtype=scale.dtype, device=scale.device)
    tall[..., ::2] = scale.mT
    yield tall[..., ::2].mT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_matrix_equals_the_reference_in_every_layout(device, shape):
    for scale in layouts(random_scales(device, *shape)):
        assert torch.equal(kernels.swizzle(scale), ref.swizzle(scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_equal_the_reference_in_every_layout(device, shape):
    for scale in layouts(random_scales(device, 3, *shape)):
        assert torch.equal(kernels.swizzle(scale), ref.swizzle_per_expert(scale))


@pytest.mark.parametrize("sizes", GROUPS, ids=lambda s: f"{len(s)}x{s[0]}..{s[-1]}")
@pytest.mark.parametrize("tail", [0, 64])
def test_t_groups_equal_the_reference_in_every_layout(device, sizes, tail):
    ends = ends_of(sizes, device)
    for scale in layouts(random_scales(device, sum(sizes) + tail, 6)):
        assert torch.equal(kernels.swizzle_t_groups(scale, ends), ref.swizzle_t_groups(scale, ends))


@pytest.mark.parametrize("sizes", GROUPS, ids=lambda s: f"{len(s)}x{s[0]}..{s[-1]}")
@pytest.mark.parametrize("tail", [0, 64])
def test_k_groups_equal_the_reference_in_every_layout(device, sizes, tail):
    ends = ends_of(sizes, device)
    for scale in layouts(random_scales(device, 132, (sum(sizes) + tail) // 32)):
        expected = ref.swizzle_k_groups(scale, ends)
        assert torch.equal(kernels.swizzle_k_groups(scale, ends), expected)
        assert torch.equal(kernels.swizzle_k_groups(scale, ends, columns_in_parallel=False), expected)


def test_t_groups_may_have_any_size(device):
    scale, ends = random_scales(device, 141, 8), ends_of([33, 31, 0, 70], device)
    for view in layouts(scale):
        assert torch.equal(kernels.swizzle_t_groups(view, ends), ref.swizzle_t_groups(view, ends))


def test_the_inverse_of_each_returns_the_scales(device):
    scale, ends = random_scales(device, 160, 13), ends_of([96, 0, 32], device)
    assert torch.equal(inverse.unswizzle(ref.swizzle(scale), *scale.shape), scale)
    rows = inverse.unswizzle_t_groups(ref.swizzle_t_groups(scale, ends), ends, *scale.shape)
    cols = inverse.unswizzle_k_groups(ref.swizzle_k_groups(scale, ends), ends, *scale.shape)
    assert torch.equal(rows, torch.where(torch.arange(160, device=device)[:, None] < 128, scale, 0))
    assert torch.equal(cols, torch.where(torch.arange(13, device=device) < 4, scale, 0))
    experts = random_scales(device, 3, 160, 13)
    assert torch.equal(inverse.unswizzle_per_expert(ref.swizzle_per_expert(experts), 160, 13), experts)


def test_every_byte_is_written(device, poisoned):
    scale, ends = random_scales(device, 160, 13), ends_of([96, 0, 32], device)
    assert torch.equal(kernels.swizzle(scale), ref.swizzle(scale))
    assert torch.equal(kernels.swizzle_t_groups(scale, ends), ref.swizzle_t_groups(scale, ends))
    assert torch.equal(kernels.swizzle_k_groups(scale, ends), ref.swizzle_k_groups(scale, ends))
    inverted = inverse.unswizzle_k_groups(ref.swizzle_k_groups(scale, ends), ends, *scale.shape)
    assert torch.equal(inverted[:, 4:], torch.zeros_like(inverted[:, 4:]))


def test_no_scales_are_legal(device):
    ends = torch.zeros(3, dtype=torch.int32, device=device)
    assert kernels.swizzle(random_scales(device, 0, 4)).numel() == 0
    rows, cols = random_scales(device, 0, 4), random_scales(device, 4, 0)
    assert torch.equal(kernels.swizzle_t_groups(rows, ends), ref.swizzle_t_groups(rows, ends))
    assert torch.equal(kernels.swizzle_k_groups(cols, ends), ref.swizzle_k_groups(cols, ends))


def test_ops_pass_opcheck(device):
    ops = torch.ops.mxfp8_titan
    scale, ends = random_scales(device, 132, 132), ends_of([96, 0, 32], device)
    for view in (scale[:, :12], scale[:12].t()):
        torch.library.opcheck(ops.swizzle.default, (view,))
        torch.library.opcheck(ops.swizzle_t_groups.default, (view, ends))
        torch.library.opcheck(ops.swizzle_k_groups.default, (view, ends))
    torch.library.opcheck(ops.swizzle.default, (random_scales(device, 2, 40, 12).mT,))


def test_wrong_arguments_are_named(device):
    with pytest.raises(TypeError, match="scale is torch.float32, needs a dtype of one byte"):
        kernels.swizzle(torch.zeros(4, 4, device=device))
    with pytest.raises(TypeError, match="group_ends is torch.int64, needs int32"):
        kernels.swizzle_k_groups(random_scales(device, 4, 4), torch.tensor([32], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 3, 8, 16, 33, 64, 128, 160, 256])
@pytest.mark.parametrize("shape", [(2048, 512), (5120, 4096), (2176, 1030)], ids=str)
def test_large_matrices_with_any_number_of_groups_equal_the_reference(gpu, shape, groups):
    rows, cols = shape
    cuts = torch.randint(0, cols + 1, (groups,), device=gpu).sort().values
    ends = (cuts * 32).to(torch.int32)
    for scale in layouts(random_scales(gpu, rows, cols)):
        assert torch.equal(kernels.swizzle_k_groups(scale, ends), ref.swizzle_k_groups(scale, ends))
    scale = random_scales(gpu, cols * 32, 160)
    assert torch.equal(kernels.swizzle_t_groups(scale, ends), ref.swizzle_t_groups(scale, ends))


@pytest.mark.gpu
def test_large_experts_equal_the_reference(gpu):
    for scale in layouts(random_scales(gpu, 16, 8192, 160)):
        assert torch.equal(kernels.swizzle(scale), ref.swizzle_per_expert(scale))
