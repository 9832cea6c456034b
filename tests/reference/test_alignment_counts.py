"""The counts of aligned exponents against tensors whose losses are known by construction."""

import pytest
import torch

from mxfp8_titan.format import FLOOR, PHASE_BITS, RCEIL
from mxfp8_titan.reference.alignment_counts import alignment_counts, sampled_rows

PHASE = torch.tensor(0)


def _counts(x, samples=8, group_ends=None, rounding=RCEIL):
    return alignment_counts(x, group_ends, PHASE, rounding, samples).tolist()


def _row(first, second):
    """Two blocks of 32, each of one value."""
    return torch.cat([torch.full((32,), float(first)), torch.full((32,), float(second))])


def test_counts_of_rows_made_by_hand():
    # Under RCEIL a row whose largest element is 256 has scale 1; E4M3's smallest magnitude is 2**-9, half of it ties to
    # zero. 448 is saturated by definition, with nothing cut off.
    x = torch.stack(
        [
            _row(256, 256),  # nothing lost
            _row(256, 2**-9),  # subnormal, not lost
            _row(256, 2**-10),  # the second block becomes zero
            _row(448, 0),  # a block of zeros is not lost
            _row(0, 0),
            _row(float("nan"), 1),
        ]
    )
    x[5, 1:] = 2.0**-20
    assert _counts(x) == [
        [64, 0, 0, 0],
        [64, 0, 0, 0],
        [64, 32, 1, 0],
        [64, 0, 0, 32],
        [64, 0, 0, 0],
        [64, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_an_element_that_its_own_block_loses_too_is_no_underflow_of_alignment():
    x = torch.full((1, 32), 2.0**-10)
    x[0, 0] = 256
    assert _counts(x, 1) == [[32, 0, 0, 0]]
    # With the large element in another block of the row, it is one.
    x = torch.cat([x, torch.full((1, 32), 2.0**-10)], 1)
    assert _counts(x, 1) == [[64, 32, 1, 0]]


def test_floor_saturates_what_rceil_does_not():
    x = torch.full((1, 32), 500.0)
    assert _counts(x, 1, rounding=FLOOR) == [[32, 0, 0, 32]]
    assert _counts(x, 1, rounding=RCEIL) == [[32, 0, 0, 0]]


def test_rows_past_the_last_group_are_not_looked_at():
    x = torch.stack([_row(256, 256), _row(256, 2**-10), _row(float("inf"), 448)])
    ends = torch.tensor([1, 2, 2], dtype=torch.int32)
    assert _counts(x, 3, ends) == [[64, 0, 0, 0], [64, 32, 1, 0], [0, 0, 0, 0]]
    assert _counts(x, 3, torch.zeros_like(ends)) == [[0, 0, 0, 0]] * 3


def test_experts_weights_are_rows_too_whatever_their_strides():
    w = torch.stack([_row(256, 256), _row(256, 2**-10)]).reshape(2, 1, 64).repeat(1, 2, 1)
    want = [[64, 0, 0, 0]] * 2 + [[64, 32, 1, 0]] * 2
    assert _counts(w, 4) == want
    assert _counts(w.mT.contiguous().mT, 4) == want


@pytest.mark.parametrize(("rows", "samples"), [(7, 3), (64, 64), (65, 64), (1000, 64), (3, 8), (0, 4)])
def test_samples_are_distinct_rows_of_the_tensor_in_order(rows, samples):
    for phase in (0, 1, 40503, 2**PHASE_BITS - 1, 2**40 + 5):
        drawn = sampled_rows(rows, samples, phase)
        assert len(drawn) == min(rows, samples)
        assert (drawn.diff() > 0).all()
        assert len(drawn) == 0 or 0 <= drawn[0] <= drawn[-1] < rows


def test_over_all_phases_every_row_is_drawn_equally_often():
    rows, samples = 10, 4
    drawn = torch.cat([sampled_rows(rows, samples, phase) for phase in range(0, 2**PHASE_BITS, 16)])
    share = drawn.bincount(minlength=rows) / len(drawn)
    assert (share - 1 / rows).abs().max() < 1e-3


def test_a_row_without_whole_blocks_is_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        _counts(torch.ones(2, 33))
