"""Operands and scales are, byte for byte, what torchao hands to the same PyTorch calls.

Not compared, because torchao 0.18's cast differs from the format's rules there: blocks with an Inf or a NaN, and blocks
whose scale byte is 0 (docs/backends.md). Its reference for groups along T takes whole tiles of columns only.
"""

import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.reference.quantize import quantize_along_k, quantize_along_n, quantize_along_t
from mxfp8_titan.reference.scale_swizzle import swizzle, swizzle_k_groups, swizzle_per_expert, swizzle_t_groups

pytest.importorskip("torchao", reason="compares with torchao==0.18.0: pip install --no-deps torchao==0.18.0")

from torchao.prototype.moe_training.kernels.mxfp8.quant import (
    torch_to_blocked_2d_K_groups,
    torch_to_blocked_2d_M_groups,
    torch_to_blocked_per_group_3d,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.utils import to_blocked

MODES = {FLOOR: ScaleCalculationMode.FLOOR, RCEIL: ScaleCalculationMode.RCEIL}


def source(*shape, dtype=torch.bfloat16):
    """Blocks of all magnitudes whose scale byte is 1 or more, rows and blocks of zeros, one step around 448 * 2**k."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-100, 100, (*shape[:-1], shape[-1] // 32))).repeat_interleave(
        32, -1
    )
    x[..., 1, :] = 0
    x[..., 2, :32] = 0
    x[..., 3, :] = torch.tensor([447.0, 448.0, 449.0, 450.0, 464.0, 480.0, 511.0, 512.0]).repeat(shape[-1] // 8)
    return x.to(dtype)


def theirs(x, rounding):
    """(scale bytes, element bytes)"""
    scale, data = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, MODES[rounding])
    return scale.view(torch.uint8), data.view(torch.uint8)


def check_equal(ours, scale, data):
    assert torch.equal(ours.scale.view(torch.uint8), scale)
    assert torch.equal(ours.data.view(torch.uint8), data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
def test_elements_and_scales_along_every_dim(rounding, dtype):
    x = source(96, 160, dtype=dtype)
    check_equal(quantize_along_k(x, rounding), *theirs(x, rounding))
    y = source(160, 96, dtype=dtype).t()
    check_equal(quantize_along_t(y, rounding), *theirs(y.t(), rounding))
    w = source(3, 64, 96, dtype=dtype).mT
    check_equal(quantize_along_n(w, rounding), *theirs(w.mT, rounding))


@pytest.mark.parametrize("shape", [(128, 4), (96, 5), (300, 43)])
def test_one_matrix_of_scales(shape):
    scale = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(swizzle(scale).view(-1), to_blocked(scale))


SIZES = [[96], [32, 0, 160], [0, 0, 64], [32] * 33]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scales_of_groups_along_rows(sizes):
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    scale = torch.randint(0, 255, (sum(sizes) + 32, 8), dtype=torch.uint8)
    blocked, _ = torch_to_blocked_2d_M_groups(scale, ends)
    assert torch.equal(swizzle_t_groups(scale, ends), blocked)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [96, 128, 300])
def test_scales_of_groups_along_columns(rows, sizes):
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    scale = torch.randint(0, 255, (rows, sum(sizes) // 32 + 1), dtype=torch.uint8)
    blocked, _ = torch_to_blocked_2d_K_groups(scale, ends // 32)
    assert torch.equal(swizzle_k_groups(scale, ends), blocked)


@pytest.mark.parametrize("shape", [(1, 128, 4), (3, 96, 5), (33, 200, 3)])
def test_scales_of_experts(shape):
    scale = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(swizzle_per_expert(scale).view(-1), torch_to_blocked_per_group_3d(scale).reshape(-1))
