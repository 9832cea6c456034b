import math

import pytest
import torch

from mxfp8_titan.bench.alignment import Totals, align
from mxfp8_titan.format import RCEIL
from mxfp8_titan.reference.quantize import dequantize, quantize_along_k
from mxfp8_titan.reference.quantize_aligned import quantize_aligned_along_k


def test_a_span_of_one_block_is_1x32_and_a_span_of_the_row_is_aligned():
    x = torch.randn(33, 160).exp()
    assert torch.equal(align(x, 32, RCEIL), dequantize(quantize_along_k(x, RCEIL), torch.float32))
    data, scale = quantize_aligned_along_k(x, RCEIL)
    assert torch.equal(align(x, 0, RCEIL), data.float() * scale[:, None])


def test_a_span_that_does_not_divide_the_row_leaves_a_shorter_one_at_its_end():
    x = torch.randn(4, 160).exp()
    got = align(x, 128, RCEIL)
    assert torch.equal(got[:, :128], align(x[:, :128], 0, RCEIL))
    assert torch.equal(got[:, 128:], align(x[:, 128:], 0, RCEIL))


def test_totals_count_what_alignment_changes():
    x = torch.ones(2, 64)
    # Its block's own scale holds it, the row's does not.
    x[0, :32] = 2.0**-30
    totals = Totals()
    totals.add(x, RCEIL)
    totals.add(torch.empty(0, 64), RCEIL)
    row = totals.row()
    assert totals.elements == 128
    assert totals.underflows == 32
    assert row["identical"] == pytest.approx(96 / 128)
    assert row["SQNR 1x32"] == math.inf
    assert row["aligned over the row"] == pytest.approx(10 * math.log10(96 / (32 * 2.0**-60)), abs=0.1)
