"""The blocked scale layout, derived a second time by loops over tiles, and its inverses."""

import pytest
import torch

from mxfp8_titan.reference import scale_swizzle as ref

SHAPES = [(1, 1), (128, 4), (129, 5), (32, 7), (300, 13), (256, 8)]
GROUP_SIZES = [[64], [0, 96, 32], [32] * 33, [0, 0, 0, 256], [128, 0, 160], [0] * 256, [32, 0] * 80]


def random_scales(*shape):
    return torch.randint(1, 255, shape, dtype=torch.uint8)


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def loop_swizzle(scale):
    """One matrix, tile by tile: pad, then place each 128 x 4 tile as 32 rows of 4 x 4 bytes."""
    rows, cols = scale.shape
    tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
    padded = torch.zeros(tile_rows * 128, tile_cols * 4, dtype=torch.uint8)
    padded[:rows, :cols] = scale
    tiles = []
    for i in range(tile_rows):
        for j in range(tile_cols):
            tile = padded[128 * i : 128 * i + 128, 4 * j : 4 * j + 4]
            quarters = [tile[32 * q : 32 * q + 32] for q in range(4)]
            tiles.append(torch.cat(quarters, dim=1).flatten())
    return torch.cat(tiles) if tiles else torch.zeros(0, dtype=torch.uint8)


def loop_swizzle_groups(pieces, total):
    flat = torch.cat([loop_swizzle(piece) for piece in pieces])
    return torch.cat([flat, torch.zeros(total - len(flat), dtype=torch.uint8)])


@pytest.mark.parametrize("shape", SHAPES)
def test_one_matrix_equals_the_loop_over_tiles(shape):
    scale = random_scales(*shape)
    assert torch.equal(ref.swizzle(scale).flatten(), loop_swizzle(scale))


@pytest.mark.parametrize("shape", SHAPES)
def test_per_expert_equals_the_loop_over_experts(shape):
    scale = random_scales(3, *shape)
    assert torch.equal(ref.swizzle_per_expert(scale), torch.stack([loop_swizzle(s) for s in scale]))


@pytest.mark.parametrize("sizes", GROUP_SIZES, ids=str)
@pytest.mark.parametrize("tail", [0, 64])
def test_t_groups_equal_the_loop_over_groups(sizes, tail):
    scale = random_scales(sum(sizes) + tail, 5)
    out = ref.swizzle_t_groups(scale, ends_of(sizes))
    pieces = scale.split([*sizes, tail])[: len(sizes)]
    assert out.shape == (scale.shape[0] + 128 * len(sizes), 8)
    assert torch.equal(out.flatten(), loop_swizzle_groups(pieces, out.numel()))


@pytest.mark.parametrize("sizes", GROUP_SIZES, ids=str)
@pytest.mark.parametrize("tail", [0, 64])
def test_k_groups_equal_the_loop_over_groups(sizes, tail):
    columns = [size // 32 for size in sizes]
    scale = random_scales(130, sum(columns) + tail // 32)
    out = ref.swizzle_k_groups(scale, ends_of(sizes))
    pieces = scale.split([*columns, tail // 32], dim=1)[: len(sizes)]
    assert out.shape == (256, scale.shape[1] + 4 * len(sizes))
    assert torch.equal(out.flatten(), loop_swizzle_groups(pieces, out.numel()))


@pytest.mark.parametrize("shape", SHAPES)
def test_unswizzle_returns_the_scales(shape):
    scale = random_scales(*shape)
    assert torch.equal(ref.unswizzle(ref.swizzle(scale), *shape), scale)
    experts = random_scales(3, *shape)
    assert torch.equal(ref.unswizzle_per_expert(ref.swizzle_per_expert(experts), *shape), experts)


@pytest.mark.parametrize("sizes", GROUP_SIZES, ids=str)
def test_unswizzle_of_groups_returns_the_scales_and_zeros_past_the_last_group(sizes):
    ends, tail = ends_of(sizes), 64
    by_row = random_scales(sum(sizes) + tail, 5)
    by_col = random_scales(130, (sum(sizes) + tail) // 32)
    rows_back = ref.unswizzle_t_groups(ref.swizzle_t_groups(by_row, ends), ends, *by_row.shape)
    cols_back = ref.unswizzle_k_groups(ref.swizzle_k_groups(by_col, ends), ends, *by_col.shape)
    by_row[sum(sizes) :] = 0
    by_col[:, sum(sizes) // 32 :] = 0
    assert torch.equal(rows_back, by_row)
    assert torch.equal(cols_back, by_col)


def test_a_strided_view_gives_the_same_bytes():
    scale = random_scales(200, 12)
    assert torch.equal(ref.swizzle(scale.t()), ref.swizzle(scale.t().contiguous()))


def test_the_dtype_of_the_scales_is_kept():
    scale = random_scales(32, 4).view(torch.float8_e8m0fnu)
    assert ref.swizzle(scale).dtype == torch.float8_e8m0fnu


def test_group_sizes_that_split_a_block_are_refused():
    with pytest.raises(ValueError, match="tokens 0 to 33, needs a size that is a multiple of 32"):
        ref.swizzle_k_groups(random_scales(4, 4), torch.tensor([33, 64], dtype=torch.int32))
