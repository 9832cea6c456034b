"""Square blocks: one rounding for both layouts, and scales that expand to 1x32 blocks."""

import pytest
import torch

from mxfp8_titan.format import RCEIL
from mxfp8_titan.reference.quantize import Quantized, dequantize, quantize_along_k
from mxfp8_titan.reference.quantize_32x32 import quantize_32x32_both


def test_both_layouts_hold_the_same_numbers():
    w = torch.randn(2, 64, 96)
    out = quantize_32x32_both(w, RCEIL)
    along_k = dequantize(Quantized(out.along_k, out.scale_along_k()))
    along_n = dequantize(Quantized(out.along_n, out.scale_along_n()))
    assert torch.equal(along_k, along_n.mT)


def test_a_square_of_equal_rows_equals_1x32_blocks():
    w = torch.randn(1, 96).expand(32, 96)
    out, rows = quantize_32x32_both(w, RCEIL), quantize_along_k(w, RCEIL)
    assert torch.equal(out.along_k.view(torch.uint8), rows.data.view(torch.uint8))
    assert torch.equal(out.scale_along_k().view(torch.uint8), rows.scale.view(torch.uint8))


def test_sizes_that_split_a_square_are_refused():
    with pytest.raises(ValueError, match=r"\(48, 64\), needs its last two dims to be multiples of 32"):
        quantize_32x32_both(torch.zeros(48, 64), RCEIL)
