import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL
from mxfp8_titan.kernels.alignment_counts import BLOCKS, alignment_counts
from mxfp8_titan.reference import alignment_counts as reference


def _tensor(shape, device, dtype):
    """Blocks of all magnitudes, rows with specials, and enough of what each count counts."""
    x = torch.randn(shape, device=device)
    blocks = x.unflatten(-1, (-1, 32))
    blocks *= torch.exp2(torch.randint(-24, 5, (*blocks.shape[:-1], 1), device=device).float())
    blocks[..., ::3, :] *= (torch.rand(blocks[..., ::3, :].shape, device=device) < 0.5).float()
    rows = x.flatten(0, -2)
    rows[1::2, 0] = 448.0
    rows[3::11, 1] = float("nan")
    rows[5::11, 2] = float("-inf")
    rows[4::9] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("rounding", [FLOOR, RCEIL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(50, 64), (7, 96), (3, 20, 32 * BLOCKS + 64)], ids=str)
def test_counts_equal_the_reference(shape, dtype, rounding, device, poisoned):
    x = _tensor(shape, device, dtype)
    total = 0
    for phase in (2**16 - 1, 40503 * 5):
        phase = torch.tensor(phase, device=device)
        got = alignment_counts(x, None, phase, rounding, 11)
        assert torch.equal(got, reference.alignment_counts(x, None, phase, rounding, 11))
        total = total + got.sum(0)
    assert (total > 0).all()


@pytest.mark.parametrize("ends", [[0, 0, 0], [1, 5, 9], [10, 40, 40], [12, 30, 60]], ids=str)
def test_groups_end_where_their_last_one_does(ends, device, poisoned):
    x = _tensor((60, 64), device, torch.bfloat16)
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    phase = torch.tensor(12345, device=device)
    got = alignment_counts(x, ends, phase, RCEIL, 10)
    assert torch.equal(got, reference.alignment_counts(x, ends, phase, RCEIL, 10))


def test_any_strides_are_read_where_they_are(device):
    w = _tensor((2, 64, 96), device, torch.bfloat16)
    phase = torch.tensor(0, device=device)
    for x in (w.mT, w[:, ::2], w[0].t(), torch.ones((), device=device).expand(9, 64)):
        got = alignment_counts(x, None, phase, RCEIL, 16)
        assert torch.equal(got, reference.alignment_counts(x, None, phase, RCEIL, 16))


def test_no_rows_are_legal(device, poisoned):
    assert not alignment_counts(torch.empty(0, 64, device=device), None, torch.tensor(0, device=device), RCEIL, 4).any()


def test_wrong_arguments_are_named(device):
    x, phase = torch.ones(4, 64, device=device), torch.tensor(0, device=device)
    with pytest.raises(ValueError, match="K is 33, needs a multiple of 32"):
        alignment_counts(x[:, :33], None, phase, RCEIL, 4)
    with pytest.raises(ValueError, match="phase is torch.int32 .* needs a 0-dim int64"):
        alignment_counts(x, None, phase.int(), RCEIL, 4)
    with pytest.raises(TypeError, match="x is torch.int64"):
        alignment_counts(x.long(), None, phase, RCEIL, 4)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31_elements(gpu):
    x = torch.zeros(2**16 + 64, 2**15 + 32, device=gpu, dtype=torch.bfloat16)
    # The last phase samples row 65535 * rows // 65536, the last but one.
    x[-2] = 448.0
    phase = torch.tensor(2**16 - 1, device=gpu)
    assert alignment_counts(x, None, phase, RCEIL, 1).tolist() == [[x.shape[1], 0, 0, x.shape[1]]]
