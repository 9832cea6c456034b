"""Aligned exponents: valid MXFP8, equal to 1x32 blocks outside the subnormals, and the same from FP8 data."""

import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.reference import quantize as blocks
from mxfp8_titan.reference import quantize_aligned as aligned

SAFELY_NORMAL = 2.0**-5
"""Twice the smallest normal E4M3 number, which a subnormal may have been rounded up to."""


def ends_of(*sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
def test_the_scale_of_a_row_is_the_largest_of_its_blocks(rounding):
    x = torch.randn(16, 128) * torch.exp2(torch.randn(16, 128) * 4)
    largest = blocks.e8m0_to_float(blocks.quantize_along_k(x, rounding).scale).amax(-1)
    assert torch.equal(aligned.quantize_aligned_along_k(x, rounding).scale, largest)


def test_values_equal_those_of_1x32_blocks_where_neither_is_subnormal():
    x = torch.randn(64, 256) * torch.exp2(torch.randn(64, 256) * 2)
    row = aligned.quantize_aligned_along_k(x, RCEIL)
    normal = row.data.float().abs() >= SAFELY_NORMAL
    assert normal.float().mean() > 0.9
    by_block = blocks.dequantize(blocks.quantize_along_k(x, RCEIL))
    assert torch.equal((row.data.float() * row.scale[:, None])[normal], by_block[normal])


def test_along_t_is_along_k_of_each_group_transposed():
    x, ends = torch.randn(160, 48), ends_of(96, 0, 64)
    out = aligned.quantize_aligned_along_t(x, ends, RCEIL)
    for group, rows, columns in ((0, slice(0, 96), slice(0, 96)), (2, slice(96, 160), slice(128, 192))):
        part = aligned.quantize_aligned_along_k(x[rows].t(), RCEIL)
        assert torch.equal(out.data[:, columns].view(torch.uint8), part.data.view(torch.uint8))
        assert torch.equal(out.scale[group], part.scale)
    assert torch.equal(out.scale[1], torch.full((48,), 2.0**-127))


def test_groups_start_at_multiples_of_128_columns_with_zeros_between_them():
    x, ends = torch.ones(140, 8), ends_of(1, 0, 128, 7)
    data = aligned.quantize_aligned_along_t(x, ends, RCEIL).data
    assert aligned.padded_group_ends(ends).tolist() == [128, 128, 256, 384]
    assert data.shape == (8, 160 + 4 * 128)
    assert data[0].float().nonzero().flatten().tolist() == [0, *range(128, 256), *range(256, 263)]


def test_without_groups_all_rows_are_one_group():
    x = torch.randn(70, 8)
    out = aligned.quantize_aligned_along_t(x, None, RCEIL)
    assert out.data.shape == (8, 96)
    assert torch.equal(out.scale, aligned.quantize_aligned_along_k(x.t(), RCEIL).scale[None])


def test_requantizing_equals_direct_quantization_where_neither_is_subnormal():
    x, ends = torch.randn(128, 64), ends_of(64, 64)
    along_k = aligned.quantize_aligned_along_k(x, RCEIL)
    direct = aligned.quantize_aligned_along_t(x, ends, RCEIL)
    again = aligned.requantize_aligned_along_t(along_k, aligned.column_amax(x, ends), ends, RCEIL)
    assert torch.equal(again.scale, direct.scale)
    columns = torch.cat([torch.arange(64), 128 + torch.arange(64)])
    direct, again = (out.data[:, columns] for out in (direct, again))
    normal = (direct.float().abs() >= SAFELY_NORMAL) & (along_k.data.float().abs() >= SAFELY_NORMAL).t()
    assert normal.float().mean() > 0.95
    assert torch.equal(again.float()[normal], direct.float()[normal])


def test_one_nan_makes_its_row_nan_and_no_other():
    x = torch.ones(3, 64)
    x[1, 5] = float("nan")
    out = aligned.quantize_aligned_along_k(x, RCEIL)
    assert (out.data.view(torch.uint8)[1] == 0x7F).all()
    assert out.scale.isnan().tolist() == [False, True, False]
    assert (out.data.float()[[0, 2]] * out.scale[[0, 2], None] == 1).all()


def test_rows_past_the_last_group_come_out_zero():
    x = torch.full((64, 8), float("nan"))
    x[:32] = 1
    out = aligned.quantize_aligned_along_t(x, ends_of(32), RCEIL)
    assert (out.data.view(torch.uint8)[:, 32:] == 0).all()
    assert (out.scale == 2.0**-8).all()
