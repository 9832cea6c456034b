import pytest
import torch

from mxfp8_titan.format import FLOOR, RCEIL

OPS = torch.ops.mxfp8_titan


def _inputs(strided, device):
    def tensor(*shape):
        t = torch.randn(*shape, device=device)
        return t.mT.contiguous().mT if strided else t

    return tensor(96, 64), tensor(32, 64), tensor(96, 64), tensor(3, 32, 64)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_op_passes_torch_s_own_check_of_custom_ops(strided, out_dtype, device):
    x, w, dy, experts = _inputs(strided, device)
    ends = torch.tensor([32, 32, 70], dtype=torch.int32, device=device)
    for weights, groups in ((w, None), (experts, ends)):
        torch.library.opcheck(OPS.reference_y.default, (x, [weights], groups, RCEIL, out_dtype))
        torch.library.opcheck(OPS.reference_dx.default, (dy, [weights, weights], groups, FLOOR, out_dtype))
        torch.library.opcheck(OPS.reference_dw.default, (dy, x, groups, RCEIL, 2, out_dtype))


def test_joined_weights_give_the_products_of_each_beside_each_other(device):
    x, w, _, _ = _inputs(False, device)
    other = torch.randn_like(w)
    both = OPS.reference_y(x, [w, other], None, RCEIL, torch.float32)
    assert torch.equal(both[:, :32], OPS.reference_y(x, [w], None, RCEIL, torch.float32))
    assert torch.equal(both[:, 32:], OPS.reference_y(x, [other], None, RCEIL, torch.float32))
